// What happened before what, over streams and the host: vector clocks, as in torch.cuda._sanitizer, and two rules.
//
//   use        a tensor is read or written on a stream that has not waited for its last writer (a write: for its readers)
//   give back  memory goes back to the stream that it was made on while another one, not recorded, uses it, and that
//              stream writes to memory that it has taken since without having waited for the other
//
// A stream's clock says how far it has waited for each other stream. An event is a copy of a clock. Memory is compared
// byte by byte, so that two streams may work on two halves of one buffer.
#pragma once
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace pretended {

using StreamId = int64_t;
using Clock = std::map<StreamId, uint64_t>;
using Place = std::shared_ptr<const std::string>;

inline void join(Clock& into, const Clock& from) {
  for (auto& [stream, time] : from) {
    auto& own = into[stream];
    if (own < time) own = time;
  }
}

struct Range {
  const char* begin;
  const char* end;
};

struct Access {
  Range range;
  bool writes;
  StreamId stream;
  uint64_t time;
  Place place;
};

// One launch on a stream: its number there, and the line that it comes from.
struct Launch {
  StreamId stream;
  uint64_t time;
  Place place;
};

class Clocks {
 public:
  static Clocks& get() {
    static auto* all = new Clocks();  // never destroyed: memory is given back after static objects are gone
    return *all;
  }

  Launch launch(StreamId stream, Place place) {
    std::lock_guard<std::recursive_mutex> held(lock);
    auto& clock = streams[stream];
    join(clock, host);  // what the host has waited for is over before anything that it starts now
    return {stream, ++clock[stream], std::move(place)};
  }

  void record(int64_t event, StreamId stream) {
    std::lock_guard<std::recursive_mutex> held(lock);
    join(streams[stream], host);
    events[event] = streams[stream];
  }
  void forget(int64_t event) {
    std::lock_guard<std::recursive_mutex> held(lock);
    events.erase(event);
  }
  void block(int64_t event, StreamId stream) {
    if (is_planted("wait_event")) return;
    std::lock_guard<std::recursive_mutex> held(lock);
    join(streams[stream], events[event]);
  }
  Clock at(StreamId stream) {
    std::lock_guard<std::recursive_mutex> held(lock);
    join(streams[stream], host);
    return streams[stream];
  }
  void wait(StreamId stream, const Clock& clock) {
    std::lock_guard<std::recursive_mutex> held(lock);
    join(streams[stream], clock);
  }
  void host_waits(const Clock& clock) {
    std::lock_guard<std::recursive_mutex> held(lock);
    join(host, clock);
  }
  void host_waits_for_event(int64_t event) {
    std::lock_guard<std::recursive_mutex> held(lock);
    join(host, events[event]);
  }
  void host_waits_for_all() {
    std::lock_guard<std::recursive_mutex> held(lock);
    for (auto& [stream, clock] : streams) join(host, clock);
  }
  Clock of_host() {
    std::lock_guard<std::recursive_mutex> held(lock);
    return host;
  }

  void made(const void* memory, StreamId stream, Place place) {
    std::lock_guard<std::recursive_mutex> held(lock);
    if (memory) blocks[memory] = Block{stream, ++births, std::move(place), {}, {}};
  }
  void record_stream(const void* memory, StreamId stream) {
    if (is_planted("record_stream")) return;
    std::lock_guard<std::recursive_mutex> held(lock);
    auto found = blocks.find(memory);
    if (found != blocks.end()) found->second.recorded.insert(stream);
  }

  void use(const void* memory, Range range, bool writes, const Launch& launch) {
    std::lock_guard<std::recursive_mutex> held(lock);
    auto found = blocks.find(memory);
    if (found == blocks.end() || range.begin >= range.end) return;
    auto& clock = streams[launch.stream];
    if (writes) taken_again(found->second, clock, launch);
    auto& all = found->second.accesses;
    for (size_t i = 0; i < all.size();) {
      auto& other = all[i];
      const bool apart = other.range.end <= range.begin || range.end <= other.range.begin;
      if (!apart && (writes || other.writes) && other.stream != launch.stream && clock[other.stream] < other.time)
        fault(std::string(writes ? "written" : "read") + " on " + name(launch.stream) + " at " + *launch.place +
              " without waiting for what was " + (other.writes ? "written" : "read") + " on " + name(other.stream) +
              " at " + *other.place);
      const bool covered = range.begin <= other.range.begin && other.range.end <= range.end;
      const bool replaced = writes ? covered : covered && !other.writes && other.stream == launch.stream;
      if (replaced) {
        std::swap(other, all.back());
        all.pop_back();
      } else {
        i++;
      }
    }
    all.push_back({range, writes, launch.stream, launch.time, launch.place});
  }

  // Is it free of doubt? Otherwise `given_back` wants the line.
  bool is_settled(const void* memory) {
    std::lock_guard<std::recursive_mutex> held(lock);
    auto found = blocks.find(memory);
    if (found == blocks.end()) return true;
    auto open = open_accesses(found->second);
    if (open.empty()) blocks.erase(found);
    return open.empty();
  }
  void given_back(const void* memory, const Place& place) {
    std::lock_guard<std::recursive_mutex> held(lock);
    auto found = blocks.find(memory);
    if (found == blocks.end()) return;
    auto& block = found->second;
    ghosts[block.stream].push_back({++births, block.place, place, open_accesses(block)});
    blocks.erase(found);
  }
  void forget_memory(const void* memory) {
    std::lock_guard<std::recursive_mutex> held(lock);
    blocks.erase(memory);
  }

  void fault(const std::string& what) {
    std::lock_guard<std::recursive_mutex> held(lock);
    if (active) faults[what]++;
  }
  // A fault planted by a test: leave out the waits or records of one line ("axes/ring.py"), or the n-th one ("#n").
  void plant(const std::string& kind, const std::string& where) {
    std::lock_guard<std::recursive_mutex> held(lock);
    planted_kind = kind;
    planted_where = where;
    planted = 0;
  }
  bool is_planted(const char* kind);  // asks Python for the line, so never under the lock
  std::string name(StreamId stream) {
    auto found = names.find(stream);
    return found != names.end() ? found->second : stream == 0 ? "the default stream" : "stream " + std::to_string(stream);
  }
  void call(StreamId stream, const std::string& what) {
    std::lock_guard<std::recursive_mutex> held(lock);
    names[stream] = what;
  }

  bool active = true;
  int64_t planted = 0;
  std::map<std::string, int64_t> faults;

 private:
  struct Block {
    StreamId stream;  // that it is made on, and goes back to
    int64_t born;
    Place place;
    std::vector<Access> accesses;
    std::set<StreamId> recorded;
  };
  // Memory that was given back while another stream used it: whoever takes it next may overwrite it.
  struct Ghost {
    int64_t died;
    Place made, given_back;
    std::vector<Access> open;
  };
  std::vector<Access> open_accesses(const Block& block) {
    auto& clock = streams[block.stream];
    join(clock, host);
    std::vector<Access> open;
    for (auto& access : block.accesses)
      if (access.stream != block.stream && clock[access.stream] < access.time && !block.recorded.count(access.stream))
        open.push_back(access);
    return open;
  }
  void taken_again(const Block& block, Clock& clock, const Launch& launch) {
    auto found = ghosts.find(block.stream);
    if (found == ghosts.end()) return;
    auto& all = found->second;
    for (size_t i = 0; i < all.size();) {
      if (all[i].died > block.born) {
        i++;
        continue;
      }
      for (auto& access : all[i].open)
        if (clock[access.stream] < access.time)
          fault("memory of " + name(block.stream) + ", made at " + *all[i].made + " and given back at " +
                *all[i].given_back + ", may be written at " + *launch.place + " while " + name(access.stream) +
                " uses it, since " + *access.place);
      all.erase(all.begin() + i);
    }
  }

  std::recursive_mutex lock;
  int64_t births = 0;
  std::unordered_map<StreamId, std::vector<Ghost>> ghosts;
  std::unordered_map<StreamId, Clock> streams;
  std::unordered_map<int64_t, Clock> events;
  std::unordered_map<const void*, Block> blocks;
  std::unordered_map<StreamId, std::string> names;
  Clock host;
  std::string planted_kind, planted_where;
};

}  // namespace pretended

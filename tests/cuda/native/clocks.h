// What happened before what, over streams and the host: vector clocks, as in torch.cuda._sanitizer, and two rules.
//
//   use        a tensor is read or written on a stream that has not waited for its last writer (a write: for its readers)
//   give back  memory goes back to the stream that it was made on while another stream, not recorded, may still use it
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
    if (memory) blocks[memory] = Block{stream, std::move(place), {}, {}};
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

  // What is wrong with it, without the line that gives the memory back.
  std::vector<std::string> given_back(const void* memory) {
    std::lock_guard<std::recursive_mutex> held(lock);
    std::vector<std::string> wrong;
    auto found = blocks.find(memory);
    if (found == blocks.end()) return wrong;
    auto& block = found->second;
    auto& clock = streams[block.stream];
    join(clock, host);
    for (auto& access : block.accesses)
      if (access.stream != block.stream && clock[access.stream] < access.time && !block.recorded.count(access.stream))
        wrong.push_back("memory of " + name(block.stream) + ", made at " + *block.place + ", given back while " +
                        name(access.stream) + " may still use it, since " + *access.place);
    blocks.erase(found);
    return wrong;
  }
  void forget_memory(const void* memory) {
    std::lock_guard<std::recursive_mutex> held(lock);
    blocks.erase(memory);
  }

  void fault(const std::string& what) {
    std::lock_guard<std::recursive_mutex> held(lock);
    if (active) faults[what]++;
  }
  // A fault planted by a test: leave out waits or records, all of them or those of one line.
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
    StreamId stream;
    Place place;
    std::vector<Access> accesses;
    std::set<StreamId> recorded;
  };
  std::recursive_mutex lock;
  std::unordered_map<StreamId, Clock> streams;
  std::unordered_map<int64_t, Clock> events;
  std::unordered_map<const void*, Block> blocks;
  std::unordered_map<StreamId, std::string> names;
  Clock host;
  std::string planted_kind, planted_where;
};

}  // namespace pretended

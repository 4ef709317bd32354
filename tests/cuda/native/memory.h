// Memory of the device and pinned memory, both the host's; copies to the host that are late; random numbers.
#pragma once
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/CPUAllocator.h>
#include <cstdlib>
#include "places.h"

namespace pretended {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;

constexpr int kMaxDevices = 16;
inline int device_count() {
  static const int n = std::getenv("PRETENDED_CUDA_DEVICES") ? atoi(std::getenv("PRETENDED_CUDA_DEVICES")) : 4;
  return n;
}
inline thread_local DeviceIndex current_device = 0;
inline thread_local std::array<StreamId, kMaxDevices> current_streams{};
inline StreamId current_stream() { return current_streams[current_device]; }

inline void leave(const void* memory) {
  if (!Clocks::get().is_settled(memory)) Clocks::get().given_back(memory, here());
}

// ---- the device's --------------------------------------------------------------------------------------------------
inline std::atomic<int64_t> held_bytes{0}, peak_bytes{0};
inline void hold(int64_t bytes) {
  const int64_t now = held_bytes += bytes;
  int64_t peak = peak_bytes;
  while (now > peak && !peak_bytes.compare_exchange_weak(peak, now)) {
  }
}

struct Block {
  void* memory;
  size_t size;
};
inline void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  leave(block->memory);
  held_bytes -= block->size;
  free(block->memory);
  delete block;
}
struct DeviceMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = size ? aligned_alloc(64, (size + 63) / 64 * 64) : nullptr;
    TORCH_CHECK(!size || memory, "CUDA out of memory");
    hold(size);
    Clocks::get().made(memory, current_stream(), here());
    return {memory, new Block{memory, size}, &free_block, Device(DeviceType::CUDA, current_device)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};
inline DeviceMemory device_memory;

// What a CPU kernel has made, as memory of the device.
struct Adopted {
  c10::Storage storage;
  void* memory;
  size_t size;
};
inline void free_adopted(void* context) {
  auto* adopted = static_cast<Adopted*>(context);
  leave(adopted->memory);
  held_bytes -= adopted->size;
  delete adopted;
}
inline c10::DataPtr adopt(const c10::Storage& made, Device device, const Launch& launch) {
  void* memory = made.mutable_data();
  hold(made.nbytes());
  Clocks::get().made(memory, launch.stream, launch.place);
  auto* bytes = static_cast<const char*>(memory);
  Clocks::get().use(memory, {bytes, bytes + made.nbytes()}, true, launch);
  return {memory, new Adopted{made, memory, made.nbytes()}, &free_adopted, device};
}

// Check one tensor's bytes; of a strided tensor those between its first and last element.
inline void use(const at::Tensor& t, bool writes, const Launch& launch) {
  if (!t.defined() || !t.has_storage() || t.numel() == 0) return;
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim(); d++) last += (t.size(d) - 1) * t.stride(d);
  auto* memory = static_cast<const char*>(t.storage().data());
  auto* begin = memory + t.storage_offset() * t.itemsize();
  Clocks::get().use(memory, {begin, begin + (last + 1) * t.itemsize()}, writes, launch);
}

// ---- pinned --------------------------------------------------------------------------------------------------------
// A copy from pinned memory that may not have run yet: what is there must stay until it has.
struct Outgoing {
  const char* memory;
  std::vector<char> content;
  Launch launch;
};
// A copy to pinned memory that has not run yet.
struct Incoming {
  at::Tensor to, from;
  Launch launch;
};

class Pinned final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t size) override {
    void* memory = aligned_alloc(64, (size + 64) / 64 * 64);
    std::lock_guard<std::recursive_mutex> held(lock);
    blocks[static_cast<char*>(memory)] = size ? size : 1;
    Clocks::get().made(memory, -1, nullptr);
    return {memory, memory, &free_pinned, Device(DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }

  bool holds(const void* memory) {
    std::lock_guard<std::recursive_mutex> held(lock);
    auto found = blocks.upper_bound(static_cast<char*>(const_cast<void*>(memory)));
    if (found == blocks.begin()) return false;
    --found;
    return memory < found->first + found->second;
  }

  void send(const at::Tensor& from, const Launch& launch) {
    if (!from.is_contiguous() || from.nbytes() == 0) return;
    auto* memory = static_cast<const char*>(from.const_data_ptr());
    std::lock_guard<std::recursive_mutex> held(lock);
    outgoing.push_back({memory, {memory, memory + from.nbytes()}, launch});
  }
  // The numbers are NaN until somebody waits.
  void receive(const at::Tensor& to, const at::Tensor& from, const Launch& launch) {
    auto image = at::empty_like(to);
    image.copy_(from);
    settle_outgoing(Clocks::get().at(launch.stream));  // in the order of the stream: what it sent before stays right
    if (to.is_floating_point() && to.element_size() > 1) to.fill_(NAN);
    else if (to.dtype() != at::kBool) to.fill_(77);
    std::lock_guard<std::recursive_mutex> held(lock);
    incoming.push_back({to, image, launch});
  }
  // What is over by this clock: copies to pinned memory have arrived, what was sent must be unchanged.
  void settle(const Clock& clock) {
    settle_outgoing(clock);
    std::vector<Incoming> arrived;
    {
      std::lock_guard<std::recursive_mutex> held(lock);
      for (size_t i = 0; i < incoming.size();) {
        if (!is_over(clock, incoming[i].launch)) {
          i++;
          continue;
        }
        arrived.push_back(incoming[i]);
        incoming.erase(incoming.begin() + i);
      }
    }
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    for (auto& copy : arrived) copy.to.copy_(copy.from);
  }

 private:
  static void free_pinned(void* memory);
  static bool is_over(const Clock& clock, const Launch& launch) {
    auto found = clock.find(launch.stream);
    return found != clock.end() && found->second >= launch.time;
  }
  void settle_outgoing(const Clock& clock) {
    std::lock_guard<std::recursive_mutex> held(lock);
    for (size_t i = 0; i < outgoing.size();) {
      if (is_over(clock, outgoing[i].launch)) check_and_drop(i);
      else i++;
    }
  }
  void check_and_drop(size_t i) {
    auto& copy = outgoing[i];
    if (memcmp(copy.memory, copy.content.data(), copy.content.size()) != 0)
      Clocks::get().fault("pinned memory overwritten by the host while the copy of it at " + *copy.launch.place +
                          " on " + Clocks::get().name(copy.launch.stream) + " was on its way");
    outgoing.erase(outgoing.begin() + i);
  }

  std::recursive_mutex lock;
  std::map<char*, size_t> blocks;
  std::vector<Outgoing> outgoing;
  std::vector<Incoming> incoming;
};
inline Pinned pinned_memory;
inline void Pinned::free_pinned(void* memory) {
  auto* begin = static_cast<char*>(memory);
  std::lock_guard<std::recursive_mutex> held(pinned_memory.lock);
  auto& out = pinned_memory.outgoing;
  const char* end = begin + pinned_memory.blocks[begin];
  for (size_t i = 0; i < out.size();) {
    if (out[i].memory >= begin && out[i].memory < end) pinned_memory.check_and_drop(i);  // torch keeps it until then
    else i++;
  }
  pinned_memory.blocks.erase(begin);
  Clocks::get().forget_memory(memory);
  free(memory);
}

// ---- the host waits ------------------------------------------------------------------------------------------------
inline void host_waits_for_stream(const std::string& what, StreamId stream) {
  Counts::get().wait(what);
  if (Clocks::get().is_planted("synchronize")) return;
  const auto clock = Clocks::get().at(stream);
  Clocks::get().host_waits(clock);
  pinned_memory.settle(clock);
}
inline void host_waits_for_event(const std::string& what, int64_t event) {
  if (!what.empty()) Counts::get().wait(what);
  if (!what.empty() && Clocks::get().is_planted("synchronize")) return;
  Clocks::get().host_waits_for_event(event);
  pinned_memory.settle(Clocks::get().of_host());
}
inline void host_waits_for_all(const std::string& what) {
  Counts::get().wait(what);
  if (Clocks::get().is_planted("synchronize")) return;
  Clocks::get().host_waits_for_all();
  pinned_memory.settle(Clocks::get().of_host());
}

// ---- random numbers ------------------------------------------------------------------------------------------------
// The CPU's generator that says it is the device's, except to the CPU's kernels.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex index) : at::CPUGeneratorImpl(c10::default_rng_seed_val), place(DeviceType::CUDA, index) {
    device_ = place;
    CPUGeneratorImpl::set_current_seed(kOther ^ c10::default_rng_seed_val);
  }
  // The same seed gives other numbers than the host's.
  void set_current_seed(uint64_t seed) override {
    given = seed;
    CPUGeneratorImpl::set_current_seed(kOther ^ seed);
  }
  uint64_t current_seed() const override { return given; }
  void as_cpu(bool on) { device_ = on ? Device(DeviceType::CPU) : place; }
  Device place;
  uint64_t given = c10::default_rng_seed_val;
  static constexpr uint64_t kOther = 0x5DEECE66D;
};
inline at::Generator& generator(DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int i = 0; i < device_count(); i++) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all->at(index < 0 ? current_device : index);
}

}  // namespace pretended

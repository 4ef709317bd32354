// A CUDA device that is not there: its memory is the host's, every operation runs torch's CPU kernel, numbers are real.
//
// A CPU build of torch gets a device guard with streams and events, allocators, CUDAHooks, a boxed fallback at the CUDA
// key, and a backend of torch.distributed with NCCL's limits (`nccl.h`). What each operation reads and writes goes to
// `clocks.h`; what makes the host wait is counted in `places.h`.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <unordered_set>
#include "memory.h"

namespace pretended {

using c10::DispatchKey;
using c10::Stream;

inline std::atomic<int64_t> next_stream{1}, next_event{1}, launches{0};
inline int64_t event_number(void* event) { return reinterpret_cast<int64_t>(event); }
Launch launch() {
  launches++;
  return Clocks::get().launch(current_stream(), here());
}

// ---- streams and events --------------------------------------------------------------------------------------------
struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device getDevice() const override { return Device(DeviceType::CUDA, current_device); }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() >= 0 && d.index() < device_count(), "CUDA error: invalid device ordinal ", (int)d.index());
    current_device = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current_device = d.index();
  }
  Device exchangeDevice(Device d) const override {
    auto former = getDevice();
    if (d.index() >= 0) setDevice(d);
    return former;
  }
  DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return c10::DeviceCapability(); }

  static Stream stream(Device d, StreamId id) {
    return Stream(Stream::UNSAFE, Device(DeviceType::CUDA, d.index() < 0 ? current_device : d.index()), id);
  }
  Stream getStream(Device d) const override {
    return stream(d, current_streams[d.index() < 0 ? current_device : d.index()]);
  }
  Stream getDefaultStream(Device d) const override { return stream(d, 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d); }
  Stream getNewStream(Device d, int = 0) const override {
    auto made = stream(d, next_stream++);
    Clocks::get().call(made.id(), "stream " + std::to_string(made.id()) + " of " + *here());
    return made;
  }
  Stream exchangeStream(Stream s) const override {
    auto& current = current_streams[s.device_index()];
    auto former = stream(s.device(), current);
    current = s.id();
    return former;
  }
  void* getStreamNativeHandle(const Stream s) const override { return reinterpret_cast<void*>(s.id()); }

  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = reinterpret_cast<void*>(next_event++);
    Clocks::get().record(event_number(*event), s.id());
  }
  void block(void* event, const Stream& s) const override { Clocks::get().block(event_number(event), s.id()); }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { Clocks::get().forget(event_number(event)); }
  bool queryEvent(void* event) const override {
    host_waits_for_event("", event_number(event));
    return true;
  }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream& s) const override { host_waits_for_stream("synchronize stream", s.id()); }
  void synchronizeEvent(void* e) const override { host_waits_for_event("synchronize event", event_number(e)); }
  void synchronizeDevice(const DeviceIndex) const override { host_waits_for_all("synchronize device"); }
  double elapsedTime(void*, void*, const DeviceIndex) const override { return 1.0; }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& s) const override {
    Clocks::get().record_stream(memory.get(), s.id());
  }
};

// ---- twins: the same memory as a tensor of the CPU -----------------------------------------------------------------
void drop_storage(void* context) { delete static_cast<c10::Storage*>(context); }
c10::DispatchKeySet keys_of(const at::Tensor& t, DispatchKey backend) {
  auto keys = c10::DispatchKeySet(backend);
  return t.is_conj() ? keys.add(DispatchKey::Conjugate) : keys;
}
void copy_geometry(const at::Tensor& from, const at::Tensor& to) {
  to.unsafeGetTensorImpl()->set_storage_offset(from.storage_offset());
  to.unsafeGetTensorImpl()->set_sizes_and_strides(from.sizes(), from.strides());
}

class Twins {
 public:
  at::Tensor of(const at::Tensor& t) {
    for (auto& [twin, original] : tensors)
      if (original.is_same(t)) return twin;
    auto twin = at::detail::make_tensor<c10::TensorImpl>(storage(t.storage()), keys_of(t, DispatchKey::CPU), t.dtype());
    copy_geometry(t, twin);
    if (t.unsafeGetTensorImpl()->is_wrapped_number()) twin.unsafeGetTensorImpl()->set_wrapped_number(true);
    tensors.emplace_back(twin, t);
    return twin;
  }
  // What the operation has done to shapes and memory of its arguments.
  void settle(const Launch& launch) {
    for (auto& [impl, pair] : by_twin) {
      auto& [twin, original] = pair;
      if (twin.data() == original.data() && twin.nbytes() == original.nbytes()) continue;
      auto* changed = original.unsafeGetStorageImpl();
      changed->set_data_ptr_noswap(adopt(twin, original.device(), launch));
      changed->set_nbytes(twin.nbytes());
    }
    for (auto& [twin, original] : tensors)
      if (twin.sizes() != original.sizes() || twin.strides() != original.strides() ||
          twin.storage_offset() != original.storage_offset())
        copy_geometry(twin, original);
  }
  at::Tensor back(const at::Tensor& t, DeviceIndex device, const Launch& launch) {
    if (!t.defined() || !t.device().is_cpu()) return t;
    for (auto& [twin, original] : tensors)
      if (twin.is_same(t)) return original;
    c10::Storage memory;
    auto keys = keys_of(t, DispatchKey::CUDA);
    auto known = by_twin.find(t.storage().unsafeGetStorageImpl());
    const bool is_view = known != by_twin.end();
    if (is_view) {
      memory = known->second.second;
      for (auto& [twin, original] : tensors)  // under inference mode a view is what its tensor is
        if (original.storage().unsafeGetStorageImpl() == memory.unsafeGetStorageImpl()) {
          auto kept = original.key_set().remove(DispatchKey::Conjugate);
          keys = t.is_conj() ? kept.add(DispatchKey::Conjugate) : kept;
          break;
        }
    } else {
      auto data = adopt(t.storage(), Device(DeviceType::CUDA, device), launch);
      memory = c10::Storage(c10::Storage::use_byte_size_t(), t.storage().nbytes(), std::move(data), &device_memory, true);
      by_twin.emplace(t.storage().unsafeGetStorageImpl(), std::make_pair(t.storage(), memory));
    }
    auto made = is_view
        ? at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(memory), keys, t.dtype())
        : at::detail::make_tensor<c10::TensorImpl>(std::move(memory), keys, t.dtype());
    copy_geometry(t, made);
    tensors.emplace_back(t, made);
    return made;
  }

 private:
  c10::Storage storage(const c10::Storage& original) {
    auto found = twin_of.find(original.unsafeGetStorageImpl());
    if (found != twin_of.end()) return found->second;
    c10::DataPtr data(original.mutable_data(), new c10::Storage(original), &drop_storage, Device(DeviceType::CPU));
    c10::Storage twin(c10::Storage::use_byte_size_t(), original.nbytes(), std::move(data), c10::GetCPUAllocator(), true);
    twin_of.emplace(original.unsafeGetStorageImpl(), twin);
    by_twin.emplace(twin.unsafeGetStorageImpl(), std::make_pair(twin, original));
    return twin;
  }
  std::unordered_map<c10::StorageImpl*, std::pair<c10::Storage, c10::Storage>> by_twin;  // -> (twin, original)
  std::unordered_map<c10::StorageImpl*, c10::Storage> twin_of;
  std::vector<std::pair<at::Tensor, at::Tensor>> tensors;  // (twin, original)
};
at::Tensor on_host(const at::Tensor& t) { return t.is_cuda() ? Twins().of(t) : t; }

// ---- every operation without a kernel of its own below -------------------------------------------------------------
const std::unordered_set<std::string> kTakesHostTensors{
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put",
    "aten::_unsafe_index.Tensor"};
const std::unordered_set<std::string> kTellsTheHost{
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2",
    "aten::unique_consecutive", "aten::unique_dim", "aten::nonzero_numpy", "aten::is_nonzero"};

class Operation {
 public:
  Operation(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op(op), schema(op.schema()), stack(stack) {
    name = schema.overload_name().empty() ? schema.name() : schema.name() + "." + schema.overload_name();
    is_view = !schema.returns().empty();
    for (auto& result : schema.returns()) is_view = is_view && result.alias_info() && !result.alias_info()->isWrite();
  }

  void run() {
    const size_t count = schema.arguments().size(), begin = stack->size() - count;
    for (size_t i = 0; i < count; i++) take((*stack)[begin + i], schema.arguments()[i]);
    if (device < 0) device = current_device;
    TORCH_CHECK(host_argument < 0 || kTakesHostTensors.count(name),
                "Expected all tensors to be on the same device, but found at least two devices, cuda:", (int)device,
                " and cpu! (", name, ")");
    count_waits();
    started = is_view ? Launch{current_stream(), 0, nullptr} : launch();
    for (auto& [tensor, writes] : used)
      if (!is_view) use(tensor, writes, started);
    {
      AsCpu undo{generators};
      op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), stack);
    }
    if (is_view && started.place == nullptr) started.place = view_place();
    twins.settle(started);
    const size_t results = schema.returns().size(), first = stack->size() - results;
    for (size_t i = 0; i < results; i++) give_back((*stack)[first + i]);
  }

 private:
  struct AsCpu {
    std::vector<Generator*>& generators;
    explicit AsCpu(std::vector<Generator*>& g) : generators(g) {
      for (auto* one : generators) one->as_cpu(true);
    }
    ~AsCpu() {
      for (auto* one : generators) one->as_cpu(false);
    }
  };
  static Place view_place() {
    static const Place place = std::make_shared<std::string>("a view");
    return place;
  }

  void take(c10::IValue& value, const c10::Argument& argument) {
    const bool writes = argument.alias_info() && argument.alias_info()->isWrite();
    if (value.isTensor()) {
      value = tensor(value.toTensor(), writes);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& t : value.toTensorVector()) all.push_back(tensor(t, writes));
      value = c10::List<at::Tensor>(all);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> all;
      for (auto t : value.toOptionalTensorVector()) all.push_back(t && t->defined() ? std::optional(index(*t)) : t);
      value = all;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      if (device < 0 && value.toDevice().has_index()) device = value.toDevice().index();
      value = Device(DeviceType::CPU);
    } else if (value.isGenerator()) {
      draws_from(value.toGenerator());
    } else if (value.isNone() && argument.name() == "generator") {
      value = generator(device);
      draws_from(value.toGenerator());
    }
  }
  at::Tensor tensor(const at::Tensor& t, bool writes) {
    if (!t.defined()) return t;
    if (t.is_cuda()) {
      TORCH_CHECK(device < 0 || device == t.device().index(), "Expected all tensors to be on the same device: ", name);
      device = t.device().index();
      used.emplace_back(t, writes);
      return twins.of(t);
    }
    if (t.device().is_cpu() && t.dim() > 0) host_argument = 1;
    return t;
  }
  at::Tensor index(const at::Tensor& t) {
    by_mask = by_mask || t.dtype() == at::kBool || t.dtype() == at::kByte;
    by_host = by_host || t.device().is_cpu();
    return tensor(t, false);
  }
  void draws_from(const at::Generator& g) {
    if (auto* own = dynamic_cast<Generator*>(g.unsafeGetGeneratorImpl())) generators.push_back(own);
  }
  void count_waits() {
    if (kTellsTheHost.count(name)) host_waits_for_stream(name, current_stream());
    if (name == "aten::repeat_interleave.Tensor" && (*stack)[stack->size() - 1].isNone())
      host_waits_for_stream(name, current_stream());
    const bool indexes = name.rfind("aten::index", 0) == 0 || name == "aten::_index_put_impl_";
    if (indexes && by_mask) host_waits_for_stream(name + " by a mask", current_stream());
    else if (indexes && by_host) host_waits_for_stream(name + " from the host", current_stream());
  }
  void give_back(c10::IValue& value) {
    if (value.isTensor()) {
      value = twins.back(value.toTensor(), device, started);
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> all;
      for (const at::Tensor& t : value.toTensorVector()) all.push_back(twins.back(t, device, started));
      value = c10::List<at::Tensor>(all);
    }
  }

  const c10::OperatorHandle& op;
  const c10::FunctionSchema& schema;
  torch::jit::Stack* stack;
  std::string name;
  bool is_view, by_mask = false, by_host = false;
  DeviceIndex device = -1;
  int host_argument = -1;
  Twins twins;
  std::vector<std::pair<at::Tensor, bool>> used;
  std::vector<Generator*> generators;
  Launch started;
};
void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) { Operation(op, stack).run(); }

// ---- memory and copies ---------------------------------------------------------------------------------------------
Device placed(std::optional<Device> device, std::optional<bool> pin) {
  auto d = device.value_or(Device(DeviceType::CUDA, current_device));
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  TORCH_CHECK(d.index() < device_count(), "CUDA error: invalid device ordinal");
  return d.has_index() ? d : Device(DeviceType::CUDA, current_device);
}
at::ScalarType scalar(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
}
at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard on(placed(device, pin));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory, c10::DispatchKeySet(DispatchKey::CUDA),
                                   scalar(dtype), format);
}
at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin) {
  c10::DeviceGuard on(placed(device, pin));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory,
                                           c10::DispatchKeySet(DispatchKey::CUDA), scalar(dtype));
}
void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  c10::DeviceGuard on(storage->device());
  auto memory = device_memory.allocate(bytes);
  if (bytes && storage->data()) memcpy(memory.mutable_get(), storage->data(), std::min(bytes, storage->nbytes()));
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}
const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  const size_t needed = (impl->numel() + impl->storage_offset()) * self.element_size();
  if (needed > self.storage().nbytes()) resize_storage(self.storage().unsafeGetStorageImpl(), needed);
  return self;
}
at::Tensor& set_part(at::Tensor& self, at::Storage s, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  TORCH_CHECK(s.device().is_cuda(), "set_: storage of another device");
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(s);
  self.unsafeGetTensorImpl()->set_storage_offset(offset.expect_int());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}
at::Tensor& set_storage(at::Tensor& self, at::Storage s) {
  const c10::SymInt count(static_cast<int64_t>(s.nbytes() / self.element_size())), one(1);
  return set_part(self, s, 0, c10::SymIntArrayRef(count), c10::SymIntArrayRef(one));
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& from) {
  return set_part(self, from.storage(), from.storage_offset(), from.sym_sizes(), from.sym_strides());
}
at::Tensor& set_nothing(at::Tensor& self) { return set_tensor(self, at::empty({0}, self.options())); }

// cudaMemcpyAsync takes less than this from pageable memory at once; more makes the host wait.
constexpr size_t kStaged = 64 << 10;

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool non_blocking) {
  if (self.is_same(from)) return self;
  const bool to_host = !self.is_cuda(), from_host = !from.is_cuda();
  const auto& host = to_host ? self : from;
  const bool pinned = (to_host || from_host) && pinned_memory.holds(host.storage().data());
  const bool waits = (to_host || from_host) &&
                     (!non_blocking || (!pinned && (to_host || from.nbytes() > kStaged)));
  const auto started = launch();
  use(from, false, started);
  use(self, true, started);
  auto to_twin = on_host(self), from_twin = on_host(from);
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  if (from_host && pinned) {
    pinned_memory.settle(Clocks::get().at(started.stream));
    if (!waits) pinned_memory.send(from_twin, started);
  }
  if (to_host && pinned && !waits) {
    pinned_memory.receive(to_twin, from_twin, started);
    return self;
  }
  if (waits) {
    const std::string kind = pinned ? "pinned memory" : "pageable memory";
    host_waits_for_stream(to_host ? "copy to " + kind : "copy from " + kind, started.stream);
  }
  to_twin.copy_(from_twin);
  return self;
}
void foreach_copy_(at::TensorList to, at::TensorList from, bool non_blocking) {
  for (size_t i = 0; i < to.size(); i++) {
    auto one = to[i];
    one.copy_(from[i], non_blocking);
  }
}
void record_stream(at::Tensor& self, Stream s) { Clocks::get().record_stream(self.storage().data(), s.id()); }
at::Tensor sdpa(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& mask, double p,
                bool causal, std::optional<double> scale, bool gqa) {
  for (auto& t : {k, v}) TORCH_CHECK(t.device() == q.device(), "attention: devices differ");
  if (mask) TORCH_CHECK(mask->device() == q.device(), "attention: mask on another device");
  auto added = mask;
  if (mask && mask->dtype() == at::kBool)
    added = at::zeros_like(*mask, q.options()).masked_fill_(mask->logical_not(), -INFINITY);
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, added, p, causal, std::nullopt, scale, gqa));
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_part));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_foreach_copy_", TORCH_FN(foreach_copy_));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("scaled_dot_product_attention", TORCH_FN(sdpa));
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, m) { m.impl("scaled_dot_product_attention", TORCH_FN(sdpa)); }

}  // namespace pretended

namespace at {
using namespace pretended;
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const Generator& getDefaultGenerator(DeviceIndex i) const override { return generator(i); }
  Generator getNewGenerator(DeviceIndex i) const override {
    return at::make_generator<pretended::Generator>(i < 0 ? pretended::current_device : i);
  }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, 0); }
  bool isPinnedPtr(const void* p) const override { return pinned_memory.holds(p); }
  Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  Allocator* getCUDADeviceAllocator() const override { return &device_memory; }
  DeviceIndex current_device() const override { return pretended::current_device; }
  DeviceIndex deviceCount() const override { return device_count(); }
  void setCurrentDevice(DeviceIndex i) const override { pretended::current_device = i; }
  DeviceIndex getCurrentDevice() const override { return pretended::current_device; }
  DeviceIndex exchangeDevice(DeviceIndex i) const override {
    auto former = pretended::current_device;
    if (i >= 0) pretended::current_device = i;
    return former;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return exchangeDevice(i); }
  int getNumGPUs() const override { return device_count(); }
  void deviceSynchronize(DeviceIndex) const override { host_waits_for_all("synchronize device"); }
};
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, CUDAHooks);
}  // namespace at

#include "nccl.h"

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace pretended;
  py::module_::import("torch._C._distributed_c10d");
  static c10::impl::DeviceGuardImplRegistrar registered(DeviceType::CUDA, new Guard());
  c10::SetAllocator(DeviceType::CUDA, &device_memory, 1);
  m.def("is_hooked", [] { return at::detail::getCUDAHooks().hasCUDA(); });
  m.def("device_count", &device_count);
  m.def("get_device", [] { return (int)pretended::current_device; });
  m.def("set_device", [](int i) { Guard().setDevice(Device(DeviceType::CUDA, i)); });
  m.def("generator", [](int i) { return generator(i); });
  m.def("resize_storage", [](at::Tensor t, int64_t bytes) { resize_storage(t.storage().unsafeGetStorageImpl(), bytes); });
  m.def("host_view", [](const at::Tensor& t) { return on_host(t.detach()); });
  m.def("touch", [](const at::Tensor& t, bool writes) { use(t, writes, launch()); });
  m.def("to_device", [](const at::Tensor& t) {  // memory that a kernel of ours has made
    Twins twins;
    return twins.back(t.contiguous(), pretended::current_device, launch());
  });
  m.def("allocated", [] { return held_bytes.load(); });
  m.def("peak", [] { return peak_bytes.load(); });
  m.def("reset_peak", [] { peak_bytes = held_bytes.load(); });
  m.def("launches", [] { return launches.load(); });
  m.def("sent", [] { return sent_bytes.load(); });
  m.def("count_waits", [](bool on) { Counts::get().active = on; });
  m.def("warn_of_waits", [](bool on) { Counts::get().warns = on; });
  m.def("warns_of_waits", [] { return Counts::get().warns; });
  m.def("waits", [] { return Counts::get().waits; });
  m.def("forget_waits", [] { Counts::get().waits.clear(); });
  m.def("faults", [] { return Clocks::get().faults; });
  m.def("plant", [](std::string kind, std::string where) { Clocks::get().plant(kind, where); });
  bind_nccl(m);
}

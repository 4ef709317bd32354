// A backend of torch.distributed that is NCCL for torch: it refuses what NCCL refuses and sends through gloo.
//
// A collective runs on a stream of its group, after the stream that starts it, or on that stream itself where nobody
// asked for it to be asynchronous. Its results are NaN until somebody waits, and then belong to the stream that waits.
#pragma once
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include "memory.h"

namespace pretended {
using namespace c10d;
using Tensors = std::vector<at::Tensor>;
using Copies = std::vector<std::pair<at::Tensor, at::Tensor>>;  // from the second to the first once somebody waits
using WorkPtr = c10::intrusive_ptr<Work>;
inline std::atomic<int64_t> sent_bytes{0};
at::Tensor on_host(const at::Tensor& t);

class Late final : public Work {
 public:
  Late(int rank, OpType op, WorkPtr inner, Tensors outputs, Copies copies, Clock end, Tensors kept)
      : Work(rank, op), inner(std::move(inner)), outputs(std::move(outputs)), copies(std::move(copies)), end(std::move(end)),
        kept(std::move(kept)), future(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}
  ~Late() override {
    if (done) return;
    static auto* shelf = new Tensors();  // torch keeps them until its watchdog sees the end
    shelf->insert(shelf->end(), kept.begin(), kept.end());
  }
  bool isCompleted() override { return done || inner->isCompleted(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds timeout) override {
    if (Clocks::get().is_planted("work_wait")) return true;
    Clocks::get().wait(current_stream(), end);
    if (!done) {
      inner->wait(timeout);
      settle();
    }
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  Tensors result() override { return outputs; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    return future;
  }

 private:
  void settle() {
    std::lock_guard<std::mutex> held(lock);
    if (done) return;
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    for (auto& [to, from] : copies) to.copy_(from);
    copies.clear();
    kept.clear();
    done = true;
    if (!future->completed()) future->markCompleted(c10::IValue(outputs));
  }
  WorkPtr inner;
  Tensors outputs;
  Copies copies;
  Clock end;
  Tensors kept;  // torch stashes what a collective reads and writes until somebody waits
  c10::intrusive_ptr<c10::ivalue::Future> future;
  std::atomic<bool> done{false};
  std::mutex lock;
};

class Several final : public Work {
 public:
  explicit Several(std::vector<WorkPtr> works)
      : Work(-1, OpType::COALESCED), works(std::move(works)),
        future(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}
  bool isCompleted() override {
    for (auto& work : works)
      if (!work->isCompleted()) return false;
    return true;
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds timeout) override {
    for (auto& work : works) work->wait(timeout);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    if (!future->completed()) future->markCompleted(c10::IValue(Tensors{}));
    return future;
  }

 private:
  std::vector<WorkPtr> works;
  c10::intrusive_ptr<c10::ivalue::Future> future;
};

// NCCLUtils.hpp: the types that it knows. Results must be in one piece.
inline void check(const char* what, const at::Tensor& t, bool dense = true) {
  TORCH_CHECK(t.is_cuda(), "No backend type associated with device type cpu (", what, "): Tensors must be CUDA and dense");
  TORCH_CHECK(!t.is_sparse(), "Tensors must be dense (", what, ")");
  switch (t.scalar_type()) {
    case at::kChar: case at::kByte: case at::kFloat: case at::kDouble: case at::kInt: case at::kLong: case at::kHalf:
    case at::kBool: case at::kBFloat16: case at::kFloat8_e4m3fn: case at::kFloat8_e5m2:
      break;
    default:
      TORCH_CHECK(false, "Input tensor data type is not supported for NCCL process group: ", t.scalar_type(), " (", what, ")");
  }
  TORCH_CHECK(!dense || t.is_contiguous(t.suggest_memory_format()), "Tensors must be contiguous (", what, ")");
}

class PretendedNCCL final : public Backend {
 public:
  struct NcclOptions final : Backend::Options {
    explicit NcclOptions(bool high = false) : Backend::Options("nccl"), is_high_priority_stream(high) {}
    bool is_high_priority_stream;
  };
  PretendedNCCL(c10::intrusive_ptr<Backend> gloo, int rank, int size, c10::intrusive_ptr<NcclOptions> options)
      : Backend(rank, size), gloo(std::move(gloo)), options(std::move(options)) {}
  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Backend::Options> getBackendOptions() override { return options; }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { coalesces = true; }
  WorkPtr endCoalescing() override {
    coalesces = false;
    return c10::make_intrusive<Several>(std::exchange(batch, {}));
  }
  void setTimeout(std::chrono::milliseconds timeout) override { options->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return number; }
  void shutdown() override { gloo->shutdown(); }
  void abort() override { gloo->abort(); }

  WorkPtr broadcast(Tensors& ts, const BroadcastOptions& o) override {
    check("broadcast", ts[0]);
    const auto end = start(o.asyncOp, ts, ts);
    auto own = image(ts[0]);
    poison(ts[0]);
    Tensors sent{bytes(own)};
    return late(OpType::BROADCAST, gloo->broadcast(sent, o), ts, {{on_host(ts[0]), own}}, end, ts);
  }
  WorkPtr allreduce(Tensors& ts, const AllreduceOptions& o) override {
    check("all_reduce", ts[0]);
    const bool mean = o.reduceOp == ReduceOp::AVG, truth = ts[0].scalar_type() == at::kBool;
    TORCH_CHECK(!(truth && mean), "Cannot use ReduceOp.AVG with boolean inputs");
    TORCH_CHECK(o.reduceOp != ReduceOp::BAND && o.reduceOp != ReduceOp::BOR && o.reduceOp != ReduceOp::BXOR,
                "Cannot use bitwise ReduceOp with NCCL");
    const auto end = start(o.asyncOp, ts, ts);
    auto own = image(ts[0]);
    Tensors sent{truth ? own.to(at::kByte) : own};
    auto told = o;
    if (mean) told.reduceOp = ReduceOp::SUM;
    auto work = gloo->allreduce(sent, told);
    if (mean || truth) work->wait();
    if (mean) sent[0].div_(size_);
    if (truth) own = sent[0].to(at::kBool);
    poison(ts[0]);
    return late(OpType::ALLREDUCE, work, ts, {{on_host(ts[0]), own}}, end, ts);
  }
  WorkPtr allreduce_coalesced(Tensors& ts, const AllreduceCoalescedOptions& o) override {
    std::vector<WorkPtr> all;
    for (auto& t : ts) {
      Tensors one{t};
      AllreduceOptions told;
      told.reduceOp = o.reduceOp, told.timeout = o.timeout, told.asyncOp = o.asyncOp;
      all.push_back(allreduce(one, told));
    }
    return c10::make_intrusive<Several>(all);
  }
  WorkPtr reduce(Tensors& ts, const ReduceOptions& o) override {
    check("reduce", ts[0]);
    const auto end = start(o.asyncOp, ts, ts);
    Tensors sent{image(ts[0])};
    auto work = gloo->reduce(sent, o);
    work->wait();
    Copies copies;
    if (rank_ == o.rootRank) copies.emplace_back(on_host(ts[0]), sent[0]);
    return late(OpType::REDUCE, work, ts, copies, end, ts);
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const AllgatherOptions& o) override {
    check("all_gather_into_tensor", in), check("all_gather_into_tensor", out);
    TORCH_CHECK(in.scalar_type() == out.scalar_type(), "output tensor must have the same type as input tensor");
    TORCH_CHECK(in.numel() * size_ == out.numel(), "output tensor size must be equal to world_size times input tensor size");
    const auto end = start(o.asyncOp, {in}, {out});
    Tensors sent{bytes(image(in))};
    auto got = room(out);
    std::vector<Tensors> parts{{}};
    for (int r = 0; r < size_; r++) parts[0].push_back(bytes(got.view({-1}).narrow(0, r * in.numel(), in.numel())));
    return late(OpType::_ALLGATHER_BASE, gloo->allgather(parts, sent, o), {out}, {{on_host(out), got}}, end, {in, out});
  }
  WorkPtr allgather(std::vector<Tensors>& outs, Tensors& ins, const AllgatherOptions& o) override {
    check("all_gather", ins[0]);
    for (auto& t : outs[0]) check("all_gather", t, false);
    const auto end = start(o.asyncOp, ins, outs[0]);
    Tensors sent{bytes(image(ins[0]))};
    std::vector<Tensors> parts{{}};
    Copies copies;
    for (auto& t : outs[0]) parts[0].push_back(bytes(late_copy(t, copies)));
    return late(OpType::ALLGATHER, gloo->allgather(parts, sent, o), outs[0], copies, end, joined(outs[0], ins));
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const AllgatherOptions& o) override {
    std::vector<WorkPtr> all;
    for (size_t i = 0; i < outs.size(); i++) all.push_back(_allgather_base(outs[i], ins[i], o));
    return c10::make_intrusive<Several>(all);
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const ReduceScatterOptions& o) override {
    check("reduce_scatter_tensor", in), check("reduce_scatter_tensor", out);
    TORCH_CHECK(in.scalar_type() == out.scalar_type(), "input tensor must be the same type as the output tensor.");
    TORCH_CHECK(in.numel() == out.numel() * size_, "input tensor must be the same size as output size times world size");
    const auto end = start(o.asyncOp, {in}, {out});
    Tensors all{image(in)};
    AllreduceOptions told;
    told.timeout = o.timeout;
    told.reduceOp = o.reduceOp;
    if (o.reduceOp == ReduceOp::AVG || o.reduceOp == ReduceOp::PREMUL_SUM) told.reduceOp = ReduceOp::SUM;
    if (o.reduceOp == ReduceOp::PREMUL_SUM && o.reduceOp.supplement_)
      all[0].mul_(reinterpret_cast<NCCLPreMulSumSupplement*>(o.reduceOp.supplement_.get())->double_factor);
    auto work = gloo->allreduce(all, told);
    work->wait();
    auto got = all[0].view({-1}).narrow(0, rank_ * out.numel(), out.numel()).view(out.sizes());
    if (o.reduceOp == ReduceOp::AVG) got = got.div(size_);
    poison(out);
    return late(OpType::_REDUCE_SCATTER_BASE, work, {out}, {{on_host(out), got}}, end, {in, out});
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const ReduceScatterOptions& o) override {
    std::vector<WorkPtr> all;
    for (size_t i = 0; i < outs.size(); i++) all.push_back(_reduce_scatter_base(outs[i], ins[i], o));
    return c10::make_intrusive<Several>(all);
  }
  WorkPtr reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const ReduceScatterOptions& o) override {
    auto in = at::stack(ins[0]);
    return _reduce_scatter_base(outs[0], in, o);
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& to, std::vector<int64_t>& from,
                        const AllToAllOptions& o) override {
    check("all_to_all_single", in), check("all_to_all_single", out);
    TORCH_CHECK(in.scalar_type() == out.scalar_type(), "Tensors are not equal in data type");
    const auto end = start(o.asyncOp, {in}, {out});
    auto sent = rows(image(in)), got = room(out), received = rows(got);
    auto work = gloo->alltoall_base(received, sent, to, from, o);
    return late(OpType::ALLTOALL_BASE, work, {out}, {{on_host(out), got}}, end, {in, out});
  }
  WorkPtr alltoall(Tensors& outs, Tensors& ins, const AllToAllOptions& o) override {
    for (auto& t : joined(ins, outs)) check("all_to_all", t);
    const auto end = start(o.asyncOp, ins, outs);
    std::vector<WorkPtr> all;
    Copies copies;
    Tensors own;
    for (auto& t : ins) own.push_back(image(t));
    for (int r = 0; r < size_; r++) {
      auto got = late_copy(outs[r], copies);
      if (r == rank_) got.copy_(own[r].view(got.sizes()));
      Tensors received{bytes(got)}, sent{bytes(own[r])};
      if (r != rank_ && got.numel()) all.push_back(gloo->recv(received, r, 7777));
      if (r != rank_ && own[r].numel()) all.push_back(gloo->send(sent, r, 7777));
    }
    for (auto& work : all) work->wait();
    return late(OpType::ALLTOALL, c10::make_intrusive<Several>(std::vector<WorkPtr>{}), outs, copies, end, joined(outs, ins));
  }
  WorkPtr send(Tensors& ts, int to, int) override {
    check("send", ts[0]);
    const auto end = start(true, ts, {}, "to " + std::to_string(to));
    Tensors sent{bytes(image(ts[0]))};
    return late(OpType::SEND, gloo->send(sent, to, 0), {}, {}, end, joined(sent, ts));
  }
  WorkPtr recv(Tensors& ts, int from, int) override {
    check("recv", ts[0]);
    const auto end = start(true, {}, ts, "from " + std::to_string(from));
    auto got = room(ts[0]);
    Tensors received{bytes(got)};
    return late(OpType::RECV, gloo->recv(received, from, 0), ts, {{on_host(ts[0]), got}}, end, ts);
  }
  WorkPtr gather(std::vector<Tensors>& outs, Tensors& ins, const GatherOptions& o) override {
    check("gather", ins[0]);
    const bool root = rank_ == o.rootRank;
    const auto end = start(o.asyncOp, ins, root ? outs[0] : Tensors{});
    std::vector<Tensors> parts;
    Copies copies;
    if (root) parts.emplace_back();
    for (auto& t : root ? outs[0] : Tensors{}) parts[0].push_back(bytes(late_copy(t, copies)));
    Tensors sent{bytes(image(ins[0]))};
    return late(OpType::GATHER, gloo->gather(parts, sent, o), root ? outs[0] : Tensors{}, copies, end, ins);
  }
  WorkPtr scatter(Tensors& outs, std::vector<Tensors>& ins, const ScatterOptions& o) override {
    check("scatter", outs[0]);
    const bool root = rank_ == o.rootRank;
    const auto end = start(o.asyncOp, root ? ins[0] : Tensors{}, outs);
    std::vector<Tensors> parts;
    if (root) parts.emplace_back();
    for (auto& t : root ? ins[0] : Tensors{}) parts[0].push_back(bytes(image(t)));
    Copies copies;
    Tensors received{bytes(late_copy(outs[0], copies))};
    return late(OpType::SCATTER, gloo->scatter(received, parts, o), outs, copies, end, outs);
  }
  WorkPtr barrier(const BarrierOptions& o) override {
    auto work = gloo->barrier(o);
    work->wait();
    host_waits_for_stream("barrier", current_stream());
    return late(OpType::BARRIER, work, {}, {}, Clocks::get().at(current_stream()), {});
  }

 private:
  // Check what a collective reads and writes, on its stream; returns that stream's clock at its end.
  Clock start(bool apart, const Tensors& reads, const Tensors& writes, const std::string& peer = "") {
    auto& clocks = Clocks::get();
    const auto caller = current_stream();
    auto stream = caller;
    if (apart) {
      stream = of(coalesces ? "" : peer);
      clocks.wait(stream, clocks.at(caller));
    }
    const auto started = clocks.launch(stream, here());
    for (auto& t : reads) use(t, false, started), sent_bytes += t.nbytes();
    for (auto& t : writes) use(t, true, started);
    return clocks.at(stream);
  }
  StreamId of(const std::string& peer) {
    auto found = streams.find(peer);
    if (found != streams.end()) return found->second;
    auto made = Guard().getNewStream(Device(DeviceType::CUDA, current_device)).id();
    Clocks::get().call(made, "the stream of NCCL" + (peer.empty() ? "" : " " + peer));
    return streams[peer] = made;
  }
  WorkPtr late(OpType op, WorkPtr inner, Tensors outputs, Copies copies, Clock end, Tensors kept) {
    number++;
    auto work = c10::make_intrusive<Late>(rank_, op, inner, outputs, copies, end, kept);
    if (coalesces) batch.push_back(work);
    return work;
  }
  static at::Tensor image(const at::Tensor& t) {
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    return on_host(t).clone(at::MemoryFormat::Contiguous);
  }
  static void poison(const at::Tensor& t) {
    c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
    auto twin = on_host(t);
    if (twin.is_floating_point() && twin.element_size() > 1) twin.fill_(NAN);
  }
  // Memory of its own, which gloo writes to while the result is NaN.
  static at::Tensor room(const at::Tensor& t) {
    poison(t);
    auto twin = on_host(t);
    return at::empty(twin.sizes(), twin.options());
  }
  static at::Tensor late_copy(const at::Tensor& t, Copies& copies) {
    auto got = room(t);
    copies.emplace_back(on_host(t), got);
    return got;
  }
  // gloo lacks types that NCCL has: they travel as bytes.
  static at::Tensor bytes(const at::Tensor& t) { return t.view({-1}).view(at::kByte); }
  static at::Tensor rows(const at::Tensor& t) {
    const auto count = t.dim() ? t.size(0) : 1;
    return t.numel() ? t.view({count, -1}).view(at::kByte) : at::empty({count, 0}, t.options().dtype(at::kByte));
  }
  static Tensors joined(Tensors one, const Tensors& other) {
    one.insert(one.end(), other.begin(), other.end());
    return one;
  }

  c10::intrusive_ptr<Backend> gloo;
  c10::intrusive_ptr<NcclOptions> options;
  bool coalesces = false;
  std::vector<WorkPtr> batch;
  std::map<std::string, StreamId> streams;
  std::atomic<uint64_t> number{0};
};

inline void bind_nccl(py::module_& m) {
  py::class_<PretendedNCCL, Backend, c10::intrusive_ptr<PretendedNCCL>> nccl(m, "PretendedNCCL");
  using Options = PretendedNCCL::NcclOptions;
  py::class_<Options, Backend::Options, c10::intrusive_ptr<Options>>(nccl, "Options")
      .def(py::init<bool>(), py::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &Options::is_high_priority_stream);
  nccl.def(py::init<c10::intrusive_ptr<Backend>, int, int, c10::intrusive_ptr<Options>>());
}

}  // namespace pretended

"""A record of what a step keeps in memory and sends, tensor by tensor: of real tensors, or of fake ones.

    with Recorder({group_name: axis}) as recorder:
        loss.backward()
    recorder.traffic["tp"]["all_reduce"]              # Traffic(count=8, payload=…, sent=…)
    recorder.peak({storage_number: "gradients"})      # bytes by kind at the fullest moment

Memory is that of storages: a view is free, what several tensors share counts once, and FSDP2's buffers that are
emptied and filled again count only while they are full. Not seen: what a kernel needs while it runs, the allocator's
rounding and fragmentation, buffers of the communication library.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_parallel.apply.parallelize import ParallelState, state_of
from hf_parallel.ask.keys.axes import TP_AXES
from hf_parallel.ask.keys.pipeline import JOINING_SCHEDULES
from hf_parallel.ask.keys.sizes import SHARDS
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.activation_offload import watch_copies
from hf_parallel.axes.data.compressed import list_compression_groups
from hf_parallel.axes.data.gradients import run_before_the_last
from hf_parallel.axes.pipeline.batches import count_rows
from hf_parallel.axes.pipeline.engine import PipelineEngine, run_calls
from hf_parallel.axes.pipeline.joint import JointStep, ScheduledCall
from hf_parallel.axes.pipeline.schedules import count_micro_batches
from hf_parallel.model.calls import note_unread_logits
from hf_parallel.ranks.mesh import EXPERT_AXES, find_stored_parameter

#: Starts of names of torch's collectives, in-place, functional and coalesced ones alike.
_KINDS = {
    "reduce_scatter": "reduce_scatter",
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "send": "send",
    "recv": "receive",
}
#: Times that a rank of a ring sends what the whole tensor is (Thakur et al., 2005), less its own part.
_ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1, "receive": 0}
_PROPAGATE = "_propagate_tensor_meta_non_cached"
_NOTHING_MADE = ("prim", "profiler")  # questions to a tensor, as where it is, and marks on a time line
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
REST = "activations"  # what has no other kind
HOST = "host"  # copies of activations there: no memory of the device
WHOLE = "gathered"  # weights and gradients that FSDP2 holds whole, and its buffers


@dataclass
class Traffic:
    """A kind of collective along an axis. `payload`: bytes of the whole tensors; `sent`: by this rank, in a ring."""

    count: int = 0
    payload: int = 0
    sent: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.count + other.count, self.payload + other.payload, self.sent + other.sent)

    def grown(self, one: Traffic, two: Traffic, times: int) -> Traffic:
        """Return this, and `times` times the step from `one` to `two`."""
        return Traffic(
            self.count + times * (two.count - one.count),
            self.payload + times * (two.payload - one.payload),
            self.sent + times * (two.sent - one.sent),
        )


class Recorder(TorchDispatchMode):
    """Notes every storage that appears inside, when it changes its size and when it goes; and every collective.

    Args:
        axes: names of process groups and what to call them; collectives of groups of one rank move nothing.
        data_axes: those along which FSDP2 gathers and reduces.
        scalars: what a tensor without a value says when it is asked for its value; None: it has one.
    """

    def __init__(
        self,
        axes: Mapping[str, str],
        data_axes: Iterable[str] = ("dp_shard", "dp_replicate"),
        scalars: int | None = None,
    ) -> None:
        super().__init__()
        self.axes, self.data_axes, self.scalars = dict(axes), set(data_axes), scalars
        self.traffic: defaultdict[str, defaultdict[str, Traffic]] = defaultdict(lambda: defaultdict(Traffic))
        self._events: list[tuple[int, int]] = []  # storage number, by how many bytes it grew
        self._numbers: dict[int, int] = {}  # address of a storage -> its number, while it lives
        self._sizes: list[int] = []  # now, by number
        self._whole: set[int] = set()
        self._watchers: dict[int, weakref.ref] = {}
        self.moments: list[int] = []  # places in the log that the observed code asked to remember
        self._shapes_alone = False

    def __enter__(self) -> Recorder:
        self._resize, self._propagate = torch.UntypedStorage.resize_, getattr(ShardingPropagator, _PROPAGATE)

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> object:
            result = self._resize(storage, size)
            number = self._numbers.get(storage._cdata)
            if number is not None:
                self._grow(number, size)
            return result

        def propagate_unseen(propagator: ShardingPropagator, schema: OpSchema) -> object:
            # DTensor's way to shapes: it runs an operation that is new to this process on whole fake tensors. No rank
            # holds those, and a dry run, which is all fake, would take them for its own.
            before, self._shapes_alone = self._shapes_alone, True
            try:
                return self._propagate(propagator, schema)
            finally:
                self._shapes_alone = before

        torch.UntypedStorage.resize_ = resize_and_note  # type: ignore[method-assign, assignment]
        setattr(ShardingPropagator, _PROPAGATE, propagate_unseen)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        setattr(ShardingPropagator, _PROPAGATE, self._propagate)

    def __torch_dispatch__(
        self, func: torch._ops.OpOverload, types: Collection[type], args: tuple = (), kwargs: dict | None = None
    ) -> object:
        if DTensor in types:
            return NotImplemented  # it calls its own operations on local tensors: those are seen
        if self._shapes_alone or func.namespace in _NOTHING_MADE:
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default and self.scalars is not None:
            return self.scalars
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "meta":  # which has a shape, but no memory
                self.note(leaf)
        if func.namespace in _NAMESPACES:
            self._note_collective(func._opname, args, result)
        elif func.namespace == "fsdp":  # copies in and out of its buffers
            self._whole |= {self.note(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        return result

    # ---- memory --------------------------------------------------------------------------------------------------

    def note(self, tensor: torch.Tensor) -> int:
        """Return the number of a tensor's storage, which exists from now on if it was not known."""
        storage = get_local_tensor(tensor).untyped_storage()
        address = storage._cdata
        if address not in self._numbers:
            number = self._numbers[address] = len(self._sizes)
            self._sizes.append(0)
            self._grow(number, storage.nbytes())
            self._watchers[address] = weakref.ref(storage, lambda _: self._note_gone(address))
        return self._numbers[address]

    def _grow(self, number: int, size: int) -> None:
        if size != self._sizes[number]:
            self._events.append((number, size - self._sizes[number]))
            self._sizes[number] = size

    def _note_gone(self, address: int) -> None:
        number = self._numbers.pop(address)
        del self._watchers[address]
        self._grow(number, 0)

    def remember(self) -> None:
        """Let one part of the log end here and the next begin."""
        self.moments.append(len(self._events))

    def peaks(self, kinds: Mapping[int, str]) -> list[Counter[str]]:
        """Return the bytes by kind at the fullest moment between each two remembered ones.

        Storages that `kinds` leaves out are FSDP2's, or activations and temporary results.
        """
        found = []
        for first, last in zip(self.moments, self.moments[1:], strict=False):
            total = most = sum(size for number, size in self._events[:first] if kinds.get(number) != HOST)
            fullest = first
            for i, (number, size) in enumerate(self._events[first:last], first + 1):
                total += 0 if kinds.get(number) == HOST else size
                if total > most:
                    most, fullest = total, i
            found.append(self.held(kinds, fullest))
        return found

    def held(self, kinds: Mapping[int, str], moment: int | None = None) -> Counter[str]:
        """Return the bytes by kind that are held at a place in the log; default: now."""
        found: Counter[str] = Counter()
        for number, size in self._events[:moment]:
            found[kinds.get(number, WHOLE if number in self._whole else REST)] += size
        del found[HOST]
        return +found

    # ---- communication -------------------------------------------------------------------------------------------

    def _note_collective(self, name: str, args: tuple, result: object) -> None:
        from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

        name, given = name.lstrip("_"), tree_leaves(args)
        kind = next((kind for start, kind in _KINDS.items() if name.startswith(start)), None)
        # The process group is an object among the arguments, or the name that functional collectives take.
        objects = [x for x in given if isinstance(x, torch.ScriptObject) and "ProcessGroup" in str(x._type())]
        names = [x for x in given if isinstance(x, str)]
        if kind is None or not (objects or names):
            return
        group = ProcessGroup.unbox(objects[0]) if objects else _resolve_process_group(GroupName(names[-1]))
        ranks = group.size()
        if ranks == 1:
            return
        axis = self.axes.get(group.group_name, "other")
        tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, torch.Tensor)]
        sizes = [leaf.nbytes for leaf in tensors]
        payload = min(sizes) * ranks if kind in ("all_gather", "reduce_scatter") else max(sizes)
        # A broadcast passes all of it on, except at the end of the chain.
        share = 1.0 if kind in ("send", "broadcast") else _ROUNDS[kind] * (ranks - 1) / ranks
        self.traffic[axis][kind] += Traffic(1, payload, payload * share)
        if axis in self.data_axes:
            self._whole |= {self.note(tensor) for tensor in tensors}


def get_local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that holds this rank's memory: a DTensor's part, an asynchronous result's own."""
    tensor = getattr(tensor, "_local_tensor", tensor)
    return getattr(tensor, "elem", tensor)


# ---- Two training steps of a parallel model, with a `Recorder` beside them: in a real process or in a dry run


Inputs = dict[str, torch.Tensor]  # of the model
Communication = dict[str, dict[str, Traffic]]  # axis -> kind of collective -> what it moved
OPTIMIZERS = ("adamw", "sgd", "sgd_momentum")


@dataclass
class Observed:
    """The second of two steps on one rank; the first one fills the optimizer's state.

    peaks: bytes by kind at the fullest moment of each part of the step.
    kept: bytes by kind between the backward pass and `zero_grad`.
    """

    peaks: list[Counter[str]]
    kept: Counter[str]
    communication: Communication = field(default_factory=dict)

    @property
    def peak(self) -> Counter[str]:
        """Bytes by kind at the fullest moment."""
        return max(self.peaks, key=lambda peak: peak.total())


def observe(
    model: nn.Module,
    batches: list[Inputs],
    optimizer: str = "adamw",
    autocast: torch.dtype | None = None,
    layers: tuple[tuple[nn.Module, ...], ...] = (),
    scalars: int | None = None,
) -> Observed:
    """Train two steps and say what the second kept and sent; without a flush the first that is like all later ones.

    Args:
        model: parallel, with memory for its weights.
        batches: what one step accumulates over.
        autocast: compute products in this dtype, whatever weights are stored in.
        layers: of each of this rank's stages, to part the step where layers begin and end.
        scalars: see `Recorder`.
    """
    state = state_of(model)
    assert state is not None
    mirror = None if state.pipeline is None else state.pipeline.mirror
    steps = [batches[-1:], batches]  # the first only fills the optimizer's state, the last is like any later one
    if state.pipeline is not None and state.pipeline.delayed is not None:
        # Without a flush a step begins with what former ones have computed of it, on weights as old as it finds later.
        micro_batches = len(batches) * count_micro_batches(count_rows(batches[0]), state.config)
        steps = [list(batches) for _ in range(2 + -(-state.config.pp_size // micro_batches))]
    with Recorder(name_groups(state), scalars=scalars) as recorder, contextlib.ExitStack() as measured:
        kinds = {recorder.note(tensor): "parameters" for tensor in (*model.parameters(), *model.buffers())}
        watch_copies(itertools.chain(*layers), lambda copy: kinds.update({recorder.note(copy): HOST}))
        update = build_optimizer(optimizer, model)
        for accumulated in steps:
            if accumulated is steps[-1]:  # the rank's copy of a stage is there by now, if it mirrors one
                mirrored = [] if mirror is None else [tuple(mirror.mirrored.layers)]
                measured.enter_context(record_parts(recorder, (*layers, *mirrored)))
            recorder.traffic.clear()
            recorder.moments.clear()
            recorder.remember()
            for _ in _run_batches(model, accumulated, autocast):  # sums rest with weights: on the host under offload
                resting = map(find_stored_parameter, model.parameters())
                kinds |= {recorder.note(p.grad): "gradients" for p in resting if p.grad is not None}
            # Without a flush weights have moved, and former ones are kept.
            copies = [] if mirror is None else [value for _, value in mirror.copies]
            weights = [*state.root.parameters(), *state.root.buffers(), *copies]
            kinds |= {recorder.note(tensor): "parameters" for tensor in weights}
            gradients = _list_gradients(state)
            kinds |= {recorder.note(gradient): "gradients" for gradient in gradients}
            recorder.remember()
            update.step()
            states = [x for values in update.state.values() for x in values.values() if torch.is_tensor(x)]
            kinds |= {recorder.note(tensor): "optimizer" for tensor in states}
            recorder.remember()
            kept = recorder.held(kinds)
            del gradients, states
            update.zero_grad()
        traffic = {axis: dict(by_kind) for axis, by_kind in recorder.traffic.items()}
        return Observed(recorder.peaks(kinds), kept, traffic)


def _list_gradients(state: ParallelState) -> list[torch.Tensor]:
    """Return the gradients of the step that has run, and the sums of those that have begun."""
    found = [p.grad for p in state.root.parameters()]
    if state.pipeline is not None and state.pipeline.delayed is not None:
        for coming in state.pipeline.delayed.updates:
            found += coming.gradients.values()
    return [gradient for gradient in found if gradient is not None]


def _announce_step(pipeline: PipelineEngine, model: nn.Module, batches: list[Inputs]) -> list[ScheduledCall]:
    with pipeline.announcing() as calls, note_unread_logits():
        for batch in batches:
            model(**batch)
    return calls


def _run_batches(model: nn.Module, batches: list[Inputs], autocast: torch.dtype | None) -> Iterator[None]:
    """Run forward and backward of each batch, as Trainer does; yield after each."""
    state = state_of(model)
    assert state is not None
    pipeline, joins = state.pipeline, state.config.pipeline_schedule in JOINING_SCHEDULES and len(batches) > 1
    if pipeline is not None and pipeline.delayed is not None:
        # Announce this step, and those after it until they fill its drain, as a Trainer that reads ahead does.
        delayed = pipeline.delayed
        delayed.reads_ahead = True
        while not delayed.knows_enough():
            delayed.add(None, _announce_step(pipeline, model, batches))
        pipeline.joint = JointStep(list(delayed.updates[0].calls), delayed.run)
    elif pipeline is not None and joins and pipeline.can_schedule_together(batches):
        calls = _announce_step(pipeline, model, batches)
        pipeline.joint = JointStep(list(calls), functools.partial(run_calls, pipeline, held=None))
    for i, batch in enumerate(batches):
        more = i < len(batches) - 1
        with run_before_the_last(state.root, state.config) if more else contextlib.nullcontext():
            with torch.autocast(state.mesh.device.type, autocast, enabled=autocast is not None), note_unread_logits():
                loss = model(**batch)["loss"]
            loss.backward()
        yield


def build_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """Build an optimizer as Trainer does: AdamW in one kernel where all parameters are of one sort.

    Raises:
        SpecError: an optimizer that is not known here.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "adamw":
        fused = len({isinstance(p, DTensor) for p in parameters}) == 1
        return torch.optim.AdamW(parameters, fused=fused, foreach=None if fused else False)
    if name in ("sgd", "sgd_momentum"):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if name == "sgd_momentum" else 0.0, foreach=False)
    refuse(f"optimizer={name}", f"the dry run knows {', '.join(OPTIMIZERS)}", "adamw")


def name_groups(state: ParallelState) -> dict[str, str]:
    """Name process groups by their axis, also parts of it, such as cp's rings and groups of Ulysses.

    `data` is the group of all data ranks; both ends of a pipeline are `pp`, and so is its group for the way back.
    """
    mesh, ranks_of = state.mesh, dist.get_process_group_ranks
    ways = [mesh.second_stage_group] if mesh.config.delays_updates or mesh.config.mirrors_stages else []
    ends = [state.pipeline.tied_group] if state.pipeline else []
    cp = set(ranks_of(mesh.group("cp")))
    names: dict[str, str] = {group.group_name: "cp" for group in mesh.groups.made() if cp.issuperset(ranks_of(group))}
    tp = set(ranks_of(mesh.group("tp"))) if mesh.config.tp_col_size > 1 else set()
    names |= {group.group_name: "tp" for group in mesh.groups.made() if tp.issuperset(ranks_of(group))}
    names |= {group.group_name: "pp" for group in (*ways, *ends) if group is not None}
    names[mesh.data_group.group_name] = "data"
    names |= {group.group_name: "dp_shard" for group in list_compression_groups(mesh)}
    views = [*EXPERT_AXES] * (mesh.config.ep_size > 1) + [*TP_AXES] * (mesh.config.tp_col_size > 1)
    axes = [*views, *mesh.config.sizes]  # of the same ranks the latter
    names |= {mesh.group(axis).group_name: axis for axis in axes}
    if mesh.size("cp") > 1:  # FSDP2 shards over dp_shard x cp
        names |= {mesh.attention_group.group_name: "cp", mesh.sharing_mesh.get_group(SHARDS).group_name: "dp_shard"}
    return names


@contextlib.contextmanager
def record_parts(recorder: Recorder, stages: tuple[tuple[nn.Module, ...], ...]) -> Iterator[None]:
    """Remember when a stage's last layer has run forward and backward, and when its first one begins backward.

    Memory grows or shrinks evenly in between, so that no part's fullest moment jumps when there are more layers.
    """
    handles = []
    for layers in stages:
        first, last = layers[0], layers[-1]
        handles.append(first.register_forward_hook(lambda *call: _call_at_gradient(call[2], recorder.remember)))
        handles.append(last.register_forward_hook(lambda *call: recorder.remember()))
        before = lambda _, args, kwargs: _call_at_gradient((args, kwargs), recorder.remember)  # noqa: E731
        handles.append(last.register_forward_pre_hook(before, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _call_at_gradient(values: object, call: Callable[[], None]) -> None:
    """Call when the gradient of the first tensor in `values` that has one is there."""
    tensors = torch.utils._pytree.tree_leaves(values)
    hidden = next((x for x in tensors if torch.is_tensor(x) and x.requires_grad), None)
    if hidden is not None:
        hidden.register_hook(lambda gradient: call())

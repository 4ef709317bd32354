"""ZeRO++ on `fully_shard`: its all-gather and its reduce-scatter in two hops, in fewer bits, or both.

dp_shard=8,hierarchical_shard=4, ranks 0-3 on one node and 4-7 on the other; rank 1 has shard 1:

    forward     across  1 5        shards 1, 5: one part in four of the unit, kept until the next forward pass
                within  0 1 2 3    all shards
    backward    within  0 1 2 3    all shards, from the parts that were kept: nothing crosses
    gradients   within  0 1 2 3    summed in the node: what rank 1 passes on, for ranks 1 and 5
                across  1 5        summed over the nodes: the gradient of shard 1

Bytes stand in the order of shards between hops, whole units after them. Everything is queued on the stream that
torch gathers or reduces on, so what it overlaps stays overlapped.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from hf_parallel.axes.data import units
from hf_parallel.axes.data.units import get_state_of, iterate_parameter_groups
from hf_parallel.axes.eight_bit import WHOLE, W, find_largest_number, tensorwise
from hf_parallel.ranks import all_reduce
from hf_parallel.ranks.all_to_all import count_packed_bytes, pack_rows, reduce_scatter, unpack
from hf_parallel.ranks.differentiable import call_all_gather
from hf_parallel.ranks.mesh import ParallelMesh, list_axis_ranks
from hf_parallel.ranks.steps import call_after_steps

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    from hf_parallel.axes.eight_bit import Float8


@dataclass(frozen=True)
class Nodes:
    """The ranks of this one's shard group that are close to it, and those with its place on the other nodes."""

    within: dist.ProcessGroup
    across: dist.ProcessGroup


_nodes: weakref.WeakKeyDictionary[ParallelMesh, Nodes] = weakref.WeakKeyDictionary()


def compress(root: nn.Module, mesh: ParallelMesh) -> None:
    """Give the units below `root` the collectives that the mesh's config asks for. Collective at a mesh's first."""
    config = mesh.config
    if (size := config.hierarchical_shard) is not None and mesh not in _nodes:
        shards = list_axis_ranks(config, "dp_shard")
        within = [ranks[start : start + size] for ranks in shards for start in range(0, len(ranks), size)]
        across = [ranks[place::size] for ranks in shards for place in range(size)]
        _nodes[mesh] = Nodes(mesh.groups.along(within), mesh.groups.along(across))
    nodes = None if size is None else _nodes[mesh]
    for unit in units.iterate_sharded_modules(root):
        if nodes is not None or config.quantize_weights != "none":
            for group in units.get_groups_of(unit):
                unit.set_custom_all_gather(GatherWeights(group, config.quantize_weights, nodes))
        if config.quantize_gradients != "none":
            unit.set_custom_reduce_scatter(
                ScatterGradients(config.quantize_gradients, nodes, config.gradient_error_feedback)
            )


def list_compression_groups(mesh: ParallelMesh) -> list[dist.ProcessGroup]:
    """Return the groups beside the mesh's own that weights and gradients travel in."""
    return [_nodes[mesh].within, _nodes[mesh].across] if mesh in _nodes else []


class _Then(dist.Work):
    """A collective under way, and what is to be done with its result before it counts as waited for."""

    def __init__(self, work: dist.Work | None, then: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._then = work, then

    def wait(self, timeout: object = None) -> bool:
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._then()
        return True


# ---- weights --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """Bytes of a shard, from one parameter or several in a row: floats to be quantised, or what must be exact."""

    start: int
    stop: int
    dtype: torch.dtype | None  # None: exact


@dataclass(eq=False)
class GatherWeights(DefaultAllocMixin, AllGather):
    """The all-gather of one unit.

    Quantised are matrices in floats. Exact are vectors, which are few and sensitive; what trains beside a frozen base,
    as adapters do; and what is in integers already, as a 4-bit base.

    Attributes:
        kept: this rank's part of the unit within its node, as it came over the links.
    """

    group: FSDPParamGroup
    kind: str
    nodes: Nodes | None
    kept: torch.Tensor | None = None
    _written: torch.Event | None = None  # on which stream's queue that is done

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Fill `output_tensor` with the shards of all ranks."""
        spans = [] if self.kind == "none" else _make_spans(self.group.fsdp_params)
        quantized = any(span.dtype for span in spans)
        own = input_tensor.view(torch.uint8)
        if quantized:
            own = _pack_shard(own, spans, self.kind)
        plain = output_tensor.view(torch.uint8).view(group.size(), -1)
        shards = own.new_empty(group.size(), own.numel()) if quantized else plain
        finish = functools.partial(_unpack_shards, shards, spans if quantized else [], self.kind, plain)
        if self.nodes is None:
            work = call_all_gather(shards.view(-1), own, group=group, async_op=async_op)
            return _finish_work(work, finish)
        across, within = self.nodes.across, self.nodes.within  # in two hops
        streams = _get_device_handle(own.device.type)

        def inside() -> None:
            received = own.new_empty(within.size(), part.numel())
            call_all_gather(received.view(-1), part, group=within)
            by_node = received.view(within.size(), across.size(), -1).transpose(0, 1)
            shards.view(by_node.shape).copy_(by_node)
            finish()

        if self.kept is not None and self.group._training_state == TrainingState.PRE_BACKWARD:
            part = self.kept
            streams.current_stream().wait_event(self._written)
            return _finish_work(None, inside)
        part = own.new_empty(across.size() * own.numel())
        work = call_all_gather(part, own, group=across, async_op=async_op)

        def keep() -> None:
            if self.group._reshard_after_forward and self.group.unshard_in_backward:
                self.kept, self._written = part, streams.current_stream().record_event()
            inside()

        return _finish_work(work, keep)


def _finish_work(work: dist.Work | None, then: Callable[[], None]) -> dist.Work | None:
    if work is not None:
        return _Then(work, then)
    then()
    return None


def _make_spans(parameters: list[FSDPParam]) -> list[Span]:
    """Return how the bytes of a shard are treated; `parameters` are those of torch's group, in their order."""
    frozen = any(not held.sharded_param.requires_grad for held in parameters)
    found: list[Span] = []
    place = 0
    for held in parameters:
        dtype = held.param_dtype or held.orig_dtype
        exact = not dtype.is_floating_point or dtype.itemsize < 2 or held.sharded_param.ndim < 2
        exact = exact or (frozen and held.sharded_param.requires_grad)
        end = place + held._sharded_param_data.numel() * dtype.itemsize
        span = Span(place, end, None if exact else dtype)
        if found and found[-1].dtype == span.dtype:
            span = Span(found.pop().start, end, span.dtype)
        found.append(span)
        place = end
    return found


def _pack_shard(raw: torch.Tensor, spans: list[Span], kind: str) -> torch.Tensor:
    """Pack one rank's bytes to send: all that is quantised as one row, then what is exact."""
    floats, exact = [], []
    for span in spans:
        part = raw[span.start : span.stop]
        if span.dtype is None:
            exact.append(part)
        else:  # copied where it does not start at a multiple of a float's size
            aligned = part.clone() if part.storage_offset() % span.dtype.itemsize else part
            floats.append(aligned.view(span.dtype).float())
    return torch.cat([pack_rows(torch.cat(floats).unsqueeze(0), kind)[0], *exact])


def _unpack_shards(shards: torch.Tensor, spans: list[Span], kind: str, whole: torch.Tensor) -> None:
    """Fill `whole`, one row of bytes for each rank, from the rows that were sent. Without spans it is filled."""
    if not spans:
        return
    counts = [(span.stop - span.start) // span.dtype.itemsize for span in spans if span.dtype]
    dtypes = {span.dtype for span in spans if span.dtype}
    bytes_of_codes = count_packed_bytes(sum(counts), kind)
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    values = list(unpack(shards[:, :bytes_of_codes], sum(counts), kind, dtype).split(counts, 1))
    place = bytes_of_codes
    for span in spans:
        if span.dtype:
            part = values.pop(0).to(span.dtype).contiguous().view(torch.uint8)
        else:
            part = shards[:, place : place + span.stop - span.start]
            place += span.stop - span.start
        whole[:, span.start : span.stop] = part


# ---- gradients ------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class ScatterGradients(DefaultAllocMixin, ReduceScatter):
    """The reduce-scatter of one unit: every number is packed once for each hop, never summed in few bits."""

    kind: str
    nodes: Nodes | None
    feedback: bool
    _errors: dict[str, torch.Tensor] = field(default_factory=dict)  # by hop

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Fill `output_tensor` with the sum, or the mean, of all ranks' gradients for this rank's shard."""
        parts = input_tensor.view(group.size(), -1)
        if self.nodes is None:
            total = self._send_hop("group", parts, group)
        else:
            across, within = self.nodes.across, self.nodes.within
            by_place = parts.view(across.size(), within.size(), -1).transpose(0, 1)
            in_node = self._send_hop("within", by_place.reshape(within.size(), -1), within)
            total = self._send_hop("across", in_node.view(across.size(), -1), across)
        if op == dist.ReduceOp.AVG:
            total = total / group.size()
        elif op != dist.ReduceOp.SUM:
            raise NotImplementedError(f"{op}: quantised gradients are summed or averaged")
        output_tensor.copy_(total)

    def _send_hop(self, name: str, parts: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        error = None
        if self.feedback and group.size() > 1:
            error = self._errors.get(name)
            if error is None or error.shape != parts.shape:  # other parameters have gradients now
                error = self._errors[name] = torch.zeros_like(parts, dtype=torch.float32)
        return reduce_scatter(parts, group, self.kind, error)


# ---- FSDP2 gathers the codes of weights that multiply in fp8: one byte per number, and no more held while they are
# used
# A shard is rounded with the scale of its whole weight, so what is gathered is what one process would round. The
# scales of all weights of a root are agreed on at once, by the first gather after they may have changed:
#
#     root's forward, optimizer's step    scales are forgotten
#     first gather                        one all-reduce of a number per weight
#     each gather                         shard -> codes -> all-gather -> weight in codes
#
# torch asks the tensor inside a sharded parameter for `fsdp_pre_all_gather` and `fsdp_post_all_gather`; these are put
# on that plain tensor itself, so that parameters stay what optimizers, checkpoints and adapters know. Which tensor
# that is torch settles when a root first runs (`lazy_init`, looked at in torch 2.13).

_scales: weakref.WeakSet[Scales] = weakref.WeakSet()


def gather_codes(root: nn.Module, mesh: ParallelMesh) -> None:
    """From here on the units below `root` gather codes of what multiplies in fp8."""
    call_after_steps(_forget_codes)
    groups = [mesh.sharing_mesh.get_group(mesh.sharing_mesh.ndim - 1)]
    groups += [mesh["tp"].get_group()] if mesh.size("tp") > 1 else []
    root.register_forward_pre_hook(Scales(groups).before, prepend=True)  # before FSDP2's own, which gathers


def _forget_codes(*_: object) -> None:
    for scales in _scales:
        scales.forget()


class Scales:
    """The scales of the sharded weights of one root that multiply in fp8."""

    def __init__(self, groups: list[dist.ProcessGroup]) -> None:
        self.groups = groups
        self.weights: list[CodedWeight] = []
        _scales.add(self)

    def before(self, root: nn.Module, args: tuple) -> None:
        """Weights may have been loaded, or replaced, since the root's last forward pass."""
        self.forget()
        get_state_of(root)._lazy_init()
        self.weights = []
        for held in (held for group in iterate_parameter_groups(root) for held in group.fsdp_params):
            info = held._module_info
            recipe = tensorwise(info.module) if info.param_name == "weight" else None
            if recipe is None:
                continue
            part: Any = held._sharded_local_tensor
            known = getattr(part, "fsdp_pre_all_gather", None)
            if known is not None and known.__self__.held is held:
                self.weights.append(known.__self__)
                continue
            coded = CodedWeight(held, recipe, self)  # for which torch makes room
            part.fsdp_pre_all_gather, part.fsdp_post_all_gather = coded.pre, coded.post
            held._init_extensions()
            held.all_gather_outputs = []
            if hasattr(held, "_unsharded_param"):
                del held._unsharded_param
            self.weights.append(coded)

    def forget(self) -> None:
        """The weights may change."""
        for weight in self.weights:
            weight.scale = None

    def agree(self) -> None:
        """The scale of each whole weight. Collective, in one all-reduce per group."""
        from torchao.float8.float8_utils import amax_to_scale

        parts = [weight.held._sharded_local_tensor for weight in self.weights]
        largest = torch.stack([find_largest_number(part) for part in parts]).float()
        for group in self.groups:
            largest = all_reduce(largest, group, dist.ReduceOp.MAX)
        config = self.weights[0].recipe.config
        scales = amax_to_scale(
            largest, config.cast_config_weight.target_dtype, config.round_scales_to_power_of_2
        ).unbind()
        for weight, scale in zip(self.weights, scales, strict=True):
            weight.scale = scale


@dataclass(eq=False)
class CodedWeight:
    """The way a parameter of FSDP2 is gathered. `held`: torch's record of it."""

    held: FSDPParam
    recipe: Float8
    scales: Scales
    scale: torch.Tensor | None = None

    def pre(self, mesh: object, size: object, stride: object, module: object, policy: object) -> tuple[tuple, tuple]:
        """Return the codes of this rank's shard, filled up to the length of all shards."""
        if self.scale is None:
            self.scales.agree()
        part = self.held._sharded_local_tensor
        operand = self.recipe.cast(part, W, "in", self.recipe.config.cast_config_weight, WHOLE, self.scale)
        codes, whole = operand._data, self.held.padded_sharded_param_size
        if codes.shape != whole:
            filled = codes.new_zeros(whole)
            filled.view(torch.uint8)[: len(codes)] = codes.view(torch.uint8)
            codes = filled
        return (codes,), (self.scale,)

    def post(self, outputs: tuple, metadata: tuple, dtype: torch.dtype, *, out: Any = None) -> tuple | None:
        """Return the whole weight in the form that products read."""
        (codes,), (scale,) = outputs, metadata
        if out is not None:
            getattr(out, "_local_tensor", out)._scale = scale
            return None
        return self.recipe.of_codes(codes, scale, W, dtype), (codes,)

"""The records that torch 2.11 to 2.15 keep of an FSDP2 unit. They are internals: torch has no call for them."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast
from unittest import mock

import torch
from packaging.version import Version
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.utils._pytree import tree_leaves

from hf_parallel.ask.replaced import Replaced
from hf_parallel.model.anatomy import find_reader_of_stack, find_stacks, find_text_part

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

#: Attribute of a root: the parameters that every data rank keeps whole, which are in no group.
WHOLE = "_hf_parallel_whole_parameters"
#: Mark of tensors whose gradient gathers the weights of the unit that computed them, and of modules that give such.
_GATHERS = "_hf_parallel_gathers"
REPLACES = (
    Replaced(
        "torch.distributed.fsdp._fully_shard._fsdp_param:nn",
        "torch 2.11 gives each parameter a gradient at first, which weights of whole numbers cannot have",
        "while a module is sharded, on torch 2.11 alone",
    ),
)


def get_state_of(unit: nn.Module | FSDPModule) -> FSDPState:
    """Return the record that the hooks of a unit share."""
    return cast("FSDPState", fully_shard.state(unit))  # type: ignore[attr-defined]


def get_groups_of(unit: nn.Module | FSDPModule) -> list[FSDPParamGroup]:
    """Return the parameters of one unit that are gathered and reduced together; in torch 2.11 one group at most."""
    return get_groups(get_state_of(unit))


def get_groups(state: FSDPState) -> list[FSDPParamGroup]:
    """Return those of the unit with this record."""
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def list_modules(root: nn.Module) -> list[nn.Module]:
    """Return what `root.modules()` yields, in one call of Python: each forward pass goes through all modules."""
    found: dict[nn.Module, None] = {}
    left: list[nn.Module | None] = [root]
    while left:
        module = left.pop()
        if module is not None and module not in found:
            found[module] = None
            left.extend(reversed(module._modules.values()))
    return list(found)


def iterate_sharded_modules(root: nn.Module) -> Iterator[FSDPModule]:
    """The units from `root` on, outermost first."""
    return (module for module in list_modules(root) if isinstance(module, FSDPModule))


def iterate_parameter_groups(root: nn.Module) -> Iterator[FSDPParamGroup]:
    """The groups of all units from `root` on."""
    for unit in iterate_sharded_modules(root):
        yield from get_groups_of(unit)


def holds_whole_gradient(held: FSDPParam) -> bool:
    """Return whether a parameter has a gradient of this rank's own micro-batches that is not reduced yet."""
    gathered = getattr(held, "_unsharded_param", None)
    return held.unsharded_accumulated_grad is not None or (gathered is not None and gathered.grad is not None)


# ---- Gradients of a unit's parameters: torch 2.15 keeps them elsewhere than the versions before it
#                                           torch 2.11 to 2.14               torch 2.15
#     whole, of several micro-batches       the record's, apart in fp32      the gathered parameter's `grad`, in fp32
#     dtype of the stored gradients         the group's                      each record's
#     a gradient that comes first with      in 16 bits, which torch does     in fp32, as the others
#     the last of several micro-batches     not reduce with sums in fp32
#     order in which they are reduced       the group's order of records     settled when the unit first runs
#     the end of a schedule's backward      told by `set_is_last_backward`   asked for: "manual finalization"


def take_whole_gradient(held: FSDPParam) -> torch.Tensor | None:
    """Take from FSDP2 the gradient of one gathered parameter that it has not reduced yet; sums of 16 bits in fp32."""
    gathered = held._unsharded_param
    if not keeps_apart(held):
        gradient, gathered.grad = gathered.grad, None
        return gradient
    held.accumulate_unsharded_grad_if_needed()
    held.to_accumulated_grad_if_needed()
    whole, given = held.unsharded_accumulated_grad, gathered.grad
    held.unsharded_accumulated_grad = gathered.grad = None
    return given if whole is None else whole


def sum_in_one_dtype(group: FSDPParamGroup) -> None:
    """Widen gradients of the last micro-batch alone, where others of the group are sums of several in fp32."""
    gathered = [held for held in group.fsdp_params if hasattr(held, "_unsharded_param")]
    if group.reduce_grads and any(held.unsharded_accumulated_grad is not None for held in gathered):
        for held in gathered:
            held.accumulate_unsharded_grad_if_needed()
            held.to_accumulated_grad_if_needed()


def place_gradients(group: FSDPParamGroup) -> None:
    """Lay out the gradients that a penalty has given the shards like the shards: FSDP2 adds its own to them."""
    for held in group.fsdp_params:
        shard: Any = held.sharded_param
        if shard.grad is not None and shard.grad.placements != shard.placements:
            shard.grad = shard.grad.redistribute(placements=shard.placements)


def wait_for_reductions(model: nn.Module) -> None:
    """Wait, in the current stream, for the gradients that FSDP2 is reducing in streams of its own."""
    group = next(iterate_parameter_groups(model), None)
    if group is None or group.device_handle.__name__ == "torch.cpu":
        return
    for stream in (group.comm_ctx.reduce_scatter_stream, group.comm_ctx.all_reduce_stream):
        group.device_handle.current_stream().wait_stream(stream)
        if any(held.offload_to_cpu for held in group.fsdp_params):
            stream.synchronize()


def give_whole_gradient(held: FSDPParam, gradient: torch.Tensor) -> None:
    """Give FSDP2 a gradient that it is to reduce after the next backward pass."""
    if keeps_apart(held):
        held.unsharded_accumulated_grad = gradient
    else:
        held._unsharded_param.grad = gradient


def keeps_apart(held: FSDPParam) -> bool:
    """Return whether this torch keeps sums of whole gradients beside the gathered parameter, not as its `grad`."""
    return hasattr(held, "to_accumulated_grad_if_needed")


def reduce_whole_gradients(unit: FSDPModule) -> None:
    """Reduce the whole gradients of all groups from `unit`, a root, on, as the end of the last backward pass does."""
    state = get_state_of(unit)
    for group in iterate_parameter_groups(cast(nn.Module, unit)):
        group.post_backward()
    shared: Any = state._state_ctx
    if hasattr(shared, "manual_backward_finalization_active"):
        # A stage of torch 2.15 has announced that it ends its backward passes itself; here they end as others do.
        shared.manual_backward_finalization = shared.manual_backward_finalization_active = False
    state._root_post_backward_final_callback()


def forget_end_of_backward(unit: FSDPModule) -> None:
    """Let `unit`, a root, forget how a schedule meant to end backward passes whose gradients were taken."""
    shared: Any = get_state_of(unit)._state_ctx
    if hasattr(shared, "manual_backward_finalization_active"):
        shared.manual_backward_finalization, shared.manual_backward_finalization_active = False, None


def set_gradient_dtype(group: FSDPParamGroup, held: Sequence[FSDPParam], dtype: torch.dtype) -> None:
    """Let the stored parameters `held` of a group get gradients of this dtype. They have none now."""
    if hasattr(group, "_orig_dtype"):
        group._orig_dtype = dtype
    for one in cast("Sequence[Any]", held):
        if hasattr(one, "sharded_grad_dtype"):
            one.sharded_grad_dtype = dtype
        one.sharded_param.grad_dtype = dtype


def get_gradient_dtype(group: FSDPParamGroup, held: Any) -> torch.dtype | None:
    """Return the dtype in which a stored parameter of the group gets its gradient."""
    return group._orig_dtype if hasattr(group, "_orig_dtype") else held.sharded_grad_dtype


def follow_weights_dtype(held: Any) -> None:
    """Let a stored parameter that was cast get gradients of its new dtype; torch 2.15 would keep the old one."""
    if getattr(held, "sharded_grad_dtype", None) not in (None, held.sharded_param.dtype):
        held.sharded_grad_dtype = held.sharded_param.grad_dtype = held.sharded_param.dtype


def renew_group(group: FSDPParamGroup) -> None:
    """Let a group that has run find out again which parameters it has, and their dtypes.

    A group that has not run does this when it first runs.
    """
    if group._reset_sharded_params:
        group._init_mp_dtypes()
        if hasattr(group, "_init_reduce_scatter_param_order"):  # torch 2.15 reduces no parameter that it lacks
            group._init_reduce_scatter_param_order()


def drop_empty_groups(unit: FSDPModule) -> None:
    """Leave a unit whose parameters have all gone nothing to gather: torch gathers no group without parameters."""
    state: Any = get_state_of(unit)
    filled = [group for group in get_groups_of(unit) if group.fsdp_params]
    if hasattr(state, "_fsdp_param_groups"):
        state._fsdp_param_groups[:] = filled
    else:
        state._fsdp_param_group = filled[0] if filled else None


def separate_dtypes(root: nn.Module) -> list[FSDPModule]:
    """Give the trained weights of a unit that have another dtype than most a group of their own.

    torch reduces all gradients of a group in one dtype. Such weights are norms kept in fp32, norms in 16 bits that a
    script trains beside adapters in fp32, or copies of a head among these (`modules_to_save`). The stored parameters
    stay the same objects, and are gathered with their unit: a loss may read a head's weight and never call the head.

    Returns:
        In torch 2.11, where a unit has one group: modules that are units now, and must be gathered with theirs.
    """
    made: list[FSDPModule] = []
    for unit in list(iterate_sharded_modules(root)):
        for group in list(get_groups_of(unit)):
            dtypes: dict[FSDPParam, torch.dtype] = {}
            for held in group.fsdp_params:
                info = held._module_info
                stored = getattr(info.module, info.param_name)  # torch takes over what replaced its own when units run
                if stored.requires_grad:
                    dtypes[held] = stored.dtype
            widest_first = sorted(dtypes.values(), key=lambda dtype: (-dtype.itemsize, str(dtype)))
            others = [dtype for dtype, _ in Counter(widest_first).most_common()][1:]
            for dtype in others:
                made += _move_to_own_group([held for held, kind in dtypes.items() if kind == dtype], unit, group)
            if others:
                renew_group(group)
    return made


def _move_to_own_group(moved: list[FSDPParam], unit: FSDPModule, group: FSDPParamGroup) -> list[FSDPModule]:
    """Let `moved` of `group` be gathered and reduced by themselves, in units of their own in torch 2.11."""
    state: Any = get_state_of(unit)
    if hasattr(state, "_fsdp_param_groups"):
        state._fsdp_param_groups.append(_take_out_of(group, moved, group.modules, state._mp_policy))
        return []
    made: list[FSDPModule] = []
    for module in dict.fromkeys(held._module_info.module for held in moved):
        made.append(
            fully_shard(
                module,
                mesh=group.mesh_info.mesh,
                mp_policy=state._mp_policy,
                offload_policy=group.offload_policy,
                ignored_params=set(module.parameters()),
            )
        )
        own: Any = get_state_of(module)
        own._auto_reshard_after_forward = False
        own._fsdp_param_group = _take_out_of(
            group, [held for held in moved if held._module_info.module is module], (module,), state._mp_policy
        )
        cast(nn.Module, unit).register_forward_pre_hook(lambda *_, one=made[-1]: gather_unit(one))
    return made


def _take_out_of(
    group: FSDPParamGroup, moved: list[FSDPParam], modules: tuple[nn.Module, ...], policy: MixedPrecisionPolicy
) -> FSDPParamGroup:
    """Make a group of `moved`, which are no longer in `group`."""
    infos, policies = (group.mesh_info, group.post_forward_mesh_info), (policy, group.offload_policy)
    own = FSDPParamGroup([], modules, *infos, group.device, None, *policies)
    own.fsdp_params = moved
    group.fsdp_params[:] = [held for held in group.fsdp_params if held not in moved]
    return own


def gather_unit(unit: FSDPModule) -> None:
    """Gather the weights of a unit before its own hook does, while the model around it runs.

    `unit.unshard` would forget that gradients are being summed in fp32: see `round_after_backward`.
    """
    for group in get_groups_of(unit) if get_state_of(unit)._is_root is False else ():  # else it runs by itself
        group.unshard()
        group.wait_for_unshard()


def let_caches_gather(unit: FSDPModule) -> None:
    """Let gradients of keys and values gather a unit's weights, as those of its outputs do.

    A loss may reach a layer through a key/value cache alone, which is no output of the layer.
    """
    state = get_state_of(unit)

    def note_cache(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: object) -> None:
        given = (*args, *kwargs.values()) if torch.is_grad_enabled() else ()
        cache = next((value for value in given if hasattr(value, "get_seq_length")), None)
        for layer in getattr(cache, "layers", ()):
            for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
                _let_gradient_gather(tensor, state)

    cast(nn.Module, unit).register_forward_hook(note_cache, with_kwargs=True)


def let_kept_outputs_gather(root: nn.Module, name: str) -> None:
    """Let gradients of what a module gives gather the weights of the unit around it, as do those of its outputs.

    A script's hook keeps what the module gives, and a loss may reach the unit through that alone.
    """
    places = name.split(".")
    around = [root.get_submodule(".".join(places[:depth])) for depth in range(len(places))]
    unit = next((module for module in reversed(around) if isinstance(module, FSDPModule)), None)
    module = root.get_submodule(name)
    if unit is None or isinstance(module, FSDPModule) or hasattr(module, _GATHERS):
        return
    setattr(module, _GATHERS, True)
    state = get_state_of(unit)

    def note_output(module: nn.Module, args: tuple, output: object) -> None:
        for tensor in tree_leaves(output):
            _let_gradient_gather(tensor, state)

    module.register_forward_hook(note_output)


def let_scores_gather(model: nn.Module) -> None:
    """Let gradients of scores of attention and of routers gather the weights of their layers.

    A loss may read nothing else of these layers, whose outputs do not have the scores.
    """

    def note_scores(layers: nn.ModuleList, backbone: nn.Module, args: tuple, outputs: object) -> None:
        for name in ("attentions", "cross_attentions", "router_logits"):
            scores = getattr(outputs, name, None) or ()
            for place, tensor in enumerate(scores):
                # Where not all layers have some: any of them may have given these.
                for layer in layers[place : place + 1] if len(scores) == len(layers) else layers:
                    if isinstance(layer, FSDPModule) and torch.is_tensor(tensor) and tensor.grad_fn is not None:
                        tensor.register_hook(get_state_of(layer)._pre_backward)

    for stack in find_stacks(model):
        backbone = find_reader_of_stack(find_text_part(model), stack)
        if backbone is not None:
            backbone.register_forward_hook(functools.partial(note_scores, stack.layers))


def _let_gradient_gather(tensor: object, state: FSDPState) -> None:
    if torch.is_tensor(tensor) and tensor.grad_fn is not None and not hasattr(tensor, _GATHERS):
        setattr(tensor, _GATHERS, True)
        tensor.register_hook(state._pre_backward)


def forget_gathered_memory(root: nn.Module) -> None:
    """Let the units below `root` allocate memory for gathered weights again, because their dtype changes.

    Call it while no unit holds gathered weights. torch has no call for this; looked at in torch 2.13.
    """
    for group in iterate_parameter_groups(root):
        for held in group.fsdp_params:
            held.all_gather_outputs = []
            if hasattr(held, "_unsharded_param"):
                del held._unsharded_param
        renew_group(group)


@contextlib.contextmanager
def allow_packed_weights() -> Iterator[None]:
    """Let `fully_shard` take weights of whole numbers; torch 2.11 wants a gradient of each parameter at first."""
    if Version(torch.__version__).release[:2] > (2, 11):
        yield
        return
    patched = mock.Mock(wraps=nn)
    patched.Parameter = lambda data, requires_grad=True: nn.Parameter(data, requires_grad and data.is_floating_point())
    with mock.patch.object(_fsdp_param, "nn", patched):
        yield


def shard_dim(shape: Sequence[int], ranks: int) -> int:
    """Return the dim along which `ranks` share experts of this shape: FSDP2 pads no dim but the first."""
    return next((dim for dim, size in enumerate(shape) if size % ranks == 0), 0)

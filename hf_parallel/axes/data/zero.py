"""ZeRO (Rajbhandari et al., 2020) and its hybrid with replicas, as settings of torch's `fully_shard`.

    spec                          mesh of fully_shard            weights between forward and backward
    dp_shard=n                    (dp_shard,)                    freed (zero_stage=3) or kept (zero_stage=1, 2)
    dp_replicate=m,dp_shard=n     (dp_replicate, dp_shard)       the same; gradients also all-reduced over replicas
    dp_replicate=m, zero_stage=0  (dp_replicate, 1)              kept: every rank owns the whole weight anyway;
                                                                 a small model is one unit, reduced at once
    cp=c                          dp_shard x cp in the place of dp_shard: cp ranks hold other tokens of one batch

`gradients.py` says what happens between the micro-batches of a step. With a single data rank nothing is wrapped: on a
mesh of size one `fully_shard` would copy every weight at each gather.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch
from torch import nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fully_shard import get_cls_to_fsdp_cls
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_leaves

from hf_parallel.ask.keys.data import offload_folder, parameters_rest
from hf_parallel.axes.data.copies import SCHEDULED, follow_copies
from hf_parallel.axes.data.gathered_once import is_kept_gathered
from hf_parallel.axes.data.gradients import round_after_backward
from hf_parallel.axes.data.lowered import follow_dtype_now, make_policy_for
from hf_parallel.axes.data.stopped_pass import end_stopped_pass
from hf_parallel.axes.data.units import (
    allow_packed_weights,
    gather_unit,
    get_groups_of,
    get_state_of,
    iterate_parameter_groups,
    iterate_sharded_modules,
    let_caches_gather,
    let_scores_gather,
    list_modules,
    separate_dtypes,
    shard_dim,
)
from hf_parallel.model.anatomy import find_input_embedding, get_backbone_of
from hf_parallel.model.experts import iterate_experts
from hf_parallel.ranks.differentiable import all_reduce
from hf_parallel.ranks.local import hook_gradients_of_scalars, make_gradient_whole, put_in_front
from hf_parallel.ranks.mesh import ParallelMesh, get_stored

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
    from transformers import PreTrainedModel

# ---- Embedding and head in parameter groups of their own, so that they are gathered only while they are needed
# In the group of the root they would be whole from the first gather to the end of the backward, 2.1 GB of an 8B in
# bf16, and the head's gradient would be reduced after everything else:
#
#                  in the root's group          in a group of its own
#     embedding    held all the time            freed after the forward; its backward needs no weight
#     head         held all the time            gathered during the last layer, reduced before the layers' backward
#
# One weight that both share is needed at both ends, and stays with the root.


class Settings(TypedDict, total=False):
    """The settings of `fully_shard`, the same for all units of a model."""

    mesh: DeviceMesh
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: set[nn.Parameter]


def shard_ends(model: PreTrainedModel, blocks: list[nn.Module], keeps: bool, settings: Settings) -> None:
    """Give embedding and head parameter groups of their own, unless they share their weight with another module.

    Args:
        keeps: weights stay gathered from the forward to the backward.
    """
    inside = {id(module) for block in blocks for module in block.modules()}
    embedding, backbone = find_input_embedding(model), get_backbone_of(model)
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if isinstance(embedding, nn.Embedding) and id(embedding) not in inside and _is_alone(model, embedding):
        unit = fully_shard(embedding, reshard_after_forward=not keeps, **settings)
        is_lookup = len(list(embedding.parameters())) == 1  # no norm in it, whose backward reads a weight
        if is_lookup:
            unit.set_unshard_in_backward(False)
    if not isinstance(head, nn.Module) or any(head.children()) or backbone is None:
        return
    if not _is_alone(model, head) or head in set(backbone.modules()):
        return
    # The head's own hook may never run: a loss in chunks reads the weight and does not call the head. So we gather it
    # when the backbone is done, and again when the backward pass begins, because a forward pass in between, as in
    # evaluation, may have freed it.
    last = fully_shard(head, reshard_after_forward=False, **settings)
    units = [block for block in blocks if isinstance(block, FSDPModule)]

    def is_used() -> bool:
        now = model.get_output_embeddings()  # or a wrapper around the head, which may have a trained copy beside it
        around = [] if now is None else [module for module in list_modules(now) if module is not head]
        weights = [module._parameters.get("weight") for module in around]
        own = head._parameters.get("weight")
        # A wrapper without a copy may compute its weight from the head's, which is not gathered yet.
        has_copy = any(weight is not None and own is not None and weight.shape == own.shape for weight in weights)
        return not has_copy or now.weight is own

    def prefetch(*_: object) -> None:
        for unit in units[-1:]:
            unit.set_modules_to_forward_prefetch([last] if is_used() else [])

    def gather(*_: object) -> None:
        if is_used():
            gather_unit(last)

    def gather_unless_done(*_: object) -> None:
        if is_used() and all(group._training_state != TrainingState.POST_BACKWARD for group in get_groups_of(last)):
            # Once the head's gradients are reduced, later gradients (of router logits) must not gather it again.
            gather_unit(last)

    def gather_in_backward(module: nn.Module, args: tuple, output: object) -> None:
        held = vars(output) if dataclasses.is_dataclass(output) and not isinstance(output, dict) else output
        for tensor in tree_leaves(held) if torch.is_grad_enabled() else ():
            if torch.is_tensor(tensor) and tensor.requires_grad:
                tensor.register_hook(gather_unless_done)

    backbone.register_forward_pre_hook(prefetch)
    backbone.register_forward_hook(gather)
    model.register_forward_hook(gather_in_backward)


def _is_alone(model: nn.Module, end: nn.Module) -> bool:
    """Return whether `end` has parameters, and no other module of the model has one of them."""
    own = {id(parameter) for parameter in end.parameters()}
    every = itertools.chain.from_iterable(module._parameters.values() for module in model.modules())
    return bool(own) and sum(id(parameter) in own for parameter in every) == len(own)


# ---- Replicas without shards: FSDP2 without the copies that it makes where each rank owns the whole weight
#                             torch 2.13                              here
#     weights, each pass      copied into memory made for them        the stored ones
#     gradients               copied into a buffer, and from there    copied into a buffer
#                             into another, which is reduced          that is reduced
#
# Weights that are computed with in another dtype, or rest on the host, are copied as torch does. It has no call for
# this: a parameter's memory is an internal of its units, looked at in torch 2.13.


def let_units_work_in_place(root: nn.Module) -> None:
    """Let the units below `root` whose weights are whole on each rank compute with the stored weights."""
    for group in iterate_parameter_groups(root):
        if isinstance(group.mesh_info, FSDPMeshInfo) and group.mesh_info.shard_mesh_size == 1:
            group._reduce_scatter_comm = _OneBuffer()
            for held in group.fsdp_params:
                lend(held)


def lend(held: FSDPParam) -> None:
    """Let a parameter that is whole on each rank be used in place, without a copy at each gather."""
    if held.mesh_info.shard_mesh_size == 1:
        held.__class__ = _Lent


class _Lent(FSDPParam):
    """A stored tensor that stands for a gathered one: copying it to itself does nothing, and it is never freed."""

    lent: torch.Tensor | None = None  # what is computed with now, where that is what is stored

    def init_all_gather_outputs(self, *args: Any, **kwargs: Any) -> None:
        memory, packed = self._sharded_param_data, hasattr(self._sharded_local_tensor, "fsdp_pre_all_gather")
        alone = memory.untyped_storage().nbytes() == memory.nbytes  # torch would resize what is larger
        as_stored = alone and not packed and self.param_dtype is None and not self.offload_to_cpu
        stored = memory if as_stored else None
        if self.lent is not stored:  # also after `to`, after loading, and where autocast begins or ends
            self.all_gather_outputs = []
            if hasattr(self, "_unsharded_param"):
                del self._unsharded_param
        self.lent = stored
        if stored is None:
            super().init_all_gather_outputs(*args, **kwargs)
        else:
            self.all_gather_outputs = [stored]

    def free_unsharded_param(self) -> None:
        if self.lent is None:  # else somebody may hold it, as a state dict from before it was replaced
            super().free_unsharded_param()


class _OneBuffer(DefaultReduceScatter):
    """A reduce-scatter over one rank. Input and output are the same numbers, so both share one buffer.

    torch first allocates the input, then the output.
    """

    _given: torch.Tensor | None = None

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        given, self._given = self._given, None
        if given is None or given.shape != tuple(size) or given.dtype != dtype:
            given = self._given = super().allocate(size, dtype=dtype, device=device)
        return given


#: Bytes of gradients that are not worth several reductions, as DistributedDataParallel has it (Li et al., 2020, 3.2).
BUCKET = 25 * 1024**2


@allow_packed_weights()
def shard_data_parallel(
    model: nn.Module,
    root: nn.Module,
    blocks: list[nn.Module],
    mesh: ParallelMesh,
    sharded: Iterable[nn.Parameter] = (),
) -> None:
    """Shard `root` over the data axes: a parameter group for each of `blocks`, for both ends, and for the rest.

    Args:
        model: what the script calls.
        root: what runs its layers: under a pipeline the stage, otherwise the model.
        blocks: the transformer layers of this rank, gathered one at a time.
        sharded: of models inside, whose modules a script may have in a second place.
    """
    if mesh.config.sharing_size == 1:
        return
    axes = mesh.sharing_mesh
    keeps = mesh.config.zero_stage < 3 or mesh.config.sharing_size == mesh.size("dp_replicate")
    if mesh.size("pp") > 1:
        keeps = True  # gathering again for every micro-batch would cost more than the memory it frees
    settings: Settings = {"mesh": axes, "mp_policy": make_policy_for(root), **make_offload_settings(mesh)}
    settings["ignored_params"] = {
        *sharded,
        *_shard_experts(root, mesh, keeps, settings),
        *_average_gradients_of_scalars(root, mesh),
    }
    apart = blocks
    if mesh.config.sharing_size <= mesh.size("dp_replicate") and not make_offload_settings(mesh):
        # Replicas have nothing to gather; with few gradients one reduction after the backward is the fastest.
        trained = (get_stored(parameter) for parameter in root.parameters() if parameter.requires_grad)
        apart = [] if sum(tensor.numel() * tensor.element_size() for tensor in trained) <= BUCKET else blocks
    apart = list(dict.fromkeys(apart))  # a script may have put one layer in several places
    _let_forward_run_hooks(root, apart)
    _prepare_classes_of_other_bases(root)
    for owners in _list_owners_of_tied(apart):
        fully_shard(owners, reshard_after_forward=not keeps, **settings)
    for block in (*_list_shared_modules(apart), *apart):
        if any(True for _ in block.parameters()):
            fully_shard(block, reshard_after_forward=not keeps, **settings)
    if apart and root is model:  # a pipeline keeps all of its weights
        shard_ends(model, blocks, keeps, settings)
    # What is left is needed first in backward: None lets torch keep it.
    fully_shard(root, reshard_after_forward=False if keeps else None, **settings)
    if root is model and hasattr(model, "generate"):
        register_fsdp_forward_method(model, "generate")  # it calls an encoder by itself, past the model's forward
    for module in iterate_sharded_modules(root):
        _name_as_before(type(module))
        let_caches_gather(module)
    let_units_work_in_place(root)
    if root is not model:
        setattr(root, SCHEDULED, True)
    follow_copies(root)
    # Before FSDP2's own hook, which gathers: weights in autocast's dtype, if a forward pass runs under autocast. What
    # `compute_in` has settled holds instead: accelerate enters autocast inside the model's forward.
    root.register_forward_pre_hook(lambda module, args: follow_dtype_now(module, mesh.device), prepend=True)
    round_after_backward(root)
    if root is model:  # a pipeline frees its stages itself
        model.register_forward_pre_hook(_gather_anew, prepend=True)
        model.register_forward_hook(_reshard_after_evaluation)
        let_scores_gather(model)
        model.register_forward_hook(end_stopped_pass, always_call=True)
        _let_parts_run(model, blocks)
        if not keeps:
            _keep_what_runs_again(model)
    _leave_inference_mode(root)
    root.register_forward_pre_hook(separate_dtypes_at_first, prepend=True)


def _list_shared_modules(blocks: list[nn.Module]) -> list[nn.Module]:
    """Return the outermost modules that several blocks have in common: each is gathered by itself where it runs."""
    times = Counter(module for block in blocks for module in block.modules())
    shared = dict.fromkeys(module for module in times if times[module] > 1)
    inner = {child for module in shared for child in module.modules() if child is not module}
    return [module for module in shared if module not in inner]


def _list_owners_of_tied(blocks: list[nn.Module]) -> list[list[nn.Module]]:
    """Return the modules of several blocks that have a parameter in common, together."""
    owners: dict[nn.Parameter, dict[nn.Module, nn.Module]] = {}
    for block in blocks:
        for module in block.modules():
            for parameter in module.parameters(recurse=False):
                owners.setdefault(parameter, {})[module] = block
    return [list(held) for held in owners.values() if len(set(held.values())) > 1]


def separate_dtypes_at_first(root: nn.Module, *args: object) -> None:
    """Separate dtypes before units first run: adapters may have come, and a script may have unfrozen weights."""
    state = get_state_of(root) if isinstance(root, FSDPModule) else None
    if state is None or state._is_root is not None:
        return
    made = separate_dtypes(root)
    let_units_work_in_place(root)
    for unit in made:
        _name_as_before(type(unit))
        state._lazy_init()
        gather_unit(unit)  # the hook that does it comes too late for this pass


def _prepare_classes_of_other_bases(root: nn.Module) -> None:
    """Make the classes that `fully_shard` gives to modules such as `class Model(ABC, nn.Module)`, which torch cannot.

    Python gives an object another class only if both got their `__dict__` above the same base. FSDP2's have theirs
    above `object`, such a model above `ABC`.
    """
    made = get_cls_to_fsdp_cls()
    for kind in {type(module) for module in root.modules()} - made.keys():
        base: Any = kind
        while base.__base__.__dictoffset__:
            base = base.__base__
        if base.__base__ is not object:
            metaclass: Any = type(kind)
            # typing.Generic asks a class that has it among its bases what it stands for
            front = metaclass("FSDPFront", (base.__base__, FSDPModule), {"__orig_bases__": ()})
            made[kind] = metaclass(f"FSDP{kind.__name__}", (front, kind), {})


def _let_forward_run_hooks(root: nn.Module, blocks: list[nn.Module]) -> None:
    """Let `blocks` gather their weights also where a module calls `block.forward(…)`, as SqueezeBERT's does."""
    for module in root.modules():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        if code is None or "forward" not in code.co_names:
            continue
        held = {block for part in module.children() for block in (part, *part.children())}
        for block in held.intersection(blocks):
            put_in_front(_ForwardWithHooks, block)


class _ForwardWithHooks(nn.Module):
    """A unit of FSDP2 whose `forward` runs the hooks of a call, too, when it is called without `__call__`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self, FSDPModule) and get_state_of(self)._training_state is TrainingState.IDLE:
            return self(*args, **kwargs)
        return super().forward(*args, **kwargs)


def _name_as_before(kind: type) -> None:
    """Give a class that FSDP2 has made the name and the module of the model's own class.

    Libraries look classes up by name: Trainer to shift labels, Transformers to record hidden states. And Transformers
    takes a class of another module for the script's own, whose new weights it draws in another way.
    """
    own = next(base for base in kind.__mro__ if not issubclass(base, FSDPModule))
    kind.__name__, kind.__qualname__, kind.__module__ = own.__name__, own.__qualname__, own.__module__


def move_rest(model: nn.Module, mesh: ParallelMesh) -> None:
    """Move the parameters and buffers that are in no unit of FSDP2 to the device.

    A stage has buffers beside its units. Parameters that `offload` keeps on the host stay there.
    """
    device, rests = mesh.device, bool(make_offload_settings(mesh))
    for module in model.modules():
        for tensors in (module._buffers,) if rests else (module._parameters, module._buffers):
            for tensor in (tensor for tensor in tensors.values() if tensor is not None):
                if tensor.device != device and not tensor.is_meta:
                    tensor.data = tensor.data.to(device)


def make_offload_settings(mesh: ParallelMesh) -> Settings:
    """Return the policy that keeps parameters and gradients on the host: pinned, unless they are in files."""
    offload = mesh.config.offload
    if not parameters_rest(offload):
        return {}
    return {"offload_policy": CPUOffloadPolicy(pin_memory=mesh.device.type != "cpu" and not offload_folder(offload))}


def _shard_experts(root: nn.Module, mesh: ParallelMesh, keeps: bool, settings: Settings) -> set[nn.Parameter]:
    """Shard each rank's experts over the ranks that hold the same experts, if there are several.

    Returns:
        The parameters that `fully_shard` of the modules around them must leave alone.
    """
    if mesh.config.ep_size == 1:
        return set()
    found = [module for _, module in iterate_experts(root)]
    if mesh.size("ep_shard") * mesh.size("dp_replicate") == 1:
        return {parameter for module in found for parameter in module.parameters()}
    axes = mesh["dp_replicate", "ep_shard"] if mesh.size("dp_replicate") > 1 else mesh["ep_shard"]
    again = not keeps and mesh.size("ep_shard") > 1
    own: Settings = {**settings, "mesh": axes}
    for module in found:
        fully_shard(
            module,
            reshard_after_forward=again,
            shard_placement_fn=lambda p: Shard(shard_dim(get_stored(p).shape, mesh.size("ep_shard"))),
            **own,
        )
    return set()


def _average_gradients_of_scalars(root: nn.Module, mesh: ParallelMesh) -> set[nn.Parameter]:
    """Average the gradients of parameters without a dim in each backward pass, as FSDP2 averages those of the others.

    Returns:
        These parameters, which `fully_shard` cannot cut and must leave alone.
    """
    axes = mesh.sharing_mesh
    groups = [axes.get_group(dim) for dim in range(axes.ndim) if axes.size(dim) > 1]

    def average(gradient: torch.Tensor) -> torch.Tensor:
        mean = make_gradient_whole(gradient).float()
        for group in groups:
            mean = all_reduce(mean, group) / group.size()
        return mean.to(gradient.dtype)

    return hook_gradients_of_scalars(root, average, mesh.device)


def _let_parts_run(model: nn.Module, blocks: list[nn.Module]) -> None:
    """Let scripts call parts of a sharded model, such as its backbone or embedding, before or without the model.

    FSDP2 takes the unit that runs first for the root, and gathers the root's own weights (the last norm's) only in a
    call of the root. So the modules around `blocks` and beside them run the root's hooks, too.
    """
    state = get_state_of(model)
    units = [module for module in model.modules() if isinstance(module, FSDPModule) and module is not model]
    states = [get_state_of(unit) for unit in units]

    def begin() -> None:
        for each in states:
            vars(each).pop("_lazy_init", None)
        state._lazy_init()

    for each in states:  # `generate` of a unit asks its state past the hooks of the unit's forward
        vars(each)["_lazy_init"] = begin

    entered: list[bool] = []

    def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        entered.append(state._training_state is TrainingState.IDLE)  # else the model itself runs, or runs again
        if not entered[-1]:
            return None
        _gather_anew(model, args)
        return state._pre_forward(model, args, kwargs)

    def leave(module: nn.Module, args: tuple, output: object) -> object:
        if not entered.pop():
            return None
        output = state._post_forward(model, args, output)
        _reshard_after_evaluation(model, args, output)
        return output

    by_themselves = {*units, *blocks}
    around = [
        module for module in model.modules() if by_themselves & {*module.modules()} and module not in by_themselves
    ]
    for part in {part: None for module in around for part in (module, *module.children())}:
        if part is not model and part not in by_themselves and any(True for _ in part.parameters()):
            part.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            part.register_forward_hook(leave, always_call=True)


def gather_around(unit: FSDPModule, wrapper: nn.Module) -> None:
    """Let a unit gather its weights around the calls of a wrapper, which may read them and not call the unit.

    torch has no call for this: a unit's handles are internals, looked at in torch 2.13.
    """
    state = get_state_of(unit)
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    state._pre_forward_hook_handle = wrapper.register_forward_pre_hook(
        state._pre_forward, prepend=True, with_kwargs=True
    )
    state._post_forward_hook_handle = wrapper.register_forward_hook(state._post_forward)


def _keep_what_runs_again(model: nn.Module) -> None:
    """Keep units that a forward pass calls several times gathered from the second call to the end of the pass.

    LLaVA looks up the tokens of each example in a call of its own; other models run a frozen tower picture by picture.
    In a ragged last batch, data ranks have unlike numbers of examples, and would gather these weights unlike numbers
    of times. All ranks see a second call in the full batches before. Only units whose backward pass reduces nothing
    are kept, and the embedding, whose gradient is reduced once at the end.
    """
    state, lookup, calls, kept = (
        get_state_of(model),
        find_input_embedding(model),
        Counter[nn.Module](),
        list[nn.Module](),
    )

    def count(unit: nn.Module, args: tuple) -> None:
        calls[unit] += state._training_state is TrainingState.FORWARD  # else it runs alone, or again for the backward
        if calls[unit] == 2 and unit not in kept:
            held = [held for group in get_groups_of(unit) for held in group.fsdp_params]
            if unit is lookup or not any(one.sharded_param.requires_grad for one in held):
                kept.append(unit)
                cast(FSDPModule, unit).set_reshard_after_forward(False, recurse=False)

    def free(module: nn.Module, args: tuple, output: object) -> None:
        calls.clear()
        for unit in kept if not is_kept_gathered(model) else ():
            cast(FSDPModule, unit).reshard()

    for unit in model.modules():
        if isinstance(unit, FSDPModule) and unit is not model:
            unit.register_forward_pre_hook(count, prepend=True)
    model.register_forward_hook(free, always_call=True)


def _gather_anew(model: nn.Module, args: tuple) -> None:
    """Free the weights that a forward pass without a backward pass has left gathered, so that they are gathered again.

    They may have changed since. We free them always, because a write through `p.data` leaves no trace, and all ranks
    must gather together.
    """
    if is_kept_gathered(model):
        return
    if any(group._post_forward_indices for group in iterate_parameter_groups(model)):
        for module in iterate_sharded_modules(model):
            module.reshard()


def _reshard_after_evaluation(model: nn.Module, args: tuple, output: object) -> None:
    """Free the gathered weights after a forward pass without gradients, because no backward pass will.

    While they are gathered, `parameters()` shows plain tensors.
    """
    if not torch.is_grad_enabled() and not is_kept_gathered(model):
        for module in iterate_sharded_modules(model):
            module.reshard()


def _leave_inference_mode(root: nn.Module) -> None:
    """Leave inference mode while the model runs: a backward pass cannot use tensors that were made in it.

    FSDP2 keeps the memory of its first gather for all later ones.
    """
    left: list[contextlib.ExitStack] = []

    def leave(module: nn.Module, args: tuple) -> None:
        left.append(contextlib.ExitStack())
        if torch.is_inference_mode_enabled():
            left[-1].enter_context(torch.inference_mode(False))
            left[-1].enter_context(torch.no_grad())

    root.register_forward_pre_hook(leave, prepend=True)
    root.register_forward_hook(lambda module, args, output: left.pop().close(), always_call=True)


def forget_root(model: nn.Module) -> None:
    """Let a model that has run as the outermost one be sharded inside another: the next forward pass finds the root.

    torch has no call for this: a unit's state is its internal, looked at in torch 2.13.
    """
    for module in iterate_sharded_modules(model):
        state = get_state_of(module)
        state._is_root = None
        for group in get_groups_of(module) if state._auto_reshard_after_forward else ():
            # A root keeps its weights for the backward pass.
            group.post_forward_mesh_info = cast("FSDPMeshInfo", group.mesh_info)


def without_sharding(module: nn.Module) -> nn.Module:
    """Return a copy of a unit that shares its parameters and is unknown to FSDP2; other modules as they are.

    torch has no call for this: a unit's state and its handles are internals, looked at in torch 2.13.
    """
    if not isinstance(module, FSDPModule):
        return module
    state = get_state_of(module)
    kind: Any = next(base for base in type(module).__mro__ if not issubclass(base, FSDPModule))  # from before
    plain = kind.__new__(kind)
    vars(plain).update(vars(module))
    for name in ("_parameters", "_buffers", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks"):
        setattr(plain, name, type(vars(plain)[name])(vars(plain)[name]))
    for key in (STATE_KEY, REGISTRY_KEY):
        vars(plain).pop(key, None)
    for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
        for hooks in (plain._forward_pre_hooks, plain._forward_pre_hooks_with_kwargs, plain._forward_hooks):
            hooks.pop(handle.id, None)
    return plain

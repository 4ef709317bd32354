"""Make a model parallel.

    config = ParallelConfig.parse(spec)      ask      sizes and settings
    anatomy = read_model(model, config)      read     what the model is
    plan = resolve(config, anatomy)          plan     what will be done to it, or the error that names what works
    apply(model, plan, mesh)                 apply    each axis does its part, from inside a layer outwards

The model then carries a `ParallelState` as `model._hf_parallel`.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_module_registration_hook

from hf_parallel.apply.methods import (
    check_adapters_inside,
    find_models_inside,
    replace_methods,
    replace_methods_around,
    share_own,
)
from hf_parallel.apply.own_code import prove_own_code, refuse_changed_code, refuse_unlike_statistics
from hf_parallel.apply.weights import (
    note_former_parameters,
    refuse_changed_parameters,
    refuse_gradients_of_gradients,
    take_exchanged,
)
from hf_parallel.apply.whole_step import step_on_whole_tensors
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.keys.data import MEASURED
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.axis import Building, Packing, Plan
from hf_parallel.axes.data.gradients import clip_over_mesh
from hf_parallel.axes.data.local_step import step_on_local_parts
from hf_parallel.axes.data.parameters import make_identical, send_from_first
from hf_parallel.axes.pipeline.axis import PIPELINE
from hf_parallel.axes.pipeline.engine import PipelineEngine
from hf_parallel.axes.pipeline.stage_runner import Pipelines, pipelines_of
from hf_parallel.axes.tensor.axis import TENSOR
from hf_parallel.axes.tensor.layers import PartialGradient
from hf_parallel.axes.tensor.tensor_parallel import retie
from hf_parallel.axes.tensor.whole_layers import find_linear_that_is_wrapped, keep_whole_around
from hf_parallel.model.anatomy import is_tie_broken, list_transformer_blocks
from hf_parallel.plans.resolve import read_model, resolve
from hf_parallel.ranks import OneBatch, messages, watch
from hf_parallel.ranks.mesh import ParallelMesh, get_stored
from hf_parallel.ranks.steps import keep_compiled_steps_apart

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_parallel.axes.pipeline.part import StageFacts


def parallelize_model(
    model: nn.Module,
    config: ParallelConfig | str | None = None,
    mesh: ParallelMesh | None = None,
    pack: Packing | None = None,
) -> Any:
    """Make `model` parallel in place over all processes and return the same object.

    Afterwards `model(**batch)` and `loss.backward()` work as before, on this rank's share of the data; gradients are
    averaged over the data ranks. Create the optimizer afterwards. Collective: every process calls it.

    Args:
        model: on the meta device, or with weights. Where the weights of ranks differ, rank 0's are used.
        config: a `ParallelConfig` or a spec such as "tp=2,pp=2"; default: all processes shard the data.
        mesh: an existing mesh to use, whose config is then the one in force.
        pack: replaces the weights of the split model, by packed ones for example, before they are sharded.

    Raises:
        SpecError: the layout cannot hold for this model or number of processes.
    """
    if mesh is None:
        if not dist.is_initialized():
            refuse("parallelize", "needs a process group", do="start with torchrun and call init_process_group first")
        mesh = ParallelMesh.create(ParallelConfig.parse(config or ParallelConfig()), choose_default_device())
    if state_of(model) is None:
        if inside := find_models_inside(model, mesh.config):
            return _parallelize_around(model, inside, mesh)
        if any(parameter.is_meta for parameter in model.parameters()):
            retie(model)  # a model that is still being loaded ties its weights by name only
        else:
            _forget_broken_ties(model)
    anatomy = read_model(model, mesh.config)
    facts = anatomy.facts.get(PIPELINE.name)
    if facts is not None and mesh.config.pipeline_split == MEASURED:
        measured = replace(cast("StageFacts", facts), devices=mesh.pipeline_devices)
        anatomy = replace(anatomy, facts={**anatomy.facts, PIPELINE.name: measured})
    plan = resolve(mesh.config, anatomy)
    if pack is not None:
        pack.check(model, plan)
    if anatomy.is_transformers:
        prove_own_code(cast("PreTrainedModel", model), mesh, apply)
    with note_former_parameters(model):
        apply(model, plan, mesh, pack)
    if anatomy.is_transformers:
        refuse_changed_code(cast("PreTrainedModel", model), mesh)
    refuse_unlike_statistics(model, mesh)
    return model


def _forget_broken_ties(model: nn.Module) -> None:
    """Keep of the ties that a model names those that hold: a script may have given the head a weight of its own.

    The names of parameters end with the call: the caller would keep whole weights in memory while it cuts the model.
    """
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    held = dict(model.named_parameters(remove_duplicate=False))
    kept = {one: other for one, other in ties.items() if not is_tie_broken(held, one, other)}
    if len(kept) < len(ties):
        setattr(model, "all_tied_weights_keys", kept)  # noqa: B010 - of transformers models alone


def apply(model: nn.Module, plan: Plan, mesh: ParallelMesh, pack: Packing | None = None) -> ParallelState:
    """Do what the plan says, from inside a layer outwards: kernels, recomputation, matrices, layers, storage."""
    building = Building(mesh, plan.anatomy.on_meta, [(model, list_transformer_blocks(model))], pack)
    if not building.on_meta:
        make_identical(model, mesh.device)
    for axis in plan.axes:
        if axis.name in plan.parts:
            axis.apply(model, plan.parts[axis.name], building)
    for axis in plan.axes:
        if axis.name in plan.parts:
            axis.finish(model, plan.parts[axis.name], building)
    root = model if building.pipeline is None else building.pipeline.stages
    pipeline = cast("PipelineEngine | None", building.pipeline)
    state = ParallelState(plan, mesh, root, OneBatch(mesh), pipeline, list(plan.notes))
    watch()
    take_exchanged()  # before `step_on_local_parts`: an optimizer is checked with the parameters that it was given
    step_on_local_parts()
    step_on_whole_tensors()
    keep_compiled_steps_apart()
    tied = dict(getattr(model, "all_tied_weights_keys", None) or {})
    vars(model).update(_hf_parallel=state, _hf_parallel_tied_keys=tied)
    replace_methods(model, mesh, pipeline, functools.partial(parallelize_model, mesh=mesh))
    if state.config.sharing_size > 1 or pipeline is not None:
        gathers = root is model and state.config.sharing_size > 1
        model.register_forward_pre_hook(functools.partial(refuse_changed_parameters, root, gathers), prepend=True)
    if pipeline is None and state.config.world_size > 1:
        model.register_forward_hook(refuse_gradients_of_gradients)
    compare = functools.partial(_compare_batches, state.batches, pipelines_of(mesh))
    model.register_forward_pre_hook(compare, with_kwargs=True)
    if mesh.size("tp") > 1 or mesh.size("pp") > 1 or state.config.sharing_size > 1:
        watch_for_late_modules(model, mesh, pipeline)
    return state


@dataclass
class ParallelState:
    """The state of a parallel model, found at `model._hf_parallel`.

    A module around transformers models (its `parts`) has no plan: each part has its own state and plan.
    """

    plan: Plan | None
    mesh: ParallelMesh
    root: nn.Module
    batches: OneBatch
    pipeline: PipelineEngine | None = None
    notes: list[str] = field(default_factory=list)
    parts: tuple[PreTrainedModel, ...] = ()
    around: weakref.ref[nn.Module] | None = None  # the module that this model is a part of
    copy_adapters: Callable[[PreTrainedModel, PreTrainedModel, dict], None] | None = None  # into another model like it
    reported: bool = False
    counts_tokens: bool = False
    said: set[str] = field(default_factory=set)  # lines that are printed once, and have been

    def note_line(self, line: str) -> bool:
        """Remember a line that is about to be said; return whether it is the first time."""
        first = line not in self.said
        self.said.add(line)
        return first

    @property
    def config(self) -> ParallelConfig:
        """Return the config in force."""
        return self.mesh.config if self.plan is None else self.plan.config

    @property
    def sums_over_tokens(self) -> bool:
        """Return whether the model's loss is a sum over tokens divided by `num_items_in_batch`."""
        return self.plan is not None and self.plan.anatomy.sums_over_tokens

    @property
    def sequence_parallel(self) -> bool:
        """Return whether each tp rank holds a part of the sequence between regions."""
        part = None if self.plan is None else self.plan.part(TENSOR)
        own = part is not None and part.whole_sequences is None
        return own or any(inner._hf_parallel.sequence_parallel for inner in self.parts)


def _compare_batches(batches: OneBatch, pipelines: Pipelines, model: nn.Module, args: tuple, kwargs: dict) -> None:
    """Compare the batches of ranks that must see the same one, in the model's first steps. A forward pre-hook.

    A script's loss calls the model on the last stage alone, so such calls are not compared.
    """
    if pipelines.session is None:
        batch = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
        batches.check(batch, f"forward {model.training}")


def _parallelize_around(model: PreTrainedModel, parts: Mapping[str, PreTrainedModel], mesh: ParallelMesh) -> nn.Module:
    """Make the transformers models inside `model` parallel, if they are not yet; return `model` itself."""
    for part in parts.values():
        if state_of(part) is None:
            parallelize_model(part, mesh=mesh)
    check_adapters_inside(model, parts)
    share_own(model, parts, mesh)
    notes = [note for part in parts.values() for note in part._hf_parallel.notes]
    if mesh.data_size > 1:
        notes.append("a loss that compares the rows of a batch sees those of one data rank only, as under DDP")
    state = ParallelState(None, mesh, model, OneBatch(mesh), notes=notes, parts=tuple(parts.values()))
    watch()
    for part in parts.values():
        part._hf_parallel.around = weakref.ref(model)
    inner = {name: getattr(part, "_hf_parallel_tied_keys", {}) for name, part in parts.items()}
    tied = {f"{name}.{key}": f"{name}.{kept}" for name, keys in inner.items() for key, kept in keys.items()}
    model._hf_parallel, model._hf_parallel_tied_keys = state, tied  # a tied weight -> the name it is saved under
    replace_methods_around(model, parts, mesh)
    return model


def state_of(model: nn.Module) -> ParallelState | None:
    """Return the parallel state of `model`, or None if it was not made parallel."""
    return getattr(model, "_hf_parallel", None)


def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip the gradients of a model by their norm over all ranks; return the norm before clipping."""
    state = state_of(model)
    if state is None:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    return clip_together(model.parameters(), [state], max_norm, norm_type)


def clip_together(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    states: list[ParallelState],
    max_norm: float,
    norm_type: float = 2.0,
) -> torch.Tensor:
    """Clip the gradients of parallel models of one mesh by their joint norm; return the norm before clipping.

    Args:
        parameters: a single one is clipped by its own norm, which other stages of a pipeline do not call for.
    """
    copies: set[int] = set()
    if isinstance(parameters, torch.Tensor):
        return clip_over_mesh([parameters], float(max_norm), states[0].mesh, float(norm_type), of_stage=True)
    for engine in (state.pipeline for state in states if state.pipeline):
        copies |= engine.copies
        if engine.late:  # an earlier stage may count their gradients, too
            own = [parameter.grad is not None for parameter in engine.late]
            held = messages.gather_objects(own, engine.mesh.group_on_host("pp"))[: engine.mesh.index("pp")]
            copies |= {id(parameter) for parameter, *before in zip(engine.late, *held, strict=True) if any(before)}
    return clip_over_mesh(parameters, float(max_norm), states[0].mesh, float(norm_type), copies)


def choose_default_device() -> torch.device:
    """Return the device of this process: its accelerator if the machine has one, else the CPU.

    torch's default is the first accelerator. A process that still has it takes the accelerator of its LOCAL_RANK.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    index, local_rank = torch.accelerator.current_device_index(), int(os.environ.get("LOCAL_RANK") or 0)
    if index == 0 < local_rank < torch.accelerator.device_count():
        torch.accelerator.set_device_index(local_rank)
        index = local_rank
    return torch.device(accelerator.type, index)


def gather_parameters_per_rank(model: nn.Module) -> list[int]:
    """Return how many parameters each rank stores, in rank order. Collective."""
    unique = {id(p): p for p in model.parameters()}.values()
    return messages.gather_objects(sum(get_stored(p).numel() for p in unique))


# ---- Modules that a script puts into a model after it became parallel: equal on all ranks, or refused
# Data ranks share them out (`add_late_parameters`), and adapters are placed when they come.


def watch_for_late_modules(model: nn.Module, mesh: ParallelMesh, pipeline: PipelineEngine | None) -> None:
    """Look for modules that have come into `model`, in the first forward pass after any module came anywhere.

    Ranks may have drawn other numbers for them: the first rank of pp and tp sends its own to the others.

    Raises:
        SpecError: in that forward pass; a module lies where a tp rank sees a part of the tokens or of the columns. And
            when it comes, if it is another model's, which data ranks share out.
    """
    known, changed = weakref.WeakSet(model.modules()), [False]
    for view in pipeline.views if pipeline is not None else ():
        shown = [held for *_, held in view.swaps if held is not None]  # stand in their places while a stage runs
        known.update(inner for held in shown for inner in held.modules())
    layers, cuts = {id(layer) for layer in list_transformer_blocks(model)}, mesh.size("tp") > 1
    places = model.named_modules() if cuts else ()
    guarded = tuple(f"{name}." for name, one in places if id(one) in layers or isinstance(one, PartialGradient))

    def note(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is None or child in known:  # a slice of a ModuleList registers modules of the model
            return
        changed[0] = True
        inner = child.modules() if parent in known and mesh.config.sharing_size > 1 else ()
        if any(isinstance(one, FSDPModule) and one not in known for one in inner):
            why = f"another model's weights, which {mesh.config.sharing_size} ranks share out for it alone"
            refuse(f"{name}, put into a parallel model", why, do="a module of its own, loaded again, works")

    def look(module: nn.Module, args: tuple) -> None:
        if not changed[0] or pipelines_of(mesh).session is not None:  # the last stage alone
            return
        changed[0], named = False, dict(module.named_modules())
        marks = ("base_layer", "modules_to_save", "_hf_parallel_placed")  # the last of a copy that has been taken out
        wrappers = [one for one in named.values() if any(hasattr(one, mark) for mark in marks)]
        placed = {id(one) for wrapper in wrappers for one in wrapper.modules()}  # PEFT's, which are placed already
        late = {name: one for name, one in named.items() if one not in known and id(one) not in placed}
        known.update(named.values())
        # Layers of the script around a linear, such as LoRA; and what other stages compute with.
        whole = () if pipeline is None else tuple(f"{name}." for name in pipeline.remote_modules.modules)
        for name in (name for name in late if f"{name}.".startswith(guarded)):
            linear = find_linear_that_is_wrapped(late[name], model.get_submodule(name.rpartition(".")[0]))
            if linear is not None:
                keep_whole_around(late[name], linear)
                whole += (f"{name}.",)
            elif not name.startswith(whole):
                why = f"tp_size={mesh.size('tp')} has split the layer before, and a rank sees a part of its tokens"
                refuse(f"{name}, put into a parallel model", why, do="an adapter of PEFT works, and so does tp_size=1")
        tensors: dict[str, torch.Tensor] = {}
        for name, one in late.items():
            own = (*one.named_parameters(recurse=False), *one.named_buffers(recurse=False))
            tensors |= {f"{name}.{key}": tensor for key, tensor in own}
        if late and pipeline is not None:  # all stages take the first one's values, whichever computes with them
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            held = messages.gather_objects(shapes, mesh.group_on_host("pp"))
            common = [t for name, t in tensors.items() if all(there.get(name) == t.shape for there in held)]
            if mesh.config.sharing_size == 1:
                send_from_first(common, [mesh.group("pp")], mesh.device)
            pipeline.late += [tensor for tensor in common if isinstance(tensor, nn.Parameter)]
        if late and cuts and mesh.config.sharing_size == 1:
            send_from_first(tensors.values(), [mesh.group("tp")], mesh.device)

    handle = register_module_module_registration_hook(note)
    weakref.finalize(model, handle.remove)
    model.register_forward_pre_hook(look, prepend=True)

"""parallelize(model, config): one page; the order of its lines is the algorithm."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.axes.data.gradients import clip_grad_norm as clip_over_mesh
from hf_parallel.axes.data.identical import make_identical
from hf_parallel.axes.data.local_step import step_on_local_parts
from hf_parallel.axes.data.zero import shard_data_parallel
from hf_parallel.axes.pipeline import PipelineEngine, cut_into_stages
from hf_parallel.axes.pipeline.schedules import choose_schedule
from hf_parallel.axes.pipeline.stages import has_tied_embedding, layer_count, layers_per_stage
from hf_parallel.axes.tensor.region import SequenceParallelFlag
from hf_parallel.axes.tensor.sequence_parallel import obstacle, pad_sequences, sequence_parallel
from hf_parallel.axes.tensor.styles import resolve_styles
from hf_parallel.axes.tensor.tensor_parallel import tensor_parallel
from hf_parallel.axes.tensor.vocab_parallel import gather_when_read, vocab_parallel
from hf_parallel.collectives import OneBatch, watch
from hf_parallel.config import AUTO_SCHEDULE, SPLIT_BACKWARD, V_SCHEDULES, ParallelConfig, SpecError
from hf_parallel.mesh import ParallelMesh, stored
from hf_parallel.model.anatomy import (
    flops_per_token,
    loss_sums_over_tokens,
    reads_item_count,
    transformer_blocks,
)
from hf_parallel.model_methods import replace_methods
from hf_parallel.wrapping import models_inside, save_whole, share_own, tied_inside


@dataclass
class ParallelState:
    """What is known about a parallel model; found at `model._hf_parallel`."""

    config: ParallelConfig
    mesh: ParallelMesh
    root: nn.Module
    batches: OneBatch
    pipeline: PipelineEngine | None = None
    sums_over_tokens: bool = False
    reads_item_count: bool = False
    sequence_parallel: bool = False
    flops_per_token: float = 0.0
    notes: list[str] = field(default_factory=list)
    reported: bool = False
    counts_tokens: bool = False
    parts: tuple[Any, ...] = ()  # parallel models that this one is around
    said: set[str] = field(default_factory=set)  # lines that are said once


def parallelize(
    model: Any,
    config: ParallelConfig | str | None = None,
    mesh: ParallelMesh | None = None,
    pack: Callable[[Any], None] | None = None,
) -> Any:
    """Make `model` parallel in place over all processes and return the same object.

    Afterwards `model(**batch)` and `loss.backward()` work as before, on this rank's share of the data; gradients are
    averaged over the data ranks. Create the optimizer afterwards. Collective: every process calls it.

    Args:
        model: with weights, which need not be equal on all ranks (rank 0's win), or on the meta device.
        config: a `ParallelConfig` or a spec such as "tp=2,pp=2"; default: all processes shard the data.
        mesh: reuse an existing mesh.
        pack: called on the split model before it is sharded, to give it weights of another kind.

    Raises:
        SpecError: the layout cannot hold for this model or number of processes.
    """
    if mesh is None:
        if not dist.is_initialized():
            raise SpecError("parallelize needs a process group; start with torchrun and call init_process_group first")
        mesh = ParallelMesh.create(ParallelConfig.parse(config or ParallelConfig()), default_device())
    inside = {} if state_of(model) is not None else models_inside(model, mesh.config)
    if inside:
        return parallelize_around(model, inside, mesh)
    config, state = mesh.config, ParallelState(mesh.config, mesh, model, OneBatch(mesh))
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    state.sums_over_tokens, state.reads_item_count = loss_sums_over_tokens(model), reads_item_count(model)
    state.flops_per_token = flops_per_token(model) * config.data_parallel_size / config.world_size

    _check_model(model, config)
    use_attention(model, config.attention)
    if config.activation_checkpointing == "full":
        checkpoint_activations(model)
    if on_meta:
        retie(model)
    else:
        make_identical(model, mesh.device)

    roots = [(model, transformer_blocks(model))]
    tied = config.pp_size > 1 and has_tied_embedding(model)
    if config.pp_size > 1:
        config = state.config = mesh.config = with_schedule(model, config, tied)
        counts, line = layers_per_stage(model, config)
        state.notes.append(line)
        if config.recomputes_in_parts(config.pipeline_schedule):
            state.notes.append(f"{config.pipeline_schedule} recomputes layers several times; 1f1b is faster here")
    if config.tp_size > 1:
        styles = resolve_styles(model, config.tp_size)
        state.sequence_parallel = _wants_sequence_parallel(model, styles, state)
        switch = SequenceParallelFlag(state.sequence_parallel)
        tensor_parallel(model, mesh["tp"], styles, mesh.device, switch, config.tp_overlap)
        vocab_parallel(model, mesh["tp"], styles, mesh.device, state.sums_over_tokens, config.tp_overlap)
        retie(model)
        if state.sequence_parallel:
            sequence_parallel(model, mesh["tp"], mesh.device, switch)
    if config.pp_size > 1:
        check_tied_in_a_v(config, tied)
        check_overlap(config)
        views, remote_modules = cut_into_stages(model, config, mesh.index("pp"), counts)
        parts = config.tp_size if state.sequence_parallel else 1
        state.pipeline = PipelineEngine(
            model, views, mesh, tied, state.sums_over_tokens, counts, remote_modules, parts
        )
        state.root = state.pipeline.stages
        roots = [(stage, view.layers) for stage, view in zip(state.pipeline.stages, views, strict=True)]
    if not on_meta:
        model.to(mesh.device)
    if pack is not None:
        pack(model)
    for root, layers in roots:
        shard_data_parallel(model, root, layers, mesh)
    if config.tp_size > 1:
        gather_when_read(model)
    if state.sequence_parallel:
        pad_sequences(model, config.tp_size, switch, caches=state.pipeline is None)
    if state.pipeline is not None:
        state.pipeline.attach()

    _mark(model, state)
    return model


def parallelize_around(model: Any, parts: dict[str, Any], mesh: ParallelMesh) -> Any:
    """Make a module parallel that is around transformers models, which may be so already; the same object."""
    for part in parts.values():
        if state_of(part) is None:
            parallelize(part, mesh=mesh)
    share_own(model, parts, mesh)
    inner = [part._hf_parallel for part in parts.values()]
    state = ParallelState(mesh.config, mesh, model, OneBatch(mesh), parts=tuple(parts.values()))
    state.flops_per_token = sum(part.flops_per_token for part in inner)
    state.notes = [note for part in inner for note in part.notes]
    state.sequence_parallel = any(part.sequence_parallel for part in inner)
    watch()
    model._hf_parallel, model._hf_parallel_tied_keys = state, tied_inside(parts)
    save_whole(model, parts, mesh)
    return model


def state_of(model: Any) -> ParallelState | None:
    """The parallel state of `model`, or None if it was not made parallel."""
    return getattr(model, "_hf_parallel", None)


def clip_grad_norm(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Clip the gradients of a parallel model by their norm over all ranks; returns the norm before clipping."""
    state = state_of(model)
    if state is None:
        return torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
    copies = state.pipeline.copies if state.pipeline else ()
    return clip_over_mesh(model.parameters(), max_norm, state.mesh, norm_type, copies)


def default_device() -> torch.device:
    """The device of this process: its accelerator if the machine has one, else the CPU.

    A process that has not chosen one takes that of its LOCAL_RANK; the first is what it has without choosing.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    number, place = torch.accelerator.current_device_index(), int(os.environ.get("LOCAL_RANK") or 0)
    if number == 0 and place < torch.accelerator.device_count() and place > 0:
        torch.accelerator.set_device_index(place)
        number = place
    return torch.device(accelerator.type, number)


def retie(model: Any) -> None:
    """Let tied modules share one Parameter before FSDP2 looks: it would keep, gather and pad a shard for each.

    `from_pretrained` ties only after it has loaded, and splitting over tp makes new Parameters.
    """
    for target, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        own, theirs = model.get_parameter(target), model.get_parameter(source)
        # BERT's head has its bias from a module that is not split: the split one is the one that lives on.
        lasting, changed = (
            (own, source) if isinstance(own, DTensor) and not isinstance(theirs, DTensor) else (theirs, target)
        )
        owner, _, name = changed.rpartition(".")
        model.get_submodule(owner)._parameters[name] = lasting


def _check_model(model: Any, config: ParallelConfig) -> None:
    if state_of(model) is not None:
        raise SpecError(f"{type(model).__name__} is parallel already; parallelize it once")
    if getattr(model, "is_quantized", False):
        raise SpecError(
            f"{type(model).__name__} is quantised already, in layers that cannot be cut; under "
            "`python -m hf_parallel --parallel SPEC` from_pretrained packs each rank's part in 4 bits, which works"
        )
    splits = {key: size for key, size in (("tp_size", config.tp_size), ("pp_size", config.pp_size)) if size > 1}
    key, size = next(iter(splits.items()), ("", 1))
    replaced = next((name for name, module in model.named_modules() if name and "forward" in vars(module)), None)
    if splits and replaced is not None:
        raise SpecError(
            f"{key}={size}: {replaced} has a forward of its own, as Liger and kernels of the Hub put on modules, "
            f"which a split would not change; {key}=1 with dp_shard works"
        )
    if splits and not hasattr(model, "base_model_prefix"):
        raise SpecError(
            f"{key}={size}: {type(model).__name__} is not a transformers model; {key}=1 with dp_shard works"
        )
    if len({p.device.type == "meta" for p in model.parameters()}) > 1:
        raise SpecError(f"{type(model).__name__} is partly on the meta device; load it fully or not at all")


def with_schedule(model: Any, config: ParallelConfig, tied: bool) -> ParallelConfig:
    """The config with pipeline_schedule=auto decided."""
    if config.pipeline_schedule != AUTO_SCHEDULE:
        return config
    chosen = choose_schedule(config, layer_count(model, config), tied)
    return dataclasses.replace(config, pipeline_schedule=chosen)


def check_tied_in_a_v(config: ParallelConfig, tied: bool) -> None:
    """A V puts embedding and head on one rank but in two FSDP2 roots, which cannot share a parameter.

    Raises:
        SpecError: that is asked for.
    """
    if tied and config.pipeline_schedule in V_SCHEDULES and config.data_parallel_size > 1:
        raise SpecError(
            f"pipeline_schedule={config.pipeline_schedule}: tied embeddings cannot be sharded over data ranks; "
            "interleaved_zero_bubble works"
        )


def check_overlap(config: ParallelConfig) -> None:
    """Before 2.13 torch loses the nodes of own functions between the two halves of a split backward pass.

    Raises:
        SpecError: they are needed, to overlap collectives with products.
    """
    old = Version(torch.__version__).release[:2] < (2, 13)
    if old and config.tp_overlap and config.pipeline_schedule in SPLIT_BACKWARD:
        raise SpecError(
            f"tp_overlap=true with pipeline_schedule={config.pipeline_schedule} needs torch 2.13, here is "
            f"{torch.__version__}; tp_overlap=false works"
        )


def _wants_sequence_parallel(model: Any, styles: dict[str, str], state: ParallelState) -> bool:
    """On by default where the model allows it; what cannot be met is an error if asked for, else a note."""
    reason = why_whole_sequences(model, styles, state.config.sequence_parallel)
    if reason is not None and state.config.sequence_parallel is None:
        state.notes.append(f"no sequence parallelism: {reason}")
    return reason is None


def why_whole_sequences(model: Any, styles: dict[str, str], asked: bool | None) -> str | None:
    """Why there is no sequence parallelism, or None if there is.

    Raises:
        SpecError: it is asked for, and the model does not allow it.
    """
    reason = "sequence_parallel=false" if asked is False else obstacle(model, styles)
    if asked and reason is not None:
        raise SpecError(f"sequence_parallel=true: {reason}; sequence_parallel=false works")
    return reason


def use_attention(model: Any, name: str) -> None:
    """Set the kernel the spec names; `auto` leaves the model's own.

    Raises:
        SpecError: the model or this machine does not have it.
    """
    if name == "auto":
        return
    try:
        model.set_attn_implementation(name)
    except (ImportError, ValueError) as error:
        raise SpecError(f"attention={name}: {str(error).splitlines()[0]}; attention=sdpa works") from error


def checkpoint_activations(model: Any) -> None:
    """Let every layer's forward pass run again in the backward pass; before transformers 5.23 by its former name."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable()


def _mark(model: Any, state: ParallelState) -> None:
    watch()
    step_on_local_parts()
    model._hf_parallel = state
    model._hf_parallel_tied_keys = dict(getattr(model, "all_tied_weights_keys", None) or {})
    replace_methods(model, state.mesh, state.pipeline, functools.partial(parallelize, mesh=state.mesh))
    _compare_batches(model, state)


def _compare_batches(model: nn.Module, state: ParallelState) -> None:
    """In the model's first steps; not where a script's loss calls it on the last stage alone."""

    def compare(module: nn.Module, args: tuple, kwargs: dict) -> None:
        if state.mesh.session is None:
            batch = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
            state.batches.check(batch, f"forward {module.training}")

    model.register_forward_pre_hook(compare, with_kwargs=True)


def parameters_per_rank(model: nn.Module) -> list[int]:
    """How many parameters each rank stores, in rank order. Collective."""
    unique = {id(p): p for p in model.parameters()}.values()
    own = sum(stored(p).numel() for p in unique)
    counts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(counts, own)
    return counts

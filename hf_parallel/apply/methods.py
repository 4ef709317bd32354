"""Methods of a parallel model, put on the object, so that loops without the hooks have them too."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from hf_parallel.apply.alone import generate_with_others, share_calls_of_rank_0
from hf_parallel.apply.kernels import INNER_FORWARD, place_kernels
from hf_parallel.apply.own_files import let_write_states
from hf_parallel.apply.weights import remember_model, resize_token_embeddings
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.spec import get_first_line, refuse
from hf_parallel.axes.data.gathered_once import keep_gathered
from hf_parallel.axes.data.lowered import drop_copies
from hf_parallel.axes.data.parameters import forget_holders, make_identical
from hf_parallel.axes.data.units import (
    follow_weights_dtype,
    forget_gathered_memory,
    holds_whole_gradient,
    iterate_parameter_groups,
    iterate_sharded_modules,
)
from hf_parallel.axes.data.zero import forget_root, separate_dtypes_at_first, shard_data_parallel
from hf_parallel.checkpoint import gather_state_dict, join_current_save, save_pretrained_model, slices
from hf_parallel.checkpoint.hub_format import list_tied_names
from hf_parallel.checkpoint.weights import copy_part
from hf_parallel.model.anatomy import get_backbone_of
from hf_parallel.model.calls import CACHES, bind_by_name
from hf_parallel.ranks import assert_all_ranks, messages
from hf_parallel.ranks.desync import LIBRARIES
from hf_parallel.ranks.mesh import ParallelMesh, get_stored

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_parallel.axes.pipeline.engine import PipelineEngine


def replace_methods(
    model: nn.Module, mesh: ParallelMesh, pipeline: PipelineEngine | None, again: Callable[[nn.Module], object]
) -> None:
    """Put methods on the model that save whole weights, resize embeddings, generate and copy under the layout.

    Args:
        again: makes another model parallel in the same way.
    """
    remember_model(model)
    if not hasattr(model, "base_model_prefix"):  # not a transformers model
        replace_methods_around(model, {}, mesh)
        share_calls_of_rank_0(model, mesh.device)
        return
    bind(model, "save_pretrained", functools.partial(_save_pretrained, mesh, pipeline))
    slices.let_ask(model, functools.partial(gather_state_dict, mesh=mesh))
    let_write_states(model, mesh)
    bind(model, "resize_token_embeddings", resize_token_embeddings)
    bind(model, "__deepcopy__", functools.partial(_copy_model, mesh, again))
    bind(model, "_apply", _apply_to_model)
    if mesh.config.sharing_size > 1 and hasattr(model, "prepare_inputs_for_generation"):
        bind(model, "prepare_inputs_for_generation", functools.partial(_prepare_together, type(model)))
    if pipeline is None:  # modules around a model may call `model.forward`: it runs the hooks that gather weights
        called = "_hf_parallel_called"
        vars(model)[INNER_FORWARD] = model.forward

        def forward_with_hooks(model: nn.Module, *args: object, **kwargs: object) -> object:
            inside = vars(model).pop(called, False)
            return vars(model)[INNER_FORWARD](*args, **kwargs) if inside else model(*args, **kwargs)

        model.register_forward_pre_hook(lambda module, args: module.__dict__.update({called: True}))
        bind(model, "forward", forward_with_hooks)
    if hasattr(model, "set_use_kernels"):
        bind(model, "set_use_kernels", _set_use_kernels)
    if "generate" in vars(model):
        own_method = vars(model)["generate"].__func__  # FSDP2's, whose signature lacks an argument
        bind(model, "generate", functools.partial(_generate_from_gathered, mesh, own_method))
    if pipeline is not None and hasattr(model, "generate"):
        bind(model, "generate", functools.partial(_generate_without_cache, pipeline))
    number = share_calls_of_rank_0(model, mesh.device)
    if number is not None and hasattr(model, "generate"):
        own: Any = model.generate
        bind(model, "generate", functools.partial(generate_with_others, number, mesh.device, own.__func__))
    if pipeline is not None:
        for name in ("num_parameters", "get_memory_footprint"):
            bind(model, name, functools.partial(_count_over_all_stages, pipeline, getattr(type(model), name)))
        for module in {model, get_backbone_of(model)}:
            for name in ("parameters", "named_parameters"):
                bind(
                    module,
                    name,
                    functools.partial(_iterate_parameters_of_stage, pipeline, getattr(type(module), name)),
                )
        model.register_state_dict_post_hook(_mark_as_part)


def bind(model: nn.Module, name: str, replacement: Callable) -> None:
    """Put a method on the object that looks like its class's method: scripts read signatures and functions."""

    def method(self: nn.Module, *args: object, **kwargs: object) -> object:
        return replacement(self, *args, **kwargs)

    functools.update_wrapper(method, getattr(type(model), name, replacement))
    vars(model)[name] = types.MethodType(method, model)


def _save_pretrained(
    mesh: ParallelMesh, pipeline: PipelineEngine | None, model: PreTrainedModel, *args: Any, **kwargs: Any
) -> None:
    kwargs = bind_by_name(save_pretrained_model, (model, mesh, *args), kwargs)
    given, gather = kwargs.get("state_dict"), functools.partial(gather_state_dict, mesh=mesh)
    if given is None:
        if slices.is_alone("save_pretrained", model):
            kwargs["state_dict"] = slices.gather_asked(model, gather)
    elif mesh.rank == 0:
        with contextlib.nullcontext() if pipeline is None else pipeline.remote_modules.shown(model):
            names = model.state_dict().keys() - list_tied_names(model)
        if slices.are_own_parts(model, given, names):
            kwargs["state_dict"] = slices.make_whole_tensors(model, given, names, gather)
    save_pretrained_model(**kwargs)


def _count_over_all_stages(
    pipeline: PipelineEngine, original: Callable, model: nn.Module, *args: object, **kwargs: object
) -> object:
    """Count parameters or bytes as one process does."""
    with pipeline.remote_modules.counted(model):
        return original(model, *args, **kwargs)


def _iterate_parameters_of_stage(
    pipeline: PipelineEngine, original: Callable, module: nn.Module, *args: object, **kwargs: object
) -> Iterator[object]:
    """Yield the parameters of this stage; print a line when a script first goes through them after a step.

    The line comes late because freezing parameters, an optimizer and `clip_grad_norm_` need this stage's alone.

    Raises:
        NotImplementedError: a script's loss has gone through all of them, as for a penalty of weights.
    """
    frame, model = sys._getframe(1), pipeline.model
    of_script = not frame.f_code.co_filename.startswith(LIBRARIES)
    if any(stage.has_run for stage in pipeline.stages) and of_script:
        size = pipeline.mesh.size("pp")
        line = (
            f"model.{original.__name__}() of a script that trains with pp_size={size} has those of one stage, and "
            'a sum or norm over them is of that stage; hf_parallel.clip_grad_norm(model, float("inf")) and '
            "hf_parallel.full_state_dict(model) are of the model (docs/idioms.md)"
        )
        if model._hf_parallel.note_line(line) and pipeline.mesh.rank == 0:
            place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            print(f"hf_parallel: {place}: {line}", file=sys.stderr, flush=True)
    yield from original(module, *args, **kwargs)
    if of_script and pipeline.pipelines.session is not None:
        raise NotImplementedError(
            f"hf_parallel: the script's loss goes through model.{original.__name__}(), of which the last stage has "
            "its own alone; pp_size=1 works"
        )


@torch.no_grad()
def _apply_to_model(model: PreTrainedModel, fn: Callable, *args: object, **kwargs: object) -> object:
    """Cast or move, as `to` and `half` do, and drop FSDP2's memory of gathered weights, which has the old dtype.

    Raises:
        NotImplementedError: gradients are being summed in the old dtype.
    """
    forget_holders()
    state = getattr(model, "_hf_parallel", None)
    # Stages of a pipeline are units that are no modules of the model: its own `_apply` does not find them.
    root: nn.Module = getattr(state, "root", model)
    held = [one for group in iterate_parameter_groups(root) for one in group.fsdp_params]
    # Adapters and modules that PEFT trains are in fp32 beside a base in 16 bits.
    kinds = {parameter.dtype for parameter in root.parameters()}
    changed = {kind: wanted for kind in kinds if (wanted := fn(torch.empty((), dtype=kind)).dtype) != kind}
    drop_copies()  # also where nothing changes: torch exchanges split weights in any case
    if not changed or not any(one.all_gather_outputs for one in held):
        return type(model)._apply(model, fn, *args, **kwargs)
    if any(holds_whole_gradient(one) for one in held):
        raise NotImplementedError(
            f"hf_parallel: a sharded model is cast to {next(iter(changed.values()))} while it sums gradients; "
            "cast it after the step"
        )
    for unit in iterate_sharded_modules(root):
        unit.reshard()
    type(model)._apply(model, fn, *args, **kwargs)
    for one in held:
        one.reset_sharded_param()
        follow_weights_dtype(one)
    forget_gathered_memory(root)
    return model


def _mark_as_part(model: nn.Module, state_dict: Any, prefix: str, metadata: dict) -> None:
    state_dict.is_part_of_model = True


def _copy_model(
    mesh: ParallelMesh, again: Callable[[nn.Module], object], model: PreTrainedModel, memo: dict
) -> object:
    """Return a copy of a model, such as a reference model, under the same layout. Collective."""
    if getattr(model, "is_loaded_in_4bit", False):
        raise NotImplementedError("hf_parallel: a copy of a model of 4 bits; load it a second time")
    assert_all_ranks("copy.deepcopy")
    with torch.device("meta"):
        new = type(model)(copy.deepcopy(model.config)).to(model.dtype)
    again(new)
    new.to_empty(device=mesh.device).tie_weights()  # memory of their own unties plain parameters
    copy_adapters = model._hf_parallel.copy_adapters
    if copy_adapters is not None:
        drawn = mesh.read_random_state()
        copy_adapters(model, new, memo)
        mesh.set_random_state(drawn)
    for root in (model, new):
        for unit in iterate_sharded_modules(root):
            unit.reshard()
    modules, parameters, buffers = (
        dict(kind()) for kind in (new.named_modules, new.named_parameters, new.named_buffers)
    )
    if {*modules, *parameters, *buffers} != {
        name for kind in (model.named_modules, model.named_parameters, model.named_buffers) for name, _ in kind()
    }:
        raise NotImplementedError("hf_parallel: a copy of a model that has other modules than its config and adapters")
    with torch.no_grad():
        for name, theirs in model.named_parameters():
            get_stored(parameters[name]).copy_(get_stored(theirs))
            parameters[name].requires_grad_(theirs.requires_grad)
        for name, former in model.named_buffers():
            buffers[name].copy_(former)
    for name, other in model.named_modules():
        modules[name].training = other.training
    new.generation_config = copy.deepcopy(getattr(model, "generation_config", None))
    memo[id(model)] = new
    return new


def _set_use_kernels(model: PreTrainedModel, use_kernels: bool, *args: object, **kwargs: object) -> None:
    own = functools.partial(type(model).set_use_kernels, model, use_kernels, *args, **kwargs)
    place_kernels(model, own, "use_kernels=True") if use_kernels else own()


def _prepare_together(
    kind: type[PreTrainedModel], model: PreTrainedModel, input_ids: torch.Tensor, *args: Any, **kwargs: Any
) -> dict[str, object]:
    """Prepare inputs of `generate`, also on ranks whose sequences have ended: all ranks gather weights together.

    Without a key/value cache transformers lets their masks grow longer than the sequences; cut them.
    """
    mask = kwargs.get("attention_mask")
    whole_rows = not kwargs.get("use_cache") and kwargs.get("inputs_embeds") is None
    if whole_rows and torch.is_tensor(mask) and mask.ndim == 2 and not model.config.is_encoder_decoder:
        kwargs["attention_mask"] = mask[:, : input_ids.shape[1]]
    return kind.prepare_inputs_for_generation(model, input_ids, *args, **kwargs)


def _generate_from_gathered(
    mesh: ParallelMesh, own: Callable, model: PreTrainedModel, *args: Any, **kwargs: Any
) -> object:
    """Generate with weights that are gathered once, where there is room for them."""
    separate_dtypes_at_first(model)
    with keep_gathered(model, mesh):
        return own(model, *args, **kwargs)


def _generate_without_cache(pipeline: PipelineEngine, model: PreTrainedModel, *args: Any, **kwargs: Any) -> object:
    """Generate through a pipeline: every token runs the whole sequence, as stages keep no key/value cache."""
    mesh = pipeline.mesh
    settings = kwargs.get("generation_config") or next(iter(args[1:2]), None) or model.generation_config
    needing = (*CACHES, "assistant_model", "prompt_lookup_num_tokens", "prefill_chunk_size")
    asked = [name for name in needing if kwargs.get(name, getattr(settings, name, None)) is not None]
    if asked:
        raise NotImplementedError(
            f"hf_parallel: {asked[0]} needs a key/value cache, which a pipelined model does not keep; leave it out"
        )
    if mesh.data_size > 1:
        # Data ranks stop together, as their stages gather weights together; Seq2SeqTrainer says False.
        kwargs["synced_gpus"] = True
    own = shared = mesh.read_random_state()
    for axis in ("pp", "cp", "tp"):  # the ranks of one model draw the same tokens
        if mesh.size(axis) > 1:
            shared = messages.send_from_one(functools.partial(copy.copy, shared), mesh.group(axis))
    mesh.set_random_state(shared)
    try:
        with keep_gathered(pipeline.stages, mesh) as pipeline.keeps_gathered:
            return type(model).generate(model, *args, **{**kwargs, "use_cache": False})
    finally:
        pipeline.keeps_gathered = False
        if any(not torch.equal(a, b) for a, b in zip(own, shared, strict=True) if a is not None and b is not None):
            mesh.set_random_state(own)  # dropout in other layers has drawn other numbers; else all go on alike


# ---- A module around parallel models, such as one that pools what an encoder gives and adds a layer behind it
# The models inside are parallel by themselves. What is the module's own is sharded over the data ranks beside them,
# and whole and equal on tp ranks, whose models give whole outputs: all of them compute the same with it.


def find_models_inside(model: nn.Module, config: ParallelConfig) -> dict[str, PreTrainedModel]:
    """Return the models inside `model`, outermost ones by name: parallel ones, and under tp any of transformers'.

    A model of transformers is split as a whole, unless a script has loaded a part of it in its `__init__`.

    Raises:
        SpecError: a layout or adapters that only a model by itself can have.
    """
    found: dict[str, PreTrainedModel] = {}
    is_module = not hasattr(model, "base_model_prefix")
    for name, module in model.named_modules():  # PEFT's wrappers show what is in them as their own
        of_transformers = is_module and hasattr(type(module), "base_model_prefix")
        inside = "_hf_parallel" in vars(module) or (config.tp_size > 1 and of_transformers)
        if name and inside and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    if found and config.pp_size > 1:
        refuse(f"pp_size={config.pp_size}", f"{type(model).__name__} is a module around a model", "pp_size=1")
    return found


def check_adapters_inside(model: nn.Module, parts: Mapping[str, PreTrainedModel]) -> None:
    """Refuse adapters of a model inside `model` that could not be saved: they are tried on the meta device.

    Raises:
        SpecError: a plain model with such adapters has other tensors.
    """
    for part in parts.values():
        if part._hf_parallel.copy_adapters is None:
            continue
        try:
            names = _build_plain_part(part, {}).state_dict().keys()
            why = "" if names == part.state_dict().keys() else "a plain copy has other tensors"
        except (AttributeError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            why = f"a plain copy cannot be made ({get_first_line(error)})"
        if why:
            what = f"adapters in a model inside {type(model).__name__}"
            refuse(what, why, "LoRA, or training its weights,")


def share_own(model: nn.Module, parts: Mapping[str, PreTrainedModel], mesh: ParallelMesh) -> None:
    """Shard over data ranks what is in `model` and in none of `parts`; the same values on all ranks. Collective."""
    inside = {id(tensor) for part in parts.values() for tensor in (*part.parameters(), *part.buffers())}
    own = nn.Module()
    for number, tensor in enumerate(t for t in (*model.parameters(), *model.buffers()) if id(t) not in inside):
        tensor.data = tensor.data.to(mesh.device)
        own.register_buffer(str(number), tensor.data)  # shares the memory, so what is sent lands in the model
    make_identical(own, mesh.device)
    for part in parts.values():
        forget_root(part)
    shard_data_parallel(model, model, [], mesh, {p for part in parts.values() for p in part.parameters()})


def replace_methods_around(model: nn.Module, parts: Mapping[str, PreTrainedModel], mesh: ParallelMesh) -> None:
    """Let the module's own ways to save find whole weights (rank 0 writes, all take part), and take whole ones."""
    for name in ("save", "save_pretrained"):
        method = getattr(model, name, None)
        if callable(method):
            bind(model, name, functools.partial(_save, parts, mesh, method))
    if parts or type(model).load_state_dict is nn.Module.load_state_dict:
        bind(model, "load_state_dict", load_own_parts)
    slices.let_ask(model, functools.partial(gather_state_dict, mesh=mesh))
    let_write_states(model, mesh)
    slices.count_changes_from_first_call(model)


def _save(
    parts: Mapping[str, PreTrainedModel],
    mesh: ParallelMesh,
    method: Callable,
    model: nn.Module,
    *args: object,
    **kwargs: object,
) -> None:
    if "_holds_whole" in model.__dict__:  # one way to save calls the other
        return method(*args, **kwargs)
    gather = functools.partial(gather_state_dict, mesh=mesh)
    if slices.is_alone("save_pretrained", model):
        with show_whole_module(model, parts, slices.gather_asked(model, gather)):
            return method(*args, **kwargs)
    tensors = gather(model)
    with join_current_save(mesh) as saving:
        if mesh.rank == 0:
            with saving.noting(), show_whole_module(model, parts, tensors):
                method(*args, **kwargs)


@contextlib.contextmanager
def show_whole_module(
    model: nn.Module, parts: Mapping[str, PreTrainedModel], tensors: dict[str, torch.Tensor]
) -> Iterator[None]:
    """Give this rank a module of whole weights that runs by itself inside the `with`, as model cards need.

    Args:
        parts: what `find_models_inside` finds in it.
        tensors: all weights, by name.
    """
    places = {name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in parts}
    inside = {id(module) for part in parts.values() for module in part.modules()}
    with contextlib.ExitStack() as stack:
        _set_for_now(stack, model.__dict__, "_holds_whole", True)
        for place, module in [item for item in model.named_modules() if id(item[1]) not in inside]:
            _set_for_now(stack, module.__dict__, "_forward_pre_hooks", OrderedDict())
            _set_for_now(stack, module.__dict__, "_forward_hooks", OrderedDict())
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is None:
                    continue
                whole = tensors.get(f"{place}.{key}" if place else key)
                whole = tensor.detach().cpu() if whole is None else whole  # a buffer that is not saved
                if isinstance(tensor, nn.Parameter):
                    _set_for_now(stack, module._parameters, key, nn.Parameter(whole, requires_grad=False))
                else:
                    _set_for_now(stack, module._buffers, key, whole)
        for name, (parent, child) in places.items():
            own = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
            _set_for_now(stack, parent._modules, child, _build_plain_part(parts[name], own))
        yield


def _set_for_now(stack: contextlib.ExitStack, table: dict, key: str, value: object) -> None:
    """Set `table[key]` until the stack is closed."""
    if key in table:
        stack.callback(table.__setitem__, key, table[key])
    else:
        stack.callback(table.__delitem__, key)
    table[key] = value


def _build_plain_part(part: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> PreTrainedModel:
    """Build the model that transformers would load from these weights, with the modules that `part` has."""
    with torch.device("meta"):
        model = type(part)(copy.deepcopy(part.config))
        if part._hf_parallel.copy_adapters is not None:
            part._hf_parallel.copy_adapters(part, model, {})
    for name, module in part.named_modules():
        kept = module._modules
        new = model.get_submodule(name)
        new._modules.update({key: None for key in new._modules if kept.get(key) is None})
    model.load_state_dict(tensors, strict=False, assign=True)
    for name, buffer in part.named_buffers():
        if name not in tensors:
            owner, _, key = name.rpartition(".")
            model.get_submodule(owner)._buffers[key] = buffer.detach().cpu()
    model.tie_weights()
    return model.eval()


def load_own_parts(
    model: nn.Module,
    state_dict: Mapping[str, torch.Tensor],
    strict: bool = True,
    assign: bool = False,
    others: Collection[str] = (),
) -> _IncompatibleKeys:
    """Take this rank's part of whole values; values of another parallel model are in parts already.

    Values stay in the memory that ranks share, so `assign` copies, too.

    Args:
        others: names of weights that other stages hold.
    """
    own = model.state_dict()
    missing, unexpected = sorted(own.keys() - state_dict.keys()), sorted(state_dict.keys() - own.keys() - {*others})
    if strict and (missing or unexpected):
        raise RuntimeError(f"{type(model).__name__}.load_state_dict: missing {missing}, unexpected {unexpected}")
    for name in (name for name in own if name in state_dict):
        copy_part(model, name, own[name], state_dict[name])
    return _IncompatibleKeys(missing, unexpected)

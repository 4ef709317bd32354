"""PEFT: LoRA adapters on a base that is parallel already, as after an unchanged `from_pretrained`.

    get_peft_model / PeftModel.from_pretrained
        inject_adapter        on every stage the names and random numbers of one process; adapters of full size
        casts their dtype     the last step that replaces parameters: then A and B are split and given to FSDP2
    save_pretrained           whole adapters gathered, none of the base; rank 0 writes peft's own folder

Each patch takes the original. Without a parallel base it does what peft does.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hf_parallel.apply.own_files import KnownStates
from hf_parallel.apply.parallelize import ParallelState
from hf_parallel.ask.session import of_session
from hf_parallel.axes.adapters import lora
from hf_parallel.axes.data.units import iterate_sharded_modules
from hf_parallel.checkpoint import gather_state_dict, join_current_save, slices
from hf_parallel.checkpoint.slices import find_local_part, read_part
from hf_parallel.hooks import runtime
from hf_parallel.hooks.accelerate.accelerator import make_parallel
from hf_parallel.hooks.bitsandbytes import finish_casts
from hf_parallel.hooks.patching import patch, replacing
from hf_parallel.hooks.peft import before as peft_settings
from hf_parallel.hooks.peft.placing import place_in_base
from hf_parallel.hooks.peft.whole import (
    has_whole_adapters,
    hold_whole_weights,
    keep_adapters_whole,
    list_own_tensors,
    make_layers_of_whole_weights,
)
from hf_parallel.model.anatomy import get_stored_order
from hf_parallel.model.calls import bind_by_name
from hf_parallel.ranks import messages
from hf_parallel.ranks.local import get_local, hold_other_tensors

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from peft.tuners.frod import FrodModel
    from peft.tuners.lora import LoraLayer
    from peft.tuners.lora.dora import DoraLinearLayer
    from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

# ---- putting adapters in -----------------------------------------------------------------------------------------


@patch("peft.tuners.tuners_utils:BaseTuner.inject_adapter", "sees one stage, and draws random numbers for it only")
def inject_adapter(
    original: Callable, self: BaseTuner, model: PreTrainedModel, adapter_name: str, *args: object, **kwargs: object
) -> None:
    """Match names and draw random numbers as in one process, whatever part of the model is here."""
    config, state = self.peft_config[adapter_name], runtime.find_parallel_state(model)
    if state is None and runtime.current() is None:
        original(self, model, adapter_name, *args, **kwargs)
        return
    whole = peft_settings.is_kept_whole(config, model, runtime.mesh() if state is None else state.mesh)
    given = bind_by_name(original, (self, model, adapter_name, *args), kwargs)
    low_cpu_mem_usage = bool(given.get("low_cpu_mem_usage", False))
    peft_settings.check_tuner(self, model, config, low_cpu_mem_usage, whole)
    if state is None:
        make_parallel(model)
        state = runtime.find_parallel_state(model)
    assert state is not None
    for axis in ("dp_replicate", "dp_shard", "cp", "pp", "tp"):
        runtime.equalise_random_state(axis, 0, state.mesh)
    for module in iterate_sharded_modules(state.root):
        module.reshard()  # what was gathered for a pass would hide what is stored
    finish_casts(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(show_all_stages(model, state))
        if whole:
            stack.enter_context(make_layers_of_whole_weights(self))
        peft_settings.check_copies(model, getattr(config, "modules_to_save", None) or (), state.mesh)
        original(self, model, adapter_name, *args, **kwargs)
    if not hasattr(model, "_hf_parallel_unplaced"):
        model._hf_parallel_unplaced = model.register_forward_pre_hook(_refuse_unplaced)


@patch("peft.peft_model:PeftModel.__init__", "leaves adapters whole on every rank")
def init_model(
    original: Callable, self: PeftModel, model: nn.Module, peft_config: PeftConfig, *args: object, **kwargs: object
) -> None:
    """Split the first adapters when peft is done with them, or keep them whole."""
    former = begin_adapters(model, peft_config)
    original(self, model, peft_config, *args, **kwargs)
    place_adapters(self, peft_config, former)


@patch("peft.mapping:inject_adapter_in_model", "leaves adapters whole on every rank", copies=True)
def inject_in_model(
    original: Callable, peft_config: PeftConfig, model: nn.Module, *args: object, **kwargs: object
) -> nn.Module:
    """Split adapters that a script puts into a model without a PeftModel around it, or keep them whole."""
    from transformers.integrations.peft import PeftAdapterMixin

    former = begin_adapters(model, peft_config)
    original(peft_config, model, *args, **kwargs)
    of_transformers = isinstance(model, PeftAdapterMixin) and model._hf_peft_config_loaded
    if not of_transformers:  # its own methods load values first: `added.py`
        place_adapters(model, peft_config, former)
    return model


def begin_adapters(model: nn.Module, config: PeftConfig) -> list[torch.Tensor]:
    """Make a model parallel that will get adapters, under a layout; return its tensors that are whole on this rank.

    Raises:
        SpecError: the layout does not train adapters of this config.
    """
    if runtime.find_parallel_state(model) is None and runtime.current() is not None:
        make_parallel(model)
    state = runtime.find_parallel_state(model)
    if state is not None:
        peft_settings.is_kept_whole(config, model, state.mesh)
    return list_own_tensors(model)


def place_adapters(model: PeftModel | nn.Module, config: PeftConfig, former: list[torch.Tensor]) -> None:
    """Split the adapters of a config in a parallel base, or keep them whole; others stay as they are.

    Args:
        former: the tensors that were whole on this rank before these adapters came.
    """
    base = get_base_model_of(model)
    state = runtime.find_parallel_state(base)
    if state is None:
        return
    if peft_settings.is_kept_whole(config, base, state.mesh):
        keep_adapters_whole(model, state, former)
    place_in_base(base, state)
    slices.let_ask(model, gather_saved_tensors)


@patch("peft.tuners.tuners_utils:_get_in_out_features", "reads sizes off shards and packed weights", copies=True)
def get_sizes(original: Callable, module: nn.Module) -> tuple[int, int] | tuple[None, None]:
    """Return the sizes of a whole linear, as the layer says them."""
    if isinstance(module, nn.Linear) and isinstance(module.weight, DTensor):
        return module.in_features, module.out_features
    return original(module)


@patch("peft.tuners.frod.model:FrodModel._init_frod_projections", "factorises shards")
def start_from_all_layers(original: Callable, self: FrodModel, config: PeftConfig, adapter_name: str) -> None:
    """Factorise the whole weights of all targets together."""
    targets = [module for key, module in self.model.named_modules() if self._check_target_module_exists(config, key)]
    with hold_whole_weights(*targets):
        original(self, config, adapter_name)


@patch("peft.tuners.lora.dora:DoraLinearLayer.update_layer", "reads norms off shards")
def first_magnitudes(original: Callable, self: DoraLinearLayer, *, base_layer: nn.Module, **kwargs: object) -> None:
    """Start DoRA from the norms of whole rows of the base."""
    weight = base_layer.weight
    if weight.is_meta:  # of another stage: a second adapter's factors have values, the first one's have none
        factors = {name: kwargs[name] for name in ("lora_A", "lora_B")}
        kwargs |= {name: factor.to("meta") for name, factor in factors.items() if isinstance(factor, torch.Tensor)}
    if not isinstance(weight, DTensor):
        original(self, base_layer=base_layer, **kwargs)
        return
    order = getattr(base_layer, "stored_orders", {}).get("weight")
    value = weight.full_tensor().detach()
    value = value if order is None else order.to_own(value)
    with hold_other_tensors(base_layer, {"weight": nn.Parameter(value, requires_grad=False)}):
        original(self, base_layer=base_layer, **kwargs)


@patch("peft.tuners.lora.layer:LoraLayer.{pissa,olora}_init", "factorises shards")
def start_from_base(original: Callable, self: LoraLayer, adapter_name: str, *args: object) -> None:
    """Split a whole weight into adapters and a rest (PiSSA, OLoRA), of which each rank keeps its part."""
    base, adapter = self.get_base_layer(), adapter_name
    weight = base.weight
    if weight.is_meta:  # of another stage
        return
    if not isinstance(weight, DTensor):
        original(self, adapter, *args)
        return
    order, dtype = getattr(base, "stored_orders", {}).get("weight"), weight.dtype
    whole_weight = weight.full_tensor().detach()
    whole_weight = (whole_weight if order is None else order.to_own(whole_weight)).float()
    with hold_other_tensors(base, {"weight": nn.Parameter(whole_weight.clone(), requires_grad=False)}):
        original(self, adapter, *args)
    down, up = self.lora_A[adapter].weight.detach(), self.lora_B[adapter].weight.detach()
    for group in weight.device_mesh.get_all_groups():  # devices may factorise in ways of their own
        for tensor in (down, up):
            dist.broadcast(tensor, group=group, group_src=0)
    taken = self.scaling[adapter] * (up @ down)
    turned = self.fan_in_fan_out and original.__name__ == "pissa_init"  # OLoRA takes the weight as it lies
    rest = whole_weight - (taken.t() if turned else taken)
    with torch.no_grad():
        get_local(weight).copy_(read_part(rest.to(dtype), find_local_part(weight, order)))


@patch("peft.peft_model:PeftModel.add_adapter", "leaves adapters whole on every rank")
def add_adapter(
    original: Callable, self: PeftModel, adapter_name: str, peft_config: PeftConfig, *args: object, **kwargs: object
) -> None:
    """Split the new adapters, or keep them whole."""
    if not self.peft_config:  # prompts come first in here, and `init_model` keeps them
        original(self, adapter_name, peft_config, *args, **kwargs)
        return
    former = list_own_tensors(self)
    original(self, adapter_name, peft_config, *args, **kwargs)
    place_adapters(self, peft_config, former)


def show_all_stages(model: nn.Module, state: ParallelState) -> contextlib.AbstractContextManager[None]:
    """Let the base model show the modules of all stages inside the `with`."""
    return contextlib.nullcontext() if state.pipeline is None else state.pipeline.remote_modules.shown(model)


@patch("peft.peft_model:PeftModel.get_nb_trainable_parameters", "counts those of one stage")
def count(original: Callable, self: PeftModel) -> tuple[int, int]:
    """Count the parameters of the whole model, for `print_trainable_parameters`."""
    state = runtime.find_parallel_state(self)
    if state is None or state.pipeline is None:
        return original(self)
    with state.pipeline.remote_modules.counted(self.get_base_model()):
        return original(self)


@patch("peft.utils.other:ModulesToSaveWrapper.update", "copies process groups and shards")
def copy_module(
    original: Callable,
    self: ModulesToSaveWrapper,
    adapter_name: str,
    tied_module: nn.Module | None = None,
    **kwargs: object,
) -> None:
    """Copy a module to be trained (`modules_to_save`); a split one shares its links to groups and meshes."""
    if adapter_name not in self.modules_to_save and tied_module is None:
        self.modules_to_save[adapter_name] = lora.copy_in_group(self.original_module)
    original(self, adapter_name, tied_module=tied_module, **kwargs)


def _refuse_unplaced(model: nn.Module, args: tuple) -> None:
    raise NotImplementedError(
        "hf_parallel: adapters that were not put in by get_peft_model or PeftModel are whole on every rank; "
        "get_peft_model(model, config) works"
    )


# ---- saving and loading -------------------------------------------------------------------------------------------


def get_base_model_of(model: PeftModel | PreTrainedModel) -> PreTrainedModel:
    """Return the model that holds adapters, which Transformers' own `add_adapter` puts in without a model around."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


@patch("peft.peft_model:PeftModel.save_pretrained", "writes shards of one stage")
def save_pretrained(original: Callable, self: PeftModel, save_directory: str, *args: object, **kwargs: object) -> None:
    """Write peft's own folder on rank 0 from whole adapters. Collective, but with `state_dict`."""
    state = runtime.find_parallel_state(self)
    if state is None:
        original(self, save_directory, *args, **kwargs)
        return
    base, given = get_base_model_of(self), kwargs.get("state_dict")
    gather = functools.partial(gather_saved_tensors, embeddings=kwargs.get("save_embedding_layers", "auto"))
    if given is None and not slices.is_alone("save_pretrained", self):
        kwargs["state_dict"] = gather(self)
        with join_current_save(state.mesh) as saving:  # at its end all ranks wait
            if state.mesh.rank == 0:
                with saving.noting(), show_all_stages(base, state), _knowing_no_parts():
                    original(self, save_directory, *args, **kwargs)
    elif state.mesh.rank == 0:  # of the script: whole on rank 0, else empty; or this rank's part
        if given is None:
            kwargs["state_dict"] = slices.gather_asked(self, gather)
        elif isinstance(given, dict):
            with _use_state_dict_of_class(self):
                names, own = _list_saved_names(self, state, "auto"), self.state_dict()
                # A script may take adapters alone.
                embeddings = all(name in given for name in names if name in own) and "auto"
                names = names if embeddings else _list_saved_names(self, state, embeddings)
                if slices.are_own_parts(self, given, names):
                    gather = functools.partial(gather_saved_tensors, embeddings=embeddings)
                    kwargs["state_dict"] = slices.make_whole_tensors(self, given, names, gather)
        with show_all_stages(base, state), _knowing_no_parts():
            original(self, save_directory, *args, **kwargs)


def _knowing_no_parts() -> contextlib.AbstractContextManager:
    """Write whole tensors: an embedding has the values of another model's, which may hold it in part."""
    return replacing(of_session(KnownStates), models=[])


@patch(
    "peft.utils.save_and_load:get_peft_model_state_dict", "gathers in the stored order, from all ranks", copies=True
)
def get_state_dict(
    original: Callable,
    model: PeftModel,
    state_dict: dict[str, torch.Tensor] | None = None,
    *args: object,
    **kwargs: object,
) -> dict[str, torch.Tensor]:
    """Return whole adapters: on all ranks if all of them ask, or on rank 0 alone while the others wait for it.

    What a rank has of the whole model, as of `accelerator.get_state_dict`, is asked for all of its adapters.
    """
    state, given = runtime.find_parallel_state(model), {} if state_dict is None else state_dict
    is_part = state_dict is None or getattr(given, "is_part_of_model", False)
    if state is None:
        return original(model, state_dict, *args, **kwargs)
    whole = given

    def select() -> dict[str, torch.Tensor]:
        with show_all_stages(get_base_model_of(model), state):
            return original(model, whole, *args, **kwargs)

    if not (is_part or any(isinstance(tensor, DTensor) for tensor in given.values())):
        with _use_state_dict_of_class(model):
            is_of_other_stages = not given.keys() <= model.state_dict().keys()
        return select() if is_of_other_stages else original(model, state_dict, *args, **kwargs)
    embeddings = bind_by_name(original, (model, state_dict, *args), kwargs).get("save_embedding_layers", "auto")
    gather = functools.partial(gather_saved_tensors, embeddings=embeddings)
    if slices.is_alone("get_peft_model_state_dict", model):
        whole = slices.gather_asked(model, gather)
        return select()
    whole = gather(model)
    return messages.send_from_one(select)


@contextlib.contextmanager
def _use_state_dict_of_class(model: nn.Module) -> Iterator[None]:
    """Ignore a `state_dict` that a script has put on a model, which gives the adapters alone (Alpaca-LoRA)."""
    of_script = vars(model).pop("state_dict", None)
    try:
        yield
    finally:
        if of_script is not None:
            model.state_dict = of_script  # type: ignore[method-assign]


def gather_saved_tensors(model: PeftModel, embeddings: object = "auto") -> dict[str, torch.Tensor]:
    """Gather the tensors that peft saves, as rank 0 is asked for it. Collective."""
    state = runtime.find_parallel_state(model)
    assert state is not None
    with _use_state_dict_of_class(model):
        names = messages.send_from_one(lambda: _list_saved_names(model, state, embeddings))
        return gather_state_dict(model, state.mesh, names.__contains__)


def _list_saved_names(model: PeftModel, state: ParallelState, embeddings: object) -> set[str]:
    """Return the names that peft takes of a state dict: adapters, and a vocabulary that was resized."""
    from peft import get_peft_model_state_dict

    if has_whole_adapters(state):
        ends: list[nn.Module | None] = []
        if hasattr(get_base_model_of(model), "get_input_embeddings"):
            ends = [model.get_input_embeddings(), model.get_output_embeddings()]
            ends += [cast("BaseTunerLayer", end).get_base_layer() for end in ends if hasattr(end, "get_base_layer")]
        places = {name for name, module in model.named_modules() if any(module is end for end in ends)}
        # A method may compute from several tensors what it saves.
        tensors = model.state_dict().items()
        return {name for name, t in tensors if not isinstance(t, DTensor) or name.rpartition(".")[0] in places}
    with show_all_stages(get_base_model_of(model), state), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they come when peft saves
        names = list(model.state_dict())
        shown = {name: torch.tensor([number]) for number, name in enumerate(names)}
        adapters = [
            get_peft_model_state_dict(model, dict(shown), adapter_name=name, save_embedding_layers=embeddings)
            for name in model.peft_config
        ]
    return {names[int(number)] for adapter in adapters for number in adapter.values()}


@patch("peft.utils.save_and_load:set_peft_model_state_dict", "cuts in another order", copies=True)
def set_state_dict(
    original: Callable,
    model: nn.Module,
    peft_model_state_dict: dict[str, torch.Tensor],
    *args: object,
    **kwargs: object,
) -> object:
    """Take this rank's part of every tensor of an adapter's file, in the order in which it is stored."""
    state = runtime.find_parallel_state(model)
    shown = model if state is None or has_whole_adapters(state) else _Uncut(model)
    return original(shown, peft_model_state_dict, *args, **kwargs)


@dataclass(eq=False)
class _Uncut:
    """A stand-in for a model whose parameters are whole, so that peft cuts none; it takes whole values."""

    _model: nn.Module

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters whole, without values."""
        for name, parameter in self._model.named_parameters():
            yield name, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")

    def load_state_dict(self, state_dict: dict[str, torch.Tensor], **how: bool) -> object:
        """Take this rank's part; tensors of other stages are unexpected, as to any module."""
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        own = {key: parameters[key] for key in state_dict if key in parameters}
        for key, parameter in own.items():
            part = read_part(state_dict[key], find_local_part(parameter, get_stored_order(self._model, key)))
            with torch.no_grad():
                get_local(parameter).copy_(part)
        parts = {key: parameter.detach() for key, parameter in own.items()}
        return self._model.load_state_dict({**state_dict, **parts}, **how)


def is_saved_as_adapters(model: nn.Module) -> bool:
    """Return whether a folder of this model holds its adapters alone.

    Not that of a base model which a script trains itself after `get_peft_model` has put adapters into it.
    """
    alone = not isinstance(model, PreTrainedModel) or model._hf_peft_config_loaded
    return hasattr(model, "peft_config") and alone


def load_adapter_weights(model: nn.Module, directory: str) -> None:
    """Read the active adapter from a checkpoint of this model."""
    from peft import load_peft_weights, set_peft_model_state_dict

    adapter = model.active_adapter
    where = directory if adapter == "default" else f"{directory}/{adapter}"
    set_peft_model_state_dict(model, load_peft_weights(where, device="cpu"), adapter_name=adapter)

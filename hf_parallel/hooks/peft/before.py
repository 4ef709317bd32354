"""PEFT: adapters that were put in before the layout was active, as by a script that names it in its arguments.

They are taken out, the base becomes parallel, and the same adapters are put in again (`adapters.py`).
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.adapters.four_bit import FourBit
from hf_parallel.axes.tensor.layers import PartialGradient, TensorParallelLayer
from hf_parallel.axes.tensor.vocab_parallel import VocabParallel, VocabParallelHead
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch, refuse_unpatched, replacing
from hf_parallel.hooks.peft.placing import place_in_base
from hf_parallel.hooks.peft.whole import make_parallel_below_wrappers
from hf_parallel.model.anatomy import has_tied_embedding
from hf_parallel.ranks.mesh import ParallelMesh

if TYPE_CHECKING:
    from peft import LoraConfig, LoraModel, PeftConfig, PeftModel
    from peft.tuners.tuners_utils import BaseTuner
    from torch import nn
    from transformers import PreTrainedModel


# ---- Settings of PEFT that any layout keeps; all others are refused by name -----------------------------------------


#: Settings of LoraConfig that any layout keeps. What is not named here must have its default.
_KEPT = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("r", "lora_alpha", "lora_dropout", "use_rslora", "lora_bias", "fan_in_fan_out", "inference_mode"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
    *("modules_to_save", "bias", "use_dora", "target_parameters"),
}
#: Values of `init_lora_weights` that draw numbers, or read the base's weights, which are gathered one by one.
_STARTS = (False, "gaussian", "orthogonal", "pissa", "olora")
#: Values that work instead of some of the others.
_WORKS = {
    "init_lora_weights": 'True, False, "gaussian", "orthogonal", "pissa" or "olora"',
}


#: Methods, and settings of LoRA, whose adapters data ranks keep whole: test_peft_kinds compares each with one process.
_WHOLE_KINDS = {
    *("ADALORA", "ADAMSS", "ADAPTION_PROMPT", "BEFT", "BOFT", "C3A", "CARTRIDGE", "DEFT", "DELORA", "FOURIERFT"),
    *("FROD", "GLORA", "GRALORA", "HIRA", "HRA", "IA3", "LN_TUNING", "LOHA", "LOKR", "MISS", "OFT", "PROMPT_TUNING"),
    *("MULTITASK_PROMPT_TUNING", "OSF", "P_TUNING", "PEANUT", "PREFIX_TUNING", "PSOFT", "RANDLORA", "ROAD"),
    *("SHIRA", "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT"),
}
#: Methods that put keys and values before those of the tokens, which ranks of `cp` do not know of.
_OF_WHOLE_SEQUENCES = {"CARTRIDGE", "PREFIX_TUNING"}
_WHOLE_SETTINGS = {"alora_invocation_tokens", "kasa_config", "trainable_token_indices", "use_bdlora"}
_WHOLE_STARTS = re.compile(r"mica|pissa_niter_\d+")


def are_adapters_kept_whole(config: PeftConfig) -> bool:
    """Return whether no layout splits the adapters of a config, or none has them at all."""
    return config.peft_type.value != "LORA" or bool(_list_unsplit_settings(cast("LoraConfig", config)))


def is_kept_whole(config: PeftConfig, base: nn.Module, mesh: ParallelMesh) -> bool:
    """Return whether data ranks keep the adapters of a config whole, because nothing splits them.

    Raises:
        SpecError: nothing keeps them, or data ranks alone do, and the layout has other axes.
    """
    kind = config.peft_type.value
    what, works = f"peft_type={kind}", "LoRA"
    known = kind in _WHOLE_KINDS
    if kind == "LORA":
        unsplit = _list_unsplit_settings(cast("LoraConfig", config))
        if not unsplit:
            return False
        unknown = [(name, value) for name, value in unsplit if not _is_known_of_whole(name, value)]
        name, value = (unknown or unsplit)[0]
        what, works = f"LoraConfig({name}={value!r})", _WORKS.get(name, "its default")
        known = not unknown
    if not known:
        refuse(what, "not part of this version of hf_parallel", works)
    whole_sequences = kind in _OF_WHOLE_SEQUENCES or getattr(config, "alora_invocation_tokens", None) is not None
    for axis in ("tp", "pp", "ep", *(["cp"] if whole_sequences else [])):
        if (size := mesh.size(axis)) > 1:
            why = "it goes by the places of whole sequences" if axis == "cp" else "data ranks alone keep it"
            refuse(f"{what} under {axis}_size={size}", why, f"{works}, or {axis}_size=1,")
    if getattr(base, "is_loaded_in_4bit", False):
        refuse(f"{what} on a base of 4 bits", "not part of this version", works)
    return True


def _is_known_of_whole(name: str, value: object) -> bool:
    """Return whether data ranks are known to keep a setting of LoRA that nothing splits."""
    return name in _WHOLE_SETTINGS or (name == "init_lora_weights" and bool(_WHOLE_STARTS.fullmatch(str(value))))


def _list_unsplit_settings(config: LoraConfig) -> list[tuple[str, object]]:
    """Return the settings of LoRA of which it is not known how other axes than those of data ranks split them."""
    default = type(config)()
    settings = [(setting.name, getattr(config, setting.name)) for setting in dataclasses.fields(config)]
    return [
        (name, value)
        for name, value in settings
        if name not in _KEPT
        and value != getattr(default, name)
        and (name != "init_lora_weights" or value not in _STARTS)
    ]


def check_tuner(
    tuner: BaseTuner, model: PreTrainedModel, config: LoraConfig, low_cpu_mem_usage: bool, whole: bool
) -> None:
    """Refuse adapters and settings that no layout keeps, before anything is changed.

    Args:
        whole: data ranks keep the adapters whole.
    """
    from peft import LoraModel
    from peft.tuners.mixed import MixedModel

    refuse_unpatched("peft", "peft.utils.other", "peft.utils.save_and_load")
    if isinstance(tuner, MixedModel) if whole else type(tuner) is not LoraModel:
        refuse(
            f"adapters of a {type(tuner).__name__}", "not part of this version", "get_peft_model without mixed=True"
        )
    if low_cpu_mem_usage:
        refuse("low_cpu_mem_usage=True", "adapters need values to be split", "False")
    if whole:
        return
    start, targets = config.init_lora_weights, config.target_parameters
    if getattr(model, "is_loaded_in_4bit", False):
        if config.use_dora:
            refuse("LoraConfig(use_dora=True) on a base of 4 bits", "not part of this version", "False")
        if isinstance(start, str) and start != "gaussian":
            refuse(f"init_lora_weights={start!r}", "the base has 4 bits", "'gaussian'")
        if config.target_modules is not None and not config.target_modules and not targets:
            why = "none of the base's linears: bnb.nn.Linear4bit finds none, because ranks pack their own parts"
            refuse("LoraConfig(target_modules=[])", why, '"all-linear"')
        for name, module in model.named_modules():
            if isinstance(module, FourBit) and f"{name}.weight".endswith(tuple(targets or ())):
                refuse("target_parameters", f"{name}.weight of 4 bits has another shape", "target_modules")
    if targets and start in ("pissa", "olora"):
        refuse(f"init_lora_weights={start!r}", "not with target_parameters", "True")


def check_copies(model: nn.Module, names: Collection[str], mesh: ParallelMesh) -> None:
    """Refuse copies (`modules_to_save`) of whole layers, and of modules whose split is not known."""
    for name, module in model.named_modules():
        if not any(name.endswith(target) for target in names):
            continue
        inside = list(module.modules())
        copied = (VocabParallel, VocabParallelHead)  # independent of their neighbours: a copy can stand in their place
        if any(isinstance(part, FSDPModule) for part in inside if any(part.children())):
            refuse("modules_to_save", f"{name} is a whole layer", "naming single modules such as lm_head")
        if any(isinstance(part, TensorParallelLayer) and not isinstance(part, copied) for part in inside):
            is_norm = any(isinstance(part, PartialGradient) for part in inside)
            works = "sequence_parallel=false" if is_norm else "naming it in target_modules"
            refuse("modules_to_save", f"{name} is split inside its layer", works)
    if names and mesh.size("pp") > 1 and has_tied_embedding(model):
        refuse("modules_to_save", "two stages hold the tied embedding", "pp_size=1")


# ---- PEFT: adapters that started from factors of the base (PiSSA, OLoRA), saved as LoRA of the base as it was
# With A₀ and B₀ the adapter as it started, its file holds [A; A₀] and [B, -B₀], of twice the rank: B A - B₀ A₀.


@patch(
    "peft.tuners.lora.model:LoraModel._convert_state_dict_for_initial_model", "loads an adapter on the rank that saves"
)
def as_lora(
    original: Callable,
    cls: type[LoraModel],
    peft_model: PeftModel,
    peft_config: LoraConfig,
    path_initial_model_for_weight_conversion: str,
    *args: object,
) -> dict[str, torch.Tensor]:
    """Read the start from its file: peft would put it into the model, which takes all ranks."""
    path = path_initial_model_for_weight_conversion
    shown: object = peft_model
    if runtime.find_parallel_state(peft_model) is not None:
        folder, name = os.path.split(path)
        shown = SimpleNamespace(
            load_adapter=lambda *_, **__: None,
            delete_adapter=lambda *_: None,
            peft_config={name: peft_config},
            base_model=SimpleNamespace(
                subtract_mutated_init=lambda trained, *_: _select_trained(trained, folder, name)
            ),
        )
    return original(cls, shown, peft_config, path, *args)


def _select_trained(trained: dict[str, torch.Tensor], folder: str, name: str) -> dict[str, torch.Tensor]:
    from peft import load_peft_weights

    first = load_peft_weights(folder, device="cpu", subfolder=name)
    signs = {"lora_A": (0, 1.0), "lora_B": (1, -1.0)}
    found = {key: next((how for part, how in signs.items() if part in key), None) for key in trained}
    return {
        key: torch.cat([trained[key], how[1] * first[key].to(trained[key])], how[0])
        for key, how in found.items()
        if how is not None
    }


def make_parallel_below(model: PreTrainedModel, parallelize: Callable[[nn.Module], object]) -> None:
    """Make the base of a PeftModel parallel by `parallelize`. Collective; rank 0's adapters win.

    Raises:
        SpecError: adapters of another kind, merged ones, or copies of modules beside them.
    """
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    tuner = getattr(model, "base_model", model)
    configs = dict(model.peft_config)
    if any(map(are_adapters_kept_whole, configs.values())):
        make_parallel_below_wrappers(model, parallelize)
        for config in configs.values():
            is_kept_whole(config, model.get_base_model(), model.get_base_model()._hf_parallel.mesh)
        return
    if not hasattr(tuner, "inject_adapter"):
        refuse("adapters of Transformers' add_adapter", "whole on every rank", "get_peft_model")
    for config in configs.values():
        check_tuner(tuner, tuner.model, config, False, False)
        if config.modules_to_save or any(getattr(module, "merged", False) for module in model.modules()):
            refuse(
                "merged adapters, or modules_to_save",
                "the model has them from before the layout was active",
                do="launch with --parallel first",
            )
    values = {
        name: get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False) for name in configs
    }
    kept = {name: {key: tensor.detach().clone() for key, tensor in found.items()} for name, found in values.items()}
    active, trains = list(tuner.active_adapters), any(p.requires_grad for p in model.parameters())
    tuner.unload()
    parallelize(tuner.model)
    for name, config in configs.items():
        with replacing(config, init_lora_weights=True):  # the base is what an adapter that starts from it has left
            tuner.inject_adapter(tuner.model, name)
        tuner._cast_adapter_dtype(adapter_name=name, autocast_adapter_dtype=True)
        state = runtime.find_parallel_state(tuner.model)
        assert state is not None
        place_in_base(tuner.model, state)
        equal = {}
        for key in sorted(kept[name]):  # rank 0's values
            equal[key] = kept[name][key].to(state.mesh.device).contiguous()
            dist.broadcast(equal[key], src=0)
        set_peft_model_state_dict(model, equal, adapter_name=name)
    tuner.set_adapter(active, inference_mode=not trains)

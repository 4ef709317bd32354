"""Loading: an unchanged `from_pretrained` call gives each rank only its slices.

transformers builds the model on the meta device, lets `maybe_distribute_model` turn parameters into DTensors, and then
fills it tensor by tensor (`loading.py`). We stand in for that one function. Each patch takes the original.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from hf_parallel.axes.pipeline.stand_ins import stand_ins
from hf_parallel.hooks import runtime
from hf_parallel.hooks.bitsandbytes import four_bit
from hf_parallel.hooks.patching import patch
from hf_parallel.model.build import all_on_meta
from hf_parallel.parallelize import parallelize
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedModel


class Requested:
    """Stands for the layout in `from_pretrained(distributed_config=…)`; the mesh itself must not be copied around."""

    def __init__(self, quantization: BitsAndBytesConfig | None = None) -> None:
        self.quantization = quantization

    def __deepcopy__(self, memo: dict) -> Requested:
        return self


@patch("transformers.modeling_utils:PreTrainedModel.from_pretrained", "asks for the layout")
def from_pretrained(original: Callable, cls: type, *args: object, **kwargs: object) -> object:
    """Ask for the layout, and make random numbers equal again afterwards."""
    if any(kwargs.get(key) is not None for key in ("distributed_config", "tp_plan", "tp_size")):
        refuse("from_pretrained", "is given a layout of its own and --parallel too", do="give one of them")
    placed = kwargs.get("device_map") == "auto" and kwargs.pop("device_map")
    quantization = kwargs.pop("quantization_config", None)
    if quantization is not None:
        four_bit.check(quantization)
    result = original(cls, *args, distributed_config=Requested(quantization), **kwargs)
    if quantization is not None:
        four_bit.mark(result[0] if isinstance(result, tuple) else result, quantization)
    if placed:
        state = runtime.parallel_state(result[0] if isinstance(result, tuple) else result)
        assert state is not None
        state.notes.append("device_map=auto: the layout is what places the model")
    runtime.equalise_within_model()
    return result


@patch("transformers.modeling_utils:PreTrainedModel.prepare_distribute_model", "knows only its own meshes")
def prepare(
    original: Callable, cls: type, distributed_config: object, *, device_map: object = None, **mesh: object
) -> object:
    """Where to load: this rank's device."""
    if not isinstance(distributed_config, Requested):
        return original(cls, distributed_config, device_map=device_map, **mesh)  # with a mesh before 5.18
    if isinstance(device_map, str) and device_map in ("balanced", "balanced_low_0", "sequential"):
        refuse(f"device_map={device_map}", "places layers itself, as --parallel does", '"auto"')
    if isinstance(device_map, dict) and set(map(str, device_map.values())) & {"disk"}:
        refuse("device_map with disk", "offloading is not part of this version", do="remove device_map")
    return distributed_config, runtime.mesh().device, None


@patch("transformers.modeling_utils:PreTrainedModel.maybe_distribute_model", "cuts the meta model")
def distribute(
    original: Callable, cls: type, model: PreTrainedModel, distributed_config: object, *mesh: object, **meshes: object
) -> object:
    """Make the meta model parallel, and tell the loader which of the checkpoint's names belong to other stages."""
    if not isinstance(distributed_config, Requested):
        return original(cls, model, distributed_config, *mesh, **meshes)
    del model.config.distributed_config
    if getattr(model.config, "quantization_config", None) is not None:
        refuse("quantised checkpoints", "not part of this version", do="load in bf16, or pack that in 4 bits")
    for parameter in all_on_meta(model).parameters():
        # What __init__ froze, such as Whisper's positions, trains once plain transformers has given it its values.
        parameter.requires_grad_(parameter.is_floating_point())
    _widen(model)
    before = set(model.state_dict())
    quantization = distributed_config.quantization
    pack = four_bit.Pack(quantization) if quantization is not None else None
    parallelize(model, mesh=runtime.mesh(), pack=pack)
    local = set(model.state_dict())
    _ignore_foreign(model, before - local, local)
    return model


def _widen(model: PreTrainedModel) -> None:
    """What the loader will keep in fp32 is fp32 before it is sharded: a unit of FSDP2 has one dtype."""
    from transformers.core_model_loading import build_glob_alternation

    kept = list(model._get_dtype_plan(model.dtype))
    if not kept:
        return
    pattern = build_glob_alternation(kept)[0]
    for name, parameter in model.named_parameters():
        if pattern.search(name):
            parameter.data = parameter.data.float()


def _ignore_foreign(model: PreTrainedModel, foreign: set[str], local: set[str]) -> None:
    """Names that other stages load are no surprise in the checkpoint, whatever prefix it uses."""
    if not foreign:
        return
    prefix = re.escape(model.base_model_prefix) + r"\."
    gone = [re.sub(f"^{prefix}", "", name) for name in stand_ins(model)]
    patterns = {rf"^({prefix})?" + re.escape(name) + r"(\.|$)" for name in gone}
    model._keys_to_ignore_on_load_unexpected = set(model._keys_to_ignore_on_load_unexpected or ()) | patterns
    tied = model.all_tied_weights_keys
    model.all_tied_weights_keys = {target: source for target, source in tied.items() if {target, source} <= local}

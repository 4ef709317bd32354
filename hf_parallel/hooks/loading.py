"""Treatment of each tensor while `from_pretrained` fills the model. Each function takes the original.

transformers hands the sources of a target through its conversions and sets the result. We hand it tensors that are not
read yet (see `checkpoint.lazy_tensor`), and read this rank's part when the result is set.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.apply.parallelize import parallelize_model
from hf_parallel.ask.session import of_session
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.adapters.four_bit import FourBit
from hf_parallel.axes.pipeline.stages import find_stand_ins
from hf_parallel.checkpoint.hub_format import gather_from_stages
from hf_parallel.checkpoint.lazy_tensor import LazyTensor, RangeFile, make_lazy_tensor, read_values
from hf_parallel.checkpoint.slices import find_local_part, read_part
from hf_parallel.hooks import bitsandbytes, runtime
from hf_parallel.hooks.accelerate.loop_losses import watch_first_batch
from hf_parallel.hooks.bitsandbytes import read_packed
from hf_parallel.hooks.patching import patch, replacing
from hf_parallel.model.anatomy import get_stored_order, move_to_meta
from hf_parallel.ranks.local import get_local

if TYPE_CHECKING:
    from transformers import BitsAndBytesConfig, PreTrainedModel
    from transformers.core_model_loading import LoadStateDictInfo

    from hf_parallel.checkpoint.slices import Readable


@patch("transformers.modeling_utils:safe_open", "a file mapping keeps whole tensors in memory")
def open_by_reading(
    original: Callable, file: str, framework: str = "pt", device: str = "cpu", backend: str | None = None
) -> object:
    """Read ranges into memory of their own: a mapped file keeps every page that was touched.

    Without a mapping safetensors reads whole tensors, whatever slice is asked for; so it opens only what has dtypes
    that `RangeFile` does not know.
    """
    try:
        return RangeFile(os.fspath(file))
    except KeyError:
        return original(file, framework=framework, device=device, backend="pread")


@patch("transformers.core_model_loading:spawn_materialize", "converts slices, which mixes up joined tensors")
def materialize(
    original: Callable,
    thread_pool: object,
    tensor: torch.Tensor | Readable,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    *args: object,
    **kwargs: object,
) -> object:
    """Give the conversions whole tensors that are not read, instead of slices that some of them would mix up."""
    wanted = None if dtype == torch.uint8 else dtype  # of a packed weight, which is read as it is in the file
    return lambda: make_lazy_tensor(tensor, wanted, device)


@patch("transformers.core_model_loading:set_param_for_module", "judges sizes by local shapes")
def set_parameter(
    original: Callable,
    model: nn.Module,
    target_name: str,
    param_value: torch.Tensor | LazyTensor,
    loading_info: LoadStateDictInfo,
    *args: object,
    **kwargs: object,
) -> None:
    """Read this rank's part and set it. Global shapes decide whether the checkpoint's tensor fits."""
    name, value, info = target_name, param_value, loading_info
    owner, _, leaf = name.rpartition(".")
    module = model.get_submodule(owner)
    own = getattr(module, leaf, None)
    packing = getattr(module, "packing", None) if isinstance(module, FourBit) and leaf == "weight" else None
    if not isinstance(own, torch.Tensor):
        value = value.whole() if isinstance(value, LazyTensor) else value
    elif (own if packing is None else packing.source).shape != value.shape:
        info.missing_keys.discard(name)
        info.mismatched_keys.add((name, value.shape, own.shape))
        return
    elif packing is not None:
        value = read_packed(packing, value, own, getattr(module, "stored_orders", {}).get("weight"))
    else:
        value = read_values(value, find_local_part(own, get_stored_order(model, name)))
    original(model, name, value, info, *args, **kwargs)


class _Drawing:
    """Where one process would have the model that is being loaded: a GPU draws other numbers than the host."""

    device: torch.device | None = None


@patch("transformers.modeling_utils:PreTrainedModel.initialize_weights", "new heads unequal, stages draw alike")
def initialize_missing(original: Callable, self: PreTrainedModel) -> None:
    """Let stages draw new weights one after the other, so that each draws what one process would.

    Data ranks, which a script may have seeded each in its own way (`device_specific`), draw as the first of them, and
    then go on from their own random numbers.
    """
    mesh, state = runtime.mesh(), runtime.find_parallel_state(self)
    if state is None:
        return original(self)
    own = mesh.read_random_state()
    for axis in ("dp_replicate", "dp_shard"):
        runtime.equalise_random_state(axis, 0)
    pairs = zip(own, mesh.read_random_state(), strict=True)
    seeded_alike = all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)
    if state.pipeline is not None and state.pipeline.last and not state.pipeline.first:
        # Its copy of a tied embedding: the first thing that the first stage draws, from the same random state.
        self._initialize_weights(self.get_input_embeddings())
    for stage in range(mesh.size("pp")):
        if stage == mesh.index("pp"):
            original(self)
        runtime.equalise_random_state("pp", stage)
    if not seeded_alike:
        mesh.set_random_state(own)


@patch("transformers.modeling_utils:PreTrainedModel._initialize_weights", "each rank draws for its part alone")
def initialize_module(
    original: Callable, self: PreTrainedModel, module: nn.Module, *args: object, **kwargs: object
) -> None:
    """Draw new weights, such as a head's, whole on all ranks, of which each keeps its part: one module at a time.

    What a module draws for those below it (GPT-2's output projections) are parts by then, of which whole ones are
    drawn too (`parts.draw`), but for rows that are whole and stored in another order.
    """
    if getattr(module, "_is_hf_initialized", False):
        return original(self, module, *args, **kwargs)
    device = of_session(_Drawing).device  # where one process would draw them
    # New are parts not loaded, and not stored as their values are drawn, or not on the device where they are.
    kinds, new = () if device is None else (device.type, "meta"), []
    for owner in module.modules():
        for name, part in owner._parameters.items():
            if part is None or getattr(part, "_is_hf_initialized", False):
                continue
            elsewhere = device is not None and part.is_floating_point() and part.device.type not in kinds
            if owner is module if isinstance(part, DTensor) else hasattr(owner, "stored_orders") or elsewhere:
                new.append((owner, name, part))
    for owner, name, p in new:
        order, where = get_stored_order(owner, name), device or get_local(p).device
        former = torch.zeros(p.shape, dtype=p.dtype, device=where) if owner is module else p.detach().to(where)
        owner._parameters[name] = nn.Parameter(former if owner is module or order is None else order.to_own(former))
    result = original(self, module, *args, **kwargs)
    for owner, name, part in new:
        with torch.no_grad():
            whole = cast(nn.Parameter, owner._parameters[name]).detach()
            get_local(part).copy_(read_part(whole, find_local_part(part, get_stored_order(owner, name))))
        owner._parameters[name] = part
    return result


@patch("transformers.modeling_utils:PreTrainedModel._adjust_bias", "pads a cut bias by nothing: torch 2.11 fails")
def adjust_bias(original: Callable, self: nn.Module, output_embeddings: Any, input_embeddings: object) -> None:
    """Give a head's bias the length of its weight, unless it has that."""
    bias = getattr(output_embeddings, "bias", None)
    if not isinstance(bias, DTensor) or bias.shape[0] != output_embeddings.weight.shape[0]:
        original(self, output_embeddings, input_embeddings)


@patch("transformers.modeling_utils:PreTrainedModel._resize_token_embeddings", "resizes what a part has in parts")
def resize_part(original: Callable, self: nn.Module, *args: object, **kwargs: object) -> object:
    """Let the parallel model inside `self` resize its vocabulary, such as an encoder that a script has loaded."""
    model = cast(Any, self)
    ends = [end for end in (model.get_input_embeddings(), model.get_output_embeddings()) if end is not None]
    for part in self.modules():
        if part is not self and "_hf_parallel" in vars(part) and set(ends) <= set(part.modules()):
            cast(Any, part).resize_token_embeddings(*args, **kwargs)
            return model.get_input_embeddings()
    return original(self, *args, **kwargs)


@patch("transformers.modeling_utils:log_state_dict_report", "knows the keys of one stage")
def report(original: Callable, *args: object, **kwargs: object) -> None:
    """Report once, and raise one error if sizes do not match, for all stages of a pipeline.

    Raises:
        SpecError: the checkpoint has two values for one parameter, or one under the name that only the last stage
            reads.
    """
    model, info = cast(nn.Module, kwargs["model"]), kwargs["loading_info"]
    # Pairs that are one parameter by the config, and not so after loading: the checkpoint has different values.
    tied, held = getattr(model, "_hf_parallel_tied_keys", {}), dict(model.named_parameters(remove_duplicate=False))
    pairs = [pair for pair in tied.items() if set(pair) <= set(held)]
    untied = [(target, source) for target, source in pairs if held[target] is not held[source]]
    stages = gather_from_stages({**vars(info), "untied": untied}, runtime.mesh())
    for field in ("missing_keys", "unexpected_keys", "mismatched_keys", "conversion_errors"):
        for stage in stages:
            getattr(info, field).update(stage[field])
    # What is sharded or cut as one parameter stays one.
    for target, source in (pair for stage in stages for pair in stage["untied"]):
        why = f"is not its {source}, though the config ties them"
        refuse(f"{target} of the checkpoint", why, "tie_word_embeddings=False")
    lost = stages[0]["missing_keys"] - stages[-1]["missing_keys"]
    for target, source in tied.items():
        if source in lost:
            why = f"the checkpoint has the tied {target} but not {source}, which the first stage reads"
            refuse(f"pp_size={len(stages)}", why, "pp_size=1")
    original(*args, **kwargs)


# ---- Loading: an unchanged `from_pretrained` call gives each rank only its slices -----------------------------------
# transformers builds the model on the meta device, lets `maybe_distribute_model` turn parameters into DTensors, and
# then fills it tensor by tensor (`loading.py`). We stand in for that one function. Each patch takes the original.


@dataclass(eq=False)
class Requested:
    """Stands for the layout in `from_pretrained(distributed_config=…)`; the mesh itself must not be copied around."""

    quantization: BitsAndBytesConfig | None = None

    def __deepcopy__(self, memo: dict) -> Requested:
        return self


@patch("transformers.modeling_utils:PreTrainedModel.from_pretrained", "asks for the layout")
def from_pretrained(original: Callable, cls: type, *args: object, **kwargs: Any) -> object:
    """Ask for the layout, and make random numbers equal again afterwards."""
    if any(kwargs.get(key) is not None for key in ("distributed_config", "tp_plan", "tp_size")):
        refuse("from_pretrained", "is given a layout of its own and --parallel too", do="give one of them")
    device_map, device = kwargs.get("device_map"), torch.get_default_device()
    if device_map is not None:  # where `from_pretrained` leaves a model without a layout
        places = device_map.values() if isinstance(device_map, dict) else [device_map]
        device = torch.device("cpu") if set(map(str, places)) <= {"cpu"} else runtime.mesh().device
    placed = kwargs.get("device_map") == "auto" and kwargs.pop("device_map")
    quantization = kwargs.pop("quantization_config", None)
    if quantization is not None:
        bitsandbytes.check_four_bit(quantization)
    with replacing(of_session(_Drawing), device=device):
        result = original(cls, *args, distributed_config=Requested(quantization), **kwargs)
    model = result[0] if isinstance(result, tuple) else result
    if quantization is not None:
        from transformers.quantizers import AutoHfQuantizer

        # The marks of bitsandbytes' own loading, by which Trainer, PEFT and TRL know a model.
        model.is_loaded_in_4bit = model.is_quantized = True
        model.quantization_method = quantization.quant_method
        model.hf_quantizer = AutoHfQuantizer.from_config(quantization)
        model.save_pretrained = bitsandbytes.refuse_saving
    if placed:
        state = runtime.find_parallel_state(model)
        assert state is not None
        state.notes.append("device_map=auto has no effect: the layout places the model")
    runtime.equalise_within_model()
    return result


@patch("transformers.modeling_utils:PreTrainedModel.prepare_distribute_model", "knows only its own meshes")
def prepare(
    original: Callable, cls: type, distributed_config: object, *, device_map: object = None, **mesh: object
) -> object:
    """Choose the device to load to: this rank's."""
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
    from transformers.core_model_loading import build_glob_alternation

    if not isinstance(distributed_config, Requested):
        return original(cls, model, distributed_config, *mesh, **meshes)
    del model.config.distributed_config
    if getattr(model.config, "quantization_config", None) is not None:
        refuse("quantised checkpoints", "not part of this version", do="load in bf16, or pack that in 4 bits")
    for parameter in move_to_meta(model).parameters():
        # What __init__ froze, such as Whisper's positions, trains once plain transformers has given it its values.
        parameter.requires_grad_(parameter.is_floating_point())
    if kept := list(model._get_dtype_plan(model.dtype)):
        # What the loader will keep in fp32 is widened before it is sharded: a unit of FSDP2 has one dtype.
        pattern = build_glob_alternation(kept)[0]
        for name, parameter in model.named_parameters():
            if pattern.search(name):
                parameter.data = parameter.data.float()
    before = set(model.state_dict())
    quantization = distributed_config.quantization
    pack = bitsandbytes.Pack(quantization) if quantization is not None else None
    parallelize_model(model, mesh=runtime.mesh(), pack=pack)
    watch_first_batch(model)
    local = set(model.state_dict())
    if before - local:
        # Names that other stages load are no surprise in the checkpoint, whatever prefix it uses.
        prefix = re.escape(model.base_model_prefix) + r"\."
        gone = [re.sub(f"^{prefix}", "", name) for name in find_stand_ins(model)]
        patterns = {rf"^({prefix})?" + re.escape(name) + r"(\.|$)" for name in gone}
        model._keys_to_ignore_on_load_unexpected = set(model._keys_to_ignore_on_load_unexpected or ()) | patterns
        tied = model.all_tied_weights_keys
        model.all_tied_weights_keys = {name: source for name, source in tied.items() if {name, source} <= local}
    return model

"""Optimizers of bitsandbytes, whose kernels take plain tensors: each rank's step runs on its local parts.

Their states are local too: codes of 8 bits and the largest magnitude of each block of 256 values (Dettmers et al.,
arXiv 2110.02861). Where cuts do not fall between blocks, rounding differs from one process as between two runs of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from packaging.version import Version
from torch import nn
from torch.distributed.tensor import DTensor
from transformers.pytorch_utils import Conv1D

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.adapters.four_bit import BLOCK, Packing, pack_linear
from hf_parallel.axes.axis import Plan
from hf_parallel.axes.data.local_step import on_local_parts
from hf_parallel.axes.pipeline.stages import StandIn
from hf_parallel.axes.tensor.axis import TENSOR
from hf_parallel.axes.tensor.layers import TensorParallelLayer
from hf_parallel.checkpoint.lazy_tensor import LazyTensor, read_values
from hf_parallel.checkpoint.slices import find_local_part, read_part
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch
from hf_parallel.model.anatomy import StoredOrder
from hf_parallel.ranks.mesh import place_as

if TYPE_CHECKING:
    from bitsandbytes.optim.optimizer import Optimizer8bit
    from transformers import BitsAndBytesConfig, PreTrainedModel


@patch("bitsandbytes.optim.optimizer:Optimizer8bit.step", "kernels take no DTensor")
def step(original: Callable, self: Optimizer8bit, closure: Callable | None = None) -> object:
    """A step on the local parts of all parameters."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    if not self.initialized:
        check_eight_bit(self)
        self.check_overrides()  # looks for the parameters themselves
    with torch.no_grad(), on_local_parts(self) as held:
        # A rank without a row of a tensor has a state for it all the same: of no values, which kernels do not take.
        for number, group in enumerate(self.param_groups):
            for index, (parameter, part) in enumerate(zip(held.former[number], group["params"], strict=True)):
                if part is not parameter and part.grad is not None and not part.numel():
                    part.grad = None
                    if not self.state[part]:
                        self.init_state(group, part, number, index)
                    self.state[part]["step"] += 1
        original(self)
    return loss


def check_eight_bit(optimizer: torch.optim.Optimizer) -> None:
    """Refuse what compares norms of whole tensors, such as LAMB and LARS; of other libraries nothing is known here."""
    own = getattr(optimizer, "optimizer", optimizer)
    if getattr(getattr(own, "args", None), "max_unorm", 0) > 0:
        refuse(
            f"{type(own).__name__} of bitsandbytes",
            "compares norms of whole tensors, of which ranks hold parts",
            "adamw_8bit",
        )


# ---- QLoRA: `from_pretrained(quantization_config=BitsAndBytesConfig(load_in_4bit=True))` under a layout -------------
# The model is split, its linears are told to expect packed weights, and FSDP2 shards those. While the file is read
# each rank packs what it stores, one weight at a time.


def check_four_bit(config: BitsAndBytesConfig) -> None:
    """Refuse what is not 4 bits by bitsandbytes, and versions of it that were not looked at."""
    if not getattr(config, "load_in_4bit", False):
        kind = getattr(config, "quant_method", type(config).__name__)
        refuse(
            "quantization_config",
            f"{getattr(kind, 'value', kind)} in other than 4 bits is not part of this version",
            "BitsAndBytesConfig(load_in_4bit=True)",
        )
    if find_spec("bitsandbytes") is None or Version(version("bitsandbytes")).release[:2] < (0, 50):
        refuse("load_in_4bit", "needs bitsandbytes 0.50 or later", do="pip install -U bitsandbytes")


@dataclass(eq=False)
class Pack:
    """Between splitting and sharding: let the linears that bitsandbytes would replace expect packed weights."""

    config: BitsAndBytesConfig

    def check(self, model: PreTrainedModel, plan: Plan) -> None:
        """Refuse weights whose rows, or a tp rank's parts of rows, are not whole blocks."""
        if plan.config.precision != "auto":
            refuse(f"precision={plan.config.precision}", "load_in_4bit packs the same linears", "precision=auto")
        if plan.config.mirrors_stages:
            asked = f"pipeline_schedule={plan.config.pipeline_schedule}"
            refuse(asked, "copies weights, which load_in_4bit packs", "pipeline_schedule=1f1b")
        if plan.config.fills_bubbles:
            asked = f"pipeline_fill={plan.config.pipeline_fill}"
            refuse(asked, "reads what layers compute, which load_in_4bit rounds", "pipeline_fill=none")
        if plan.config.tp_col_size > 1:
            why = "blocks of 4-bit weights run along rows, which it cuts"
            refuse(f"tp_mesh={plan.config.tp_mesh}", why, f"tp={plan.config.tp_size} without tp_mesh")
        part = plan.part(TENSOR)
        for name, module in self._linears(model):
            if isinstance(module, Conv1D):
                refuse("load_in_4bit", f"{name} is a Conv1D, whose blocks run across", "a model of Linears")
            style = None if part is None else part.words.get(name)
            parts = plan.config.tp_size if style == "rowwise" else 1
            for what, width in (("rows", module.in_features), ("a rank's parts of rows", module.in_features // parts)):
                if width % BLOCK:
                    smaller = "" if module.in_features % BLOCK else "a smaller tp_size or "
                    refuse(
                        "load_in_4bit",
                        f"{what} of {name} hold {width} weights, not whole blocks of {BLOCK}",
                        f'{smaller}llm_int8_skip_modules=["{name.rpartition(".")[2]}"]',
                    )
            if style is not None and part is not None and part.overlap:
                refuse("tp_overlap=true", "products with weights of 4 bits are not overlapped", "false")

    def __call__(self, model: PreTrainedModel) -> None:
        double, compute = self.config.bnb_4bit_use_double_quant, self.config.bnb_4bit_compute_dtype
        for _, module in self._linears(model):
            pack_linear(module, self.config.bnb_4bit_quant_type, double, compute)

    def _linears(self, model: nn.Module) -> list[tuple[str, nn.Linear | Conv1D]]:
        from transformers.quantizers.base import HfQuantizer
        from transformers.quantizers.quantizers_utils import should_convert_module

        named = (self.config.llm_int8_skip_modules, model._keep_in_fp32_modules)
        skipped = HfQuantizer.get_modules_to_not_convert(model, *named)
        found = []
        for name, module in model.named_modules():
            # Its class before it was split. bitsandbytes replaces no subclass of a linear, such as a router.
            own = next(cls for cls in type(module).__mro__ if not issubclass(cls, TensorParallelLayer))
            if own in (nn.Linear, Conv1D) and not isinstance(module, StandIn) and should_convert_module(name, skipped):
                found.append((name, module))
        return found


def read_packed(
    packing: Packing, value: torch.Tensor | LazyTensor, own: torch.Tensor, order: StoredOrder | None
) -> torch.Tensor:
    """Return what this rank stores of a weight `value` [out, in] from the file."""
    weight = read_values(value, find_local_part(packing.source, order)).to(runtime.mesh().device, packing.source.dtype)
    codes, largest = _quantize_weight(weight, packing.quant_type)
    if packing.double:  # double quantisation runs over the whole weight: of all largest values this rank takes its own
        whole = value.whole() if isinstance(value, LazyTensor) else value
        whole = whole.to(runtime.mesh().device, packing.source.dtype)
        rounded = _quantize_weight(whole, packing.quant_type, double=True)[1].view(whole.shape[0], -1)
        rows, columns = find_local_part(packing.source, order)
        largest = rounded[rows.to(rounded.device)][:, columns[::BLOCK].to(rounded.device) // BLOCK].to(codes.device)
    packed = torch.cat([codes.flatten(), largest.contiguous().flatten().view(torch.uint8)])
    return read_part(packed, find_local_part(own)).clone()


def _quantize_weight(weight: torch.Tensor, quant_type: str, double: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    from bitsandbytes import functional

    codes, state = functional.quantize_4bit(
        weight.contiguous(), blocksize=BLOCK, compress_statistics=double, quant_type=quant_type
    )
    if not state.nested:
        return codes, state.absmax.float()
    return codes, functional.dequantize_blockwise(state.absmax, state.state2).float() + state.offset


@patch("peft.utils.other:prepare_model_for_kbit_training", "casts shards", copies=True)
def prepare_for_training(original: Callable, model: nn.Module, *args: object, **kwargs: object) -> object:
    """`prepare_model_for_kbit_training` casts what is not packed to fp32, in a way that shards do not bear."""
    if runtime.find_parallel_state(model) is not None:
        halves = (torch.float16, torch.bfloat16)
        _replace_linears(model, lambda p: p.detach().float() if p.dtype in halves else None)
    return original(model, *args, **kwargs)


def finish_casts(model: nn.Module) -> None:
    """`p.data = p.data.float()`, as the function does that a script has imported before, casts no stored part."""
    _replace_linears(
        model,
        lambda p: (
            place_as(p, p._local_tensor.detach().to(p.dtype))
            if isinstance(p, DTensor) and p.dtype != p._local_tensor.dtype
            else None
        ),
    )


def _replace_linears(model: nn.Module, change: Callable[[nn.Parameter], torch.Tensor | None]) -> None:
    changed: dict[int, nn.Parameter] = {}  # a tied weight stays one
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) not in changed:
                value = change(p)
                changed[id(p)] = p if value is None else nn.Parameter(value, requires_grad=p.requires_grad)
            module._parameters[name] = None if p is None else changed[id(p)]


def refuse_saving(*args: object, **kwargs: object) -> None:
    """Refuse `save_pretrained` of a base in 4 bits."""
    raise NotImplementedError("hf_parallel: a base in 4 bits is not saved; save the adapters")

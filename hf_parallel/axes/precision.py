"""Linears that multiply in 8 bits, and how their operands are scaled; all else computes as Trainer's flags say.

The linears of the repeated layers; embedding and head, where few bits cost most, are not among these.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.axis import Axis

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel

    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.axes.axis import Building
    from hf_parallel.model.anatomy import Anatomy

#: torchao versions before this one were not looked at: their fp8 tensors have other names.
TORCHAO = (0, 18)
#: What a CUDA device must be able to: fp8 products from 8.9 (Ada, Hopper) on, int8 ones from 8.0.
CAPABILITY = {"fp8": (8, 9), "int8": (8, 0)}
#: Styles of tensor parallelism whose ranks see all that a scale is made of, or can agree on it.
_SPLIT = ("colwise", "packed_qkv", "packed_halves", "falcon_qkv", "rowwise", "colwise_shared_heads")


@dataclass(frozen=True)
class PrecisionFacts:
    """The facts of a model and this machine that decide it.

    Attributes:
        linears: input and output width of what can multiply in 8 bits, by full name.
        left: other linears of the layers, and why they stay as they are.
        torchao: its version, or None.
        device: where it will run; capability: of a CUDA device, as (9, 0).
        triton: is it installed?
    """

    linears: dict[str, tuple[int, int]]
    left: dict[str, str]
    torchao: tuple[int, ...] | None
    device: str
    capability: tuple[int, int]
    triton: bool


@dataclass(frozen=True)
class PrecisionPart:
    """The linears that will multiply in 8 bits. `emulated`: rounded to fp8 and multiplied in fp32."""

    precision: str
    scaling: str
    emulated: bool
    linears: tuple[str, ...]
    left: dict[str, str]
    gathers: bool  # are weights gathered in fp8?


class Precision(Axis[PrecisionFacts, PrecisionPart]):
    """torchao's float8 and int8 training, for linears that other axes split, gather and wrap."""

    name = key = "precision"
    off = "auto"

    def read(self, model: PreTrainedModel, config: ParallelConfig) -> PrecisionFacts:
        """Read the linears of the model's layers, and the machine."""
        import torch
        from packaging.version import Version
        from torch import nn
        from transformers.pytorch_utils import Conv1D

        from hf_parallel.axes.eight_bit import ALIGNED
        from hf_parallel.axes.tensor.tensor_parallel import SAME_AS_LINEAR
        from hf_parallel.model.anatomy import list_transformer_blocks

        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        device = "cpu" if found is None else found.type
        capability = torch.cuda.get_device_capability() if device == "cuda" else (0, 0)
        torchao: tuple[int, ...] | None = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            torchao = Version(importlib.metadata.version("torchao")).release[:2]
        inside = {id(module) for block in list_transformer_blocks(model) for module in block.modules()}
        linears, left = {}, {}
        for name, module in model.named_modules():
            if id(module) not in inside or not isinstance(module, nn.Linear | Conv1D):
                continue
            if isinstance(module, Conv1D):
                left[name] = "is a Conv1D, which torchao does not convert"
            elif type(module).forward is not nn.Linear.forward and type(module).__name__ not in SAME_AS_LINEAR:
                left[name] = f"is a {type(module).__name__} with a forward of its own"
            elif module.in_features % ALIGNED or module.out_features % ALIGNED:
                left[name] = f"is {module.out_features} x {module.in_features}, not multiples of {ALIGNED}"
            else:
                linears[name] = (module.in_features, module.out_features)
        triton = importlib.util.find_spec("triton") is not None
        return PrecisionFacts(linears, left, torchao, device, capability, triton)

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: PrecisionFacts) -> PrecisionPart:
        """Decide what will multiply in 8 bits, or say what is missing for it."""
        asked = f"precision={config.precision}"
        _check_machine(asked, config.precision, facts)
        if not facts.linears:
            why = next(iter(facts.left.items()), None)
            shown = "its layers hold no linears" if why is None else f"{why[0]} {why[1]}"
            refuse(asked, f"nothing in {anatomy.name} can multiply in 8 bits: {shown}", "precision=auto")
        emulated = config.precision == "fp8" and facts.device == "cpu"
        if config.tp_col_size > 1:
            refuse(asked, f"tp_mesh={config.tp_mesh} cuts products along both dims", "precision=auto")
        if config.tp_size > 1:
            _check_scales_and_parts(asked, config, anatomy, facts)
        sharded = config.dp_shard_size * config.cp_size > 1
        return PrecisionPart(
            config.precision,
            name_scaling(config),
            emulated,
            tuple(facts.linears),
            facts.left,
            sharded and can_gather_codes(config),
        )

    def notes(self, part: PrecisionPart) -> list[str]:
        total = len(part.linears) + len(part.left)
        lines = [f"precision={part.precision} ({part.scaling}): {len(part.linears)} of {total} linears use 8 bits"]
        lines += [f"{name} does not multiply in 8 bits, because it {why}" for name, why in list(part.left.items())[:1]]
        if part.emulated:
            lines.append("this machine has no fp8 units: numbers round to fp8 and multiply in fp32, which is slower")
        if part.gathers:
            lines.append("dp_shard gathers the weights that multiply in fp8 as fp8, which sends less")
        if part.scaling != "rowwise_with_gw_hp":
            lines.append("each rank scales what it multiplies at once, so another micro-batch size rounds differently")
        return lines

    def apply(self, model: nn.Module, part: PrecisionPart, building: Building) -> None:
        """Mark the linears, before they are cut."""
        from hf_parallel.axes.eight_bit import EightBit, Float8, Int8
        from hf_parallel.ranks.local import put_in_front

        recipe = Float8(part.scaling, part.emulated) if part.precision == "fp8" else Int8(part.scaling)
        for name in part.linears:
            put_in_front(EightBit, model.get_submodule(name)).recipe = recipe

    def finish(self, model: nn.Module, part: PrecisionPart, building: Building) -> None:
        """Let FSDP2 gather codes."""
        if part.gathers:
            from hf_parallel.axes.data.compressed import gather_codes

            for root, _ in building.roots:
                gather_codes(root, building.mesh)


def name_scaling(config: ParallelConfig) -> str:
    """Return what has one scale, as torchao names it."""
    default = "tensorwise" if config.precision == "fp8" else "rowwise"
    return default if config.precision_scaling == "auto" else config.precision_scaling


def can_gather_codes(config: ParallelConfig) -> bool:
    """Return whether weights that multiply in fp8 are gathered so, where they are sharded."""
    codes = config.precision == "fp8" and name_scaling(config) == "tensorwise"
    compressed = config.hierarchical_shard is not None or config.quantize_weights != "none"
    return codes and config.offload != "cpu" and not compressed


def _check_machine(asked: str, precision: str, facts: PrecisionFacts) -> None:
    if facts.torchao is None or facts.torchao < TORCHAO:
        have = "none is installed" if facts.torchao is None else f"this is {'.'.join(map(str, facts.torchao))}"
        refuse(asked, f"needs torchao {'.'.join(map(str, TORCHAO))} or later, {have}", "precision=auto")
    if facts.device == "cpu":
        return
    if facts.device != "cuda":
        refuse(asked, f"torchao has no {precision} products for {facts.device}", "precision=auto")
    needed, have = CAPABILITY[precision], ".".join(map(str, facts.capability))
    if facts.capability < needed:
        works = "int8" if precision == "fp8" and facts.capability >= CAPABILITY["int8"] else "auto"
        why = f"needs compute capability {'.'.join(map(str, needed))}, this device has {have}"
        refuse(asked, why, f"precision={works}")
    if precision == "int8" and not facts.triton:
        refuse(asked, "torchao's int8 products need triton on CUDA", "precision=auto")


def _check_scales_and_parts(asked: str, config: ParallelConfig, anatomy: Anatomy, facts: PrecisionFacts) -> None:
    """Refuse scales that differ from one process's, and parts that the hardware does not take."""
    from hf_parallel.ask.spec import SpecError
    from hf_parallel.axes.eight_bit import ALIGNED
    from hf_parallel.axes.tensor.axis import SplitFacts, resolve_styles

    size = config.tp_size
    try:
        styles = resolve_styles(cast("SplitFacts", anatomy.facts["tp"]), size, config.ep_size > 1)
    except (SpecError, KeyError):
        return  # tp itself refuses
    for name, widths in facts.linears.items():
        style = styles.get(name, ("whole", ""))[0]
        if style.startswith("shared"):
            kv_heads = (anatomy.heads or (1, 1))[1]
            refuse(asked, f"tp_size={size} ranks share keys that {name} holds beside queries", f"tp_size={kv_heads}")
        if style not in _SPLIT:
            refuse(asked, f"tp_size={size} keeps {name} whole, and ranks see parts of its gradient", "tp_size=1")
        cut = widths[style == "colwise" or style.startswith(("packed", "falcon"))]
        if style != "colwise_shared_heads" and cut // size % ALIGNED and facts.device == "cuda":
            why = f"tp_size={size} leaves {cut // size} of {cut} features of {name}, no multiple of {ALIGNED}"
            fits = max(n for n in range(1, size) if cut % n == 0 and cut // n % ALIGNED == 0)
            refuse(asked, why, f"tp_size={fits}")


PRECISION = Precision()

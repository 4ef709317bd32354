"""What is asked of the planner: the sizes of the axes, the batch, and how the step is computed."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hf_parallel.config import SpecError

#: Bytes per element of what matrix products read and write. "bf16", "fp16", "fp8" are mixed precision as Megatron-LM,
#: DeepSpeed and FSDP's policy have it; to this package's engine, and as a Transformers checkpoint is loaded, "bf16" is
#: everything in bf16. "mixed": fp32 weights under torch.autocast to bf16, which is what bf16=True of Trainer does.
WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 2, "mixed": 2}


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes; they multiply to the number of GPUs. `dp` counts replicas x shards, `ep` is part of them.

    Ranks are numbered with tp innermost, then cp, dp, pp: (dp_replicate, pp, dp_shard, cp, tp) as in mesh.py, whose
    replicas sit on the slowest links.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    zero_stage: int = 0
    virtual_stages: int = 1
    sequence_parallel: bool = False
    dp_replicate: int = 1
    schedule: str = "1f1b"
    context: str = "ring"  # how cp shares attention: "ring" or "ulysses"
    split: tuple[int, ...] | None = None  # layers per stage; default: even, or by cost where that is impossible

    @property
    def gpus(self) -> int:
        """Number of ranks."""
        return self.tp * self.pp * self.dp * self.cp

    @property
    def shards(self) -> int:
        """Over how many ranks ZeRO spreads its states: the data ranks of one replica, and cp with them."""
        return self.dp // self.dp_replicate * self.cp

    def __str__(self) -> str:
        sizes = [f"{name}={getattr(self, name)}" for name in ("tp", "cp", "pp", "dp", "ep") if getattr(self, name) > 1]
        return " ".join([*sizes, f"zero={self.zero_stage}"])


@dataclass(frozen=True)
class Job:
    """The batch and how a step is computed. `engine`: whose habits hold where engines differ; see docs/planner.md."""

    seq: int
    micro_batch: int
    micro_batches: int
    recompute: str = "none"
    precision: str = "bf16"
    lora: int = 0  # rank of the adapters, 0: all weights are trained
    optimizer: str = "adamw"
    offload: str = "none"
    attention: str = "flash"
    engine: str = "standard"
    calls: int = 1  # of a pipeline's schedule per step, each with its share of the micro-batches

    @property
    def micro_batches_per_call(self) -> int:
        """Of one run of a pipeline's schedule."""
        return self.micro_batches // self.calls

    @property
    def width(self) -> int:
        """Bytes of what a matrix product reads and writes."""
        return WIDTHS[self.precision]

    @property
    def autocast(self) -> bool:
        """Are weights stored in fp32 and lowered for each product by torch.autocast?"""
        return self.precision == "mixed" or (self.precision == "fp16" and self.engine == "hf_parallel")

    @property
    def stored(self) -> int:
        """Bytes of a weight or gradient as it travels, and of the residual stream: those of the embedding's dtype."""
        return 4 if self.autocast else self.width

    @property
    def products(self) -> str:
        """The precision of matrix products."""
        return "bf16" if self.precision == "mixed" else self.precision


def make_layout(given: Mapping[str, Any] | Layout | None, gpus: int | None) -> Layout:
    """Fill in what is missing or None; `dp` takes the GPUs that are left.

    Raises:
        SpecError: an unknown key, or sizes that do not multiply to `gpus`.
    """
    if isinstance(given, Layout):
        return _checked(given, gpus)
    values = {key: value for key, value in (given or {}).items() if value is not None}
    names = {field.name for field in dataclasses.fields(Layout)}
    aliases = {"sp": "sequence_parallel", "vpp": "virtual_stages", "zero": "zero_stage"}
    values = {aliases.get(key, key): value for key, value in values.items()}
    for key in values.keys() - names:
        close = difflib.get_close_matches(key, sorted(names), n=1)
        raise SpecError(f"layout: {key} is no key; {f'did you mean {close[0]}?' if close else sorted(names)}")
    others = math.prod(values.get(axis, 1) for axis in ("tp", "pp", "cp"))
    if "dp" not in values and gpus is not None:
        values["dp"] = max(1, gpus // others)
    values.setdefault("schedule", "interleaved_1f1b" if values.get("virtual_stages", 1) > 1 else "1f1b")
    return _checked(Layout(**values), gpus)


def _checked(layout: Layout, gpus: int | None) -> Layout:
    if gpus is not None and gpus < 1:
        raise SpecError(f"gpus={gpus}: there must be one at least; gpus=8 works")
    if gpus is not None and layout.gpus != gpus:
        fits = gpus // (layout.tp * layout.pp * layout.cp)
        raise SpecError(
            f"layout: tp={layout.tp} x pp={layout.pp} x cp={layout.cp} x dp={layout.dp} = {layout.gpus}, "
            f"but there are {gpus} GPUs" + (f"; dp={fits} works" if fits * layout.gpus // layout.dp == gpus else "")
        )
    if layout.zero_stage not in (0, 1, 2, 3):
        raise SpecError(f"layout: zero_stage={layout.zero_stage}: not one of 0, 1, 2, 3")
    if layout.dp % layout.dp_replicate:
        raise SpecError(f"layout: dp_replicate={layout.dp_replicate} does not divide dp={layout.dp}")
    return layout


def make_job(layout: Layout, seq: int, micro_batch: int | None, global_batch: int | None, **how: Any) -> Job:
    """Count the micro-batches of a step: global_batch / (dp x micro_batch), rounded up.

    Raises:
        SpecError: an unknown recomputation, precision or optimizer.
    """
    micro_batch = micro_batch or (max(1, global_batch // layout.dp) if global_batch else 1)
    count = max(1, math.ceil((global_batch or micro_batch * layout.dp) / (micro_batch * layout.dp)))
    how["precision"] = known_precision(how.get("precision"))
    how["recompute"] = known_recompute(how.get("recompute"))
    return Job(seq, micro_batch, count, **how)


def known_precision(name: str | None) -> str:
    """A precision under any of its usual names: amp_bf16, BF16, fp8_tensorwise; mixed, bf16-mixed."""
    text = (name or "bf16").lower()
    if text.removeprefix("bf16-") == "mixed":
        return "mixed"
    found = {text.find(spelled): name for name in WIDTHS for spelled in (name, name.replace("p", "loat"))}
    found.pop(-1, None)
    if found:
        return found[min(found)]  # the first one named: "fp16/bf16" keeps gradients as fp16 does
    raise SpecError(f"precision={name}: not one of {', '.join(WIDTHS)}")


def known_recompute(name: str | None) -> str:
    """One of none, selective, full."""
    text = (name or "none").lower()
    for choice in ("none", "selective", "full"):
        if text.startswith(choice):
            return choice
    raise SpecError(f"recompute={name}: not one of none, selective, full")

"""The state of a process that is proved: its small sizes, what it writes down, and how many data ranks it is."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.prove import noise
from hf_parallel.prove.record import Record, Step, TokenWatch, sample_gradients, sample_weights

#: The step after which a run that is to be resumed is saved and left: in the middle of an epoch of three.
SAVED_AFTER = 2
#: Gradient accumulation steps and examples per device that a proof takes at most.
ACCUMULATION, EXAMPLES = 2, 4


@dataclass
class Sizes:
    """The sizes of a small run, in which one process stands for all data ranks.

    Attributes:
        steps: optimizer steps; an epoch has one less, the last of which is ragged.
        data_ranks: of the layout. One process takes as many times the batch of a device.
        micro_batches: what a pipeline needs of examples per device.
        heads: ranks that share the heads of a layer.
        stages: of the pipeline.
        joins: the layout joins the examples of a batch to one row.
        keep_dtype: leave bf16 and fp16 as the script has them; else all is fp32.
    """

    steps: int = 4
    data_ranks: int = 1
    micro_batches: int = 1
    heads: int = 1
    stages: int = 1
    joins: bool = False
    keep_dtype: bool = False

    @classmethod
    def of_layout(
        cls, config: ParallelConfig, steps: int, keep_dtype: bool, other: ParallelConfig | None = None
    ) -> Sizes:
        """The sizes that a resolved layout needs, and another one that has begun the run."""
        layouts = [config] if other is None else [config, other]
        data_ranks = max(one.data_parallel_size for one in layouts)
        micro_batches = max(max(one.pipeline_microbatches or 1, one.pp_size) for one in layouts)
        heads = math.lcm(*(one.tp_size * one.cp_size for one in layouts))
        stages = max(one.pipeline_stages for one in layouts)
        joins = any(one.padding_free for one in layouts)
        return cls(steps, data_ranks, micro_batches, heads, stages, joins, keep_dtype)


@dataclass
class Proving:
    """The state of one process that is proved.

    Attributes:
        multiply: how many data ranks this process stands for.
        disturbed: rounding differs on purpose.
        on_gpu: else on a CPU, whatever the script asks for.
        alone: one process, without the layout.
        leaves: the run ends with its first save, and another one resumes it.
        resumes: from this checkpoint.
        models: folder with the small models, which all processes of a proof share.
        out: folder of this run, which takes the place of the script's output folder.
        done: optimizer steps.
        in_trainer: a Trainer trains; Accelerator is its tool.
        driven: the script has a Trainer or an Accelerator, which tell of steps and losses; else its optimizer does.
        made: models that the script has loaded or made.
        draws: the training draws noise in its forward passes, from one state in all processes.
    """

    sizes: Sizes
    record: Record
    out: Path
    models: Path
    multiply: int = 1
    disturbed: bool = False
    on_gpu: bool = False
    alone: bool = False
    leaves: bool = False
    resumes: Path | None = None
    done: int = 0
    in_trainer: bool = False
    driven: bool = False
    draws: bool = False
    watched: list[nn.Module] = field(default_factory=list)
    made: list[nn.Module] = field(default_factory=list)

    # ---- watching --------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """The step that is being computed."""
        return self.record.step(self.done)

    def watch(self, model: nn.Module, precision: str | None = None) -> None:
        """Watch the tokens of a model; disturb its weights if this run is to differ by rounding.

        Args:
            precision: of mixed precision: "bf16", "fp16", or "no".
        """
        if model in self.watched:
            return
        self.watched.append(model)
        self.record.facts.setdefault("model", type(model).__name__)
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_json_string"):
            self.record.facts.setdefault("config", hashlib.sha256(config.to_json_string().encode()).hexdigest()[:16])
        weights = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        computes_in = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision or "no", weights)
        self.record.facts.setdefault("computes_in", str(computes_in).removeprefix("torch."))
        if self.disturbed:
            noise.disturb_weights(model, computes_in)
        tokens = TokenWatch(model, self.step, backward=True)
        if self.alone:  # tokens of one process are looked for among all of a layout
            tokens.mark_padding(model)

    def end_step(self, models: Sequence[nn.Module]) -> None:
        """Note the gradients of a step, once: before they are clipped, or as the optimizer is about to read them."""
        if self.step().gradients:
            return
        for model in models:
            self.record.facts.setdefault("device", next(model.parameters()).device.type)
            self.step().gradients.update(sample_gradients(model))

    def note_weights(self, models: Sequence[nn.Module]) -> None:
        """Note the trained weights."""
        for model in models:
            self.record.weights.update(sample_weights(model))

    # ---- sizes -----------------------------------------------------------------------------------------------

    def share_batches(self) -> None:
        """With `split_batches=True` the batch that a script asks for is that of all data ranks: one process's, too."""
        self.sizes, self.multiply = replace(self.sizes, data_ranks=1), 1

    def count_examples(self, per_device: int, accumulation: int) -> int:
        """Count the examples of an epoch: full steps, and a last one with a quarter less."""
        batch = per_device * self.sizes.data_ranks * accumulation
        return batch * (self.sizes.steps - 2) + max(1, batch - max(1, batch // 4))


class Enough(SystemExit):
    """A loop of the script's own has made all steps of the proof."""

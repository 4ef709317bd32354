"""`monitor=trace:N`: the first N steps of a real run are written down, for `hf-parallel bisect`.

OUTPUT_DIR/hf_parallel-trace/rank-0.pt    a `Record` of each rank: weights at the start, and for each step two
                                          numbers per token and module, and the gradients before they are clipped
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import nn

from hf_parallel.apply.parallelize import ParallelState
from hf_parallel.hooks import report
from hf_parallel.prove.certificate import read_library_versions
from hf_parallel.prove.record import TRACE, Record, Step, TokenWatch, sample_gradients, sample_weights

#: Elements of a tensor that a trace keeps: its norm is of all of them.
_KEPT = 1 << 12


class Trace:
    """Writes down the steps of this rank until it has all that were asked for. Collective over the ranks of a model.

    Args:
        folder: OUTPUT_DIR.
    """

    def __init__(self, model: nn.Module, state: ParallelState, folder: str) -> None:
        self.model, self.steps = model, state.config.traced_steps
        self.record = Record(state.mesh.rank, state.mesh.data_rank)
        self.record.facts = {"spec": state.config.to_spec(), "model": type(model).__name__}
        self.record.facts |= {f"version of {name}": version for name, version in read_library_versions().items()}
        self.record.weights = sample_weights(model, _KEPT)
        self.folder = Path(folder) / TRACE
        self._done = 0
        self._tokens = TokenWatch(model, self._step)
        self._tokens.mark_padding(model)

    def _step(self) -> Step:
        return self.record.step(self._done)

    def note_gradients(self) -> None:
        """Before they are clipped, or if they are not, as the optimizer is about to read them: once in a step."""
        if self._done < self.steps and not self._step().gradients:
            self._step().gradients = sample_gradients(self.model, _KEPT)

    def note_settings(self, optimizer: torch.optim.Optimizer) -> None:
        """Learning rates, weight decay and the like of each group of parameters."""
        if self._done < self.steps:
            for number, group in enumerate(optimizer.param_groups):
                numbers = {name: value for name, value in group.items() if isinstance(value, int | float)}
                self._step().settings |= {f"{name} of group {number}": float(v) for name, v in numbers.items()}

    def end_step(self) -> None:
        """Write the file, so that a run that ends early has one too."""
        if self._done >= self.steps:
            return
        self._done += 1
        lowered = self._tokens.dtypes & {torch.bfloat16, torch.float16}
        self.record.facts["computes_in"] = "bfloat16" if lowered else "float32"
        path, written = self.folder / f"rank-{self.record.rank}.pt", True
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.record.write(path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)
        except (OSError, RuntimeError) as error:  # torch's writer says RuntimeError of a full disk
            why = str(error).splitlines()[0]
            print(f"hf_parallel: {path} is not written: {why}; training goes on", file=sys.stderr, flush=True)
            written = False
        if self._done < self.steps:
            return
        self._tokens.remove()
        if written:
            report.say(f"{self.folder} has {self.steps} steps; `hf-parallel bisect` compares them with another run's")

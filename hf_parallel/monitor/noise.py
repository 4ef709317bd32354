"""The gradient noise scale: the batch beyond which more sequences per step hardly save steps.

A small batch of `b` targets has a gradient whose squared norm is |G|² + S / b in the mean: G is the true gradient,
S the trace of its covariance per target (McCandlish et al., 2018, arXiv:1812.06162, appendix A.1). A step's
gradient is the mean of those of its J small batches, weighed by their targets: B in all. Their weighed scatter gives
both numbers without bias, for small batches of unlike sizes too:

    S   = B / (J - 1) x (sum of b_j / B |g_j|² - |g|²)
    G²  = |g|² - S / B
    S / G²                    in targets; times sequences per target: in sequences

Both are smoothed apart, as the mean of a ratio would be biased.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from hf_parallel.apply.parallelize import ParallelState
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.data.small_batches import GradientSquares

#: What a step before counts, of the weight of the next: about the last hundred steps are averaged.
DECAY = 0.99


@dataclass(frozen=True)
class StepSums:
    """Sums over the small batches of a step, on all ranks.

    Attributes:
        squares: the sum of |c_j|² / b_j, where c_j = b_j / B g_j is what small batch j adds to the step's gradient.
        count: of small batches with a target.
        targets: of all of them.
        sequences: of all of them.
        whole: the square of the step's gradient.
    """

    squares: float
    count: float
    targets: float
    sequences: float
    whole: float


@dataclass(frozen=True)
class Estimate:
    """`noise`: trace of the covariance per target. `signal`: the squared norm of the true gradient."""

    noise: float
    signal: float
    targets_per_sequence: float

    def to_dict(self) -> dict[str, float | None]:
        """JSON-ready."""
        return {
            "sequences": self.in_sequences,
            "targets": self.in_targets,
            "noise": self.noise,
            "signal": self.signal,
            "targets_per_sequence": self.targets_per_sequence,
        }

    @property
    def in_targets(self) -> float | None:
        """The noise scale in targets; None: there is too much noise yet to see the gradient."""
        return self.noise / self.signal if self.signal > 0 else None

    @property
    def in_sequences(self) -> float | None:
        """The noise scale in sequences, as batches are counted: the critical batch."""
        return None if self.in_targets is None else self.in_targets / self.targets_per_sequence


def describe_critical_batch(critical: float, batch: float) -> str:
    """Say what the critical batch means for a run whose steps have `batch` sequences.

    To one loss, a batch B takes 1 + critical / B times the fewest steps, and 1 + B / critical times the fewest
    sequences (McCandlish et al., 2018, equation 2.11).
    """
    return (
        f"the critical batch is about {critical:,.3g} sequences (gradient noise scale): steps of {batch:,.4g} take "
        f"{1 + critical / batch:.3g} times the fewest steps and {1 + batch / critical:.3g} times the fewest sequences"
    )


@dataclass(eq=False)
class NoiseScale:
    """The smoothed estimate of a training, step by step."""

    decay: float = DECAY
    _weight: float = 0.0
    _noise: float = 0.0
    _signal: float = 0.0
    _targets: float = 0.0
    _sequences: float = 0.0

    def add(self, step: StepSums) -> None:
        """Take in a step; a step with one small batch shows nothing."""
        if step.count < 1.5 or not step.targets:
            return
        scatter = step.targets * step.squares - step.whole
        noise = step.targets / (step.count - 1) * scatter
        for name, value in (
            ("_noise", noise),
            ("_signal", step.whole - noise / step.targets),
            ("_targets", step.targets),
            ("_sequences", step.sequences),
            ("_weight", 1.0),
        ):
            setattr(self, name, self.decay * getattr(self, name) + (1 - self.decay) * value)

    @property
    def estimate(self) -> Estimate | None:
        """Return the estimate of the steps so far; None before the first."""
        if not self._weight:
            return None
        return Estimate(self._noise / self._weight, self._signal / self._weight, self._targets / self._sequences)


class GradientNoise:
    """Collects a model's small batches on this rank; all ranks add theirs up when a log reads them.

    A training calls, in each step: `begin_step`, `end_small_batch` after each backward pass, `note_gradients` before
    gradients are clipped, `end_step`.
    """

    def __init__(self, model: torch.nn.Module, state: ParallelState) -> None:
        config = getattr(model, "config", None)
        if state.pipeline is not None and getattr(config, "tie_word_embeddings", False):
            why = "both ends of the pipeline have a part of the tied embedding's gradient, and meet once per step"
            refuse(
                f"monitor=noise with pp_size={state.config.pp_size}", why, "pp_size=1, or tie_word_embeddings=False"
            )
        self._mesh, config = state.mesh, state.config
        self._squares = GradientSquares(model, state.root, state.mesh)
        self._ranks = config.world_size // config.data_parallel_size  # of one model, which know the same batches
        self._waiting: list[tuple[torch.Tensor, float]] = []  # targets and sequences whose gradient is to come
        self._pipelined = state.pipeline is not None
        self._scales: list[torch.Tensor | None] = []  # of a pipeline's runs that were handed over
        self.left_out = 0  # steps that show nothing
        self._broken = False
        self._sums = torch.zeros(6, dtype=torch.float64, device=self._mesh.device)
        self._noted = False
        self._steps: list[torch.Tensor] = []
        self.scale = NoiseScale()
        if state.pipeline is not None:
            # By what a pipeline multiplies the gradients that its schedule has computed
            state.pipeline.services.gradients_scaled = self._scales.append

    @property
    def is_new(self) -> bool:
        """Return whether no step has been seen yet."""
        return not self._steps and self.scale.estimate is None and not self.left_out

    def begin_step(self) -> None:
        """Forget what belongs to no step, as an evaluation's batches."""
        self._squares.follow()
        self._squares.take()
        self._waiting.clear()
        self._scales.clear()
        self._sums, self._noted, self._broken = torch.zeros_like(self._sums), False, False

    def end_small_batch(self, parts: list[tuple[torch.Tensor, float]]) -> None:
        """Take in what backward passes have given.

        Args:
            parts: targets and sequences of each of them, in order; several of a pipeline's batch.
        """
        self._waiting += parts
        if self._pipelined and not self._scales:
            return  # all batches of the step run at once
        squares, scale = self._squares.take(), self._scales.pop() if self._scales else None
        if not squares:
            return  # data ranks reduce later
        if self._mesh.size("cp") > 1:  # a reduction holds all batches since the last
            targets = torch.stack([targets for targets, _ in self._waiting]).sum()
            self._waiting = [(targets, sum(sequences for _, sequences in self._waiting))]
        if self._pipelined and len(squares) != len(self._waiting):
            self._broken = True  # a batch that no schedule could cut
            self._waiting.clear()
            return
        if len(squares) != len(self._waiting):
            what = f"monitor=noise with {len(squares)} backward passes for {len(self._waiting)} small batches"
            refuse(what, "a small batch's gradient is seen as one backward pass computes it", "monitor=basic")
        for square, (count, sequences) in zip(squares, self._waiting, strict=True):
            wide = square.double() if scale is None else square.double() * scale.double().square()
            count = count.to(wide)
            own = torch.stack([torch.ones_like(wide), count, torch.full_like(wide, sequences)]) * (count > 0)
            self._sums[0] += torch.where(count > 0, wide / count.clamp(min=1), 0.0)
            self._sums[1:4] += own / self._ranks
        self._waiting = []

    def note_gradients(self) -> None:
        """Square the step's gradient before it is clipped: once in a step."""
        if not self._noted:
            self._noted = True
            self._sums[4] += self._squares.of_step().double()

    def end_step(self) -> None:
        """Keep the step until the next log. A step that shows nothing on one rank is left out on all of them."""
        self._sums[5] = not self._noted or self._broken or bool(self._waiting)
        self._steps.append(self._sums)
        self.begin_step()

    def read(self) -> Estimate | None:
        """Return the estimate with the steps since the last call. Collective over all ranks: one small sum."""
        if self._steps:
            sums = torch.stack(self._steps)
            dist.all_reduce(sums)
            self._steps.clear()
            for *step, is_left_out in sums.tolist():
                if is_left_out:
                    self.left_out += 1
                else:
                    self.scale.add(StepSums(*step))
        return self.scale.estimate

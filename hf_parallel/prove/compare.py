"""Every number of a layout beside that of one process, within what rounding does to it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from hf_parallel.prove.record import Record, Sample, Step, sample_of

#: How many times what rounding did once, it may do at most.
TIMES = 10.0
#: Units in the last place of fp32 that are rounding in any case: of a number; of the largest gradient, in all others.
_UNITS = 64


def compute_rounding_floor(alone: Record) -> float:
    """Relative differences that are rounding whatever one run showed: some tens of fp32's units, or one of bf16's."""
    lowered = alone.facts.get("computes_in", "float32") != "float32"
    return torch.finfo(torch.bfloat16).eps if lowered else _UNITS * torch.finfo(torch.float32).eps


@dataclass
class Difference:
    """A number of the layout that one process does not have.

    Attributes:
        what: such as "loss", "gradient of model.norm.weight".
        step: of the optimizer, from 1; 0 where a number belongs to none.
        ours: under the layout; `theirs`: in one process.
        off: the relative difference; `allowed`: what rounding may do.
    """

    kind: str
    what: str
    step: int
    ours: float
    theirs: float
    off: float
    allowed: float
    rank: int = 0

    def __str__(self) -> str:
        when = f" of step {self.step}" if self.step else ""
        bound = f"off by {self.off:.1e}, rounding does {self.allowed:.0e} at most"
        return f"{self.what}{when}: {self.ours:.7g} on rank {self.rank}, one process {self.theirs:.7g} ({bound})"


@dataclass
class Compared:
    """The outcome of a comparison.

    Attributes:
        worst: by kind of number, the largest difference as a share of what is allowed.
        counts: by kind of number, how many were compared.
    """

    differences: list[Difference]
    worst: dict[str, float]
    counts: dict[str, int]

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {"worst": self.worst, "counts": self.counts, "differences": [asdict(one) for one in self.differences]}


class Comparison:
    """Compare the records of a layout with those of one process and of one whose rounding differs.

    Args:
        before: steps that the logs of these records leave out.
    """

    def __init__(self, ranks: Sequence[Record], alone: Record, disturbed: Record, before: int = 0) -> None:
        self.ranks, self.alone, self.disturbed, self.before = ranks, alone, disturbed, before
        self.floor = compute_rounding_floor(alone)
        self.differences: list[Difference] = []
        self.worst: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    def compare(self, folders: tuple[Path, Path, Path] | None = None) -> Compared:
        """Compare all numbers; `folders` hold what the three runs saved, in the order of the records."""
        self._compare_logs()
        # A data rank's loss is a mean over its own examples, or its part of a sum: either makes one process's
        by_data_rank = {record.data_rank: record.losses for record in self.ranks}
        spread = max(map(_compute_relative, self.alone.losses, self.disturbed.losses), default=0.0)
        sums = [sum(losses) for losses in zip(*by_data_rank.values(), strict=False)]
        if len(sums) != len(self.alone.losses):
            self._add_missing("loss", "number of losses", len(sums), len(self.alone.losses))
        for index, (total, loss) in enumerate(zip(sums, self.alone.losses, strict=False)):
            own_loss = min((total / len(by_data_rank), total), key=lambda value: _compute_relative(loss, value))
            off = _compute_relative(loss, own_loss)
            self._judge("loss", f"loss {index + 1}", 0, own_loss, loss, off, spread, 0)
        for index, (theirs, noisy) in enumerate(zip(self.alone.steps, self.disturbed.steps, strict=False)):
            ours = [rank.steps[index].gradients if index < len(rank.steps) else {} for rank in self.ranks]
            self._compare_samples("gradient", ours, theirs.gradients, noisy.gradients, index + 1)
        weights = [rank.weights for rank in self.ranks]
        self._compare_samples("weight", weights, self.alone.weights, self.disturbed.weights)
        # The set that all data ranks train on is one process's; their order shows in losses and tokens
        expected, seen = set(self.alone.examples), set().union(*(rank.examples for rank in self.ranks))
        self.counts["example"] += len(expected)
        if expected and seen and seen != expected:
            what = f"examples ({len(expected - seen)} not seen, {len(seen - expected)} not one process's)"
            self._add_missing("example", what, len(seen), len(expected))
        self._compare_predictions()
        if folders is not None:
            # Keys, shapes and values of all safetensors files that the one process wrote
            root = folders[1]
            for folder in sorted({path.parent.relative_to(root) for path in root.rglob("*.safetensors")}):
                own, one, other = (
                    {
                        name: sample_of(tensor)
                        for file in sorted((place / folder).glob("*.safetensors"))
                        for name, tensor in load_file(file).items()
                    }
                    for place in folders
                )
                self._compare_samples("saved weight", [own, *({} for _ in self.ranks[1:])], one, other)
        return Compared(self.differences, self.worst, dict(self.counts))

    # ---- kinds of numbers ------------------------------------------------------------------------------------

    def _compare_logs(self) -> None:
        logs = {record.rank: record.logs for record in self.ranks}
        if self.alone.losses:  # a loop logs on each data rank what that one knows: their means are one process's
            each = {record.data_rank: record.logs for record in self.ranks}.values()
            means: list[dict[str, float]] = []
            for same in zip(*each, strict=False):
                shared = [key for key in same[0] if all(key in log for log in same)]
                means.append({key: sum(log[key] for log in same) / len(same) for key in shared})
            logs = {0: means}
        spread: dict[str, float] = {}
        for one, other in zip(self.alone.logs, self.disturbed.logs, strict=False):
            for key in one.keys() & other.keys():
                spread[key] = max(spread.get(key, 0.0), _compute_relative(one[key], other[key]))
        for rank, own in logs.items():
            if len(own) != len(self.alone.logs) and rank == 0:
                self._add_missing("log", "number of logs", len(own), len(self.alone.logs))
            step = self.before
            for index, (ours, theirs) in enumerate(zip(own, self.alone.logs, strict=False)):
                step += "loss" in theirs
                for key in sorted(ours.keys() ^ theirs.keys()):
                    self._add_missing("log", f"{key} in log {index}", key in ours, key in theirs, step, rank)
                for key in (key for key in ours if key in theirs):
                    kind = "gradient norm" if "grad_norm" in key else "loss" if key == "loss" else "metric"
                    off = _compute_relative(theirs[key], ours[key])
                    self._judge(kind, key, step, ours[key], theirs[key], off, spread.get(key, 0.0), rank)

    def _compare_samples(
        self, kind: str, ours: list[dict[str, Sample]], theirs: dict[str, Sample], noisy: dict, step: int = 0
    ) -> None:
        spreads = {
            name: compute_sample_difference(noisy[name], sample) for name, sample in theirs.items() if name in noisy
        }
        usual = sorted(spreads.values())[len(spreads) // 2] if spreads else 0.0
        largest = max((sample.norm for sample in theirs.values()), default=0.0) if kind == "gradient" else 0.0
        tiny = _UNITS * torch.finfo(torch.float32).eps * largest
        names = set(theirs).union(*ours)
        present = set().union(*ours)
        for name in sorted(names):
            if (name in present) != (name in theirs):
                self._add_missing(kind, f"{kind} of {name}", name in present, name in theirs, step)
                continue
            for rank, samples in zip(self.ranks, ours, strict=True):
                if name in samples:
                    a, b = samples[name], theirs[name]
                    if max(a.norm, b.norm) < tiny:  # zero but for rounding, such as of a bias before a softmax
                        self.counts[kind] += 1
                        continue
                    off, spread = compute_sample_difference(a, b), max(spreads.get(name, 0.0), usual)
                    self._judge(kind, f"{kind} of {name}", step, a.norm, b.norm, off, spread, rank.rank)

    def _compare_predictions(self) -> None:
        for index, theirs in enumerate(self.alone.predictions):
            noisy = self.disturbed.predictions[index : index + 1]
            spread = max((_compute_off_tensors(one, theirs) for one in noisy), default=0.0)
            for record in self.ranks:
                ours = record.predictions[index] if index < len(record.predictions) else None
                if ours is None and record.rank == 0:
                    self._add_missing("prediction", f"prediction {index}", 0, 1)
                elif ours is not None:
                    mine, its = ours, theirs
                    if ours.shape == theirs.shape:  # Trainer fills with -100 up to the longest of all data ranks
                        filled = (ours == -100) | (theirs == -100)
                        mine, its = ours.masked_fill(filled, 0.0), theirs.masked_fill(filled, 0.0)
                    off = _compute_off_tensors(mine, its)
                    what, norm = f"prediction {index} of shape {tuple(ours.shape)}", float(ours.norm())
                    self._judge("prediction", what, 0, norm, float(theirs.norm()), off, spread, record.rank)

    # ---- judging ---------------------------------------------------------------------------------------------

    def _judge(
        self, kind: str, what: str, step: int, ours: float, theirs: float, off: float, spread: float, rank: int
    ) -> None:
        """Count a number that is `off`, where another rounding in one process makes the difference `spread`."""
        allowed = max(self.floor, TIMES * spread)
        self.counts[kind] += 1
        self.worst[kind] = max(self.worst.get(kind, 0.0), off / allowed)
        if not off <= allowed:
            self.differences.append(Difference(kind, what, step, ours, theirs, off, allowed, rank))

    def _add_missing(self, kind: str, what: str, ours: float, theirs: float, step: int = 0, rank: int = 0) -> None:
        self.counts[kind] += 1
        self.worst[kind] = math.inf
        self.differences.append(Difference(kind, what, step, float(ours), float(theirs), math.inf, 0.0, rank))


def compare_resumed(
    first: Sequence[Record],
    ranks: Sequence[Record],
    alone: Record,
    disturbed: Record,
    steps: int,
    folders: tuple[Path, Path, Path],
) -> tuple[Compared, bool]:
    """Compare a run that one layout has begun and another one resumed, with whole runs of one process.

    Args:
        first: the ranks that trained so many `steps`; `ranks`: those that resumed.
        folders: of what was saved, as `Comparison.compare` has them.

    Returns:
        The comparison before the save and after it as one, and whether numbers before it differ.
    """
    logs, predictions = len(first[0].logs), len(first[0].predictions)

    def head(record: Record) -> Record:
        shown = record.predictions[:predictions]
        return replace(
            record, logs=record.logs[:logs], predictions=shown, steps=record.steps[:steps], weights={}, examples=[]
        )

    def rest(record: Record, resumed: bool) -> Record:
        own = record.logs if resumed else record.logs[logs:]
        own = [{key: log[key] for key in log if key != "train_loss"} for log in own]  # a mean since the resumption
        shown = record.predictions if resumed else record.predictions[predictions:]
        return replace(record, logs=own, predictions=shown, steps=[*([Step()] * steps), *record.steps[steps:]])

    seen = [index for record in first for index in record.examples]
    resumed = [rest(replace(record, examples=[*record.examples, *seen]), True) for record in ranks]
    before = Comparison([head(record) for record in first], head(alone), head(disturbed)).compare()
    after = Comparison(resumed, rest(alone, False), rest(disturbed, False), steps).compare(folders)
    worst = {key: max(before.worst.get(key, 0.0), after.worst.get(key, 0.0)) for key in before.worst | after.worst}
    counts = dict(Counter(before.counts) + Counter(after.counts))
    return Compared([*before.differences, *after.differences], worst, counts), bool(before.differences)


def _compute_relative(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    off = abs(one - other) / max(abs(one), 1e-12)
    return off if math.isfinite(off) else math.inf


def compute_sample_difference(ours: Sample, theirs: Sample) -> float:
    """Return the norm of the difference relative to the norm, of the sampled elements and of all of them."""
    if ours.shape != theirs.shape:
        return math.inf
    return max(
        _compute_off_tensors(ours.values, theirs.values),
        _compute_relative(theirs.norm, ours.norm) if theirs.norm else 0.0,
    )


def _compute_off_tensors(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if ours.shape != theirs.shape:
        return math.inf
    same = torch.isclose(ours, theirs, rtol=0, atol=0, equal_nan=True)
    off = float(torch.where(same, 0.0, ours.double() - theirs.double()).norm())
    size = float(theirs.double().nan_to_num().norm())
    return 0.0 if off == 0 else off / size if size and math.isfinite(off) else math.inf

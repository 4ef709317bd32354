"""The first difference between two runs that recorded their steps with `monitor=trace:N`.

Nobody has run these twice with another rounding, so that nothing tells what rounding may do to each number. It grows
smoothly from module to module: what is off more than ten times as far as all that was computed before it is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.spec import refuse
from hf_parallel.prove.compare import TIMES, compute_rounding_floor, compute_sample_difference
from hf_parallel.prove.locate import FEW, MANY, MOST, describe_common_factor
from hf_parallel.prove.record import TRACE, Record, Sample

#: Tokens of a module that are looked for in the other run, at most.
_MOST_TOKENS = 2048
#: Gradients that are smaller than this share of the median are rounding, such as those of key biases.
_TINY = 1e-4


def _read_record(file: Path) -> Record:
    try:
        return Record.read(file)
    except Exception as error:  # torch has no exception of its own for a file that was cut off
        why = f"cannot be read ({type(error).__name__}: {error})".splitlines()[0]
        refuse(str(file), why, do="record the run again with monitor=trace:4")


class Recorded:
    """The records of all ranks of one run.

    Args:
        folder: OUTPUT_DIR of the run, or the folder of the trace.

    Attributes:
        may_differ: share of a rank's tokens that another run need not have.

    Raises:
        SpecError: it has no trace, or not that of all ranks of one run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        place = folder / TRACE if (folder / TRACE).is_dir() else folder
        files = {int(path.stem.partition("-")[2]): path for path in place.glob("rank-*.pt")}
        if not files:
            refuse(
                str(folder), "holds no trace", do="train with monitor=trace:4 in the spec, then give its output_dir"
            )
        self.spec = _read_record(files[min(files)]).facts["spec"]
        config = ParallelConfig.parse(self.spec)
        lacking = [rank for rank in range(config.world_size) if rank not in files]
        self.ranks = [_read_record(files[rank]) for rank in range(config.world_size) if rank in files]
        if lacking or any(rank.facts["spec"] != self.spec for rank in self.ranks):  # a former run may have had more
            why = f"lacks records of {self.spec}, or has some of another run"
            refuse(str(place), why, do="put those of all its ranks in one empty folder")
        self.steps = min(len(rank.steps) for rank in self.ranks)
        self.floor = max(map(compute_rounding_floor, self.ranks))
        self.data_ranks = len({rank.data_rank for rank in self.ranks})
        # A mask of whole rows does not mark the padding in a part of them.
        self.may_differ = MOST if config.cp_size > 1 else MANY

    def __str__(self) -> str:
        return f"{self.folder} ({self.spec})"

    def samples(self, step: int) -> dict[str, Sample]:
        """Return the gradients of a step, from 1, of all stages; for 0 the trained weights at the start."""
        own = [rank.steps[step - 1].gradients if step else rank.weights for rank in reversed(self.ranks)]
        return {name: sample for samples in own for name, sample in samples.items()}

    def modules(self, step: int) -> list[str]:
        """Modules in the order of the stages, and of the calls in each."""
        return list(dict.fromkeys(name for rank in self.ranks for name in rank.steps[step].tokens))

    def tokens(self, step: int, module: str, width: int, kept: bool = False) -> list[torch.Tensor]:
        """Return the tokens [tokens, 2] of each rank whose output of this module has this width.

        Args:
            kept: leave padding out.
        """
        having = [own for own in (rank.steps[step] for rank in self.ranks) if own.width.get(module) == width]
        return [own.tokens[module][own.kept[module]] if kept else own.tokens[module] for own in having]

    def is_marked(self, step: int, module: str) -> bool:
        """Return whether padding is marked in the outputs of a module, on all ranks."""
        return not any(module in rank.steps[step].unmarked for rank in self.ranks)


@dataclass
class Parted:
    """Where two runs part.

    Attributes:
        step: from 1; 0 before the first one.
        direction: "start", "forward", "backward" or "optimizer".
        name: of the module, the parameter, or the setting.
        words: what is there in both runs.
        before: how far everything before it is off.
        cause: the kind of error that it looks like; empty for none that is known.
    """

    step: int
    direction: str
    name: str
    words: str
    before: float
    cause: str = ""

    def __str__(self) -> str:
        pass_ = self.direction if self.direction == "optimizer" else f"{self.direction} pass"
        when = f"in step {self.step}, {pass_}" if self.step else "before the first step"
        lines = [f"PARTED {when}: {self.words}", f"  everything before it agrees within {self.before:.1e}"]
        return "\n".join([*lines, *([f"  looks like: {self.cause}"] if self.cause else [])])


class Bisection:
    """Walk through two runs in the order of the computation, to the first number that rounding does not explain.

    Attributes:
        compared: how many modules and parameters agree.
    """

    def __init__(self, one: Recorded, other: Recorded) -> None:
        self.one, self.other = one, other
        self.worst = max(one.floor, other.floor)
        self.compared = 0
        self.steps = min(one.steps, other.steps)  # that both have

    def find_first(self) -> Parted | None:
        """Find the first difference."""
        found = self._compare_samples(0)
        for step in range(self.steps):
            found = found or self._compare_forward(step) or self._compare_update(step)
            if found is not None:
                return found
            self.worst *= TIMES  # an optimizer moves a weight by the sign of a gradient that may be rounding
        return found

    def _compare_forward(self, step: int) -> Parted | None:
        shared = set(self.other.modules(step))
        modules = [name for name in self.one.modules(step) if name in shared]
        for module in modules:
            one, other = self.one, self.other
            if other.is_marked(step, module) and not one.is_marked(step, module):  # whose tokens must all be there
                one, other = other, one
            # One rank may have a part of the output's width
            width = max((rank.steps[step].width.get(module, 0) for rank in one.ranks), default=0)
            kept = one.tokens(step, module, width, kept=True)
            parts = other.tokens(step, module, width)
            if not parts or not sum(map(len, kept)):
                continue
            self.compared += 1
            ours, theirs = torch.cat(kept), torch.cat(parts)
            scale, allowed = ours.square().mean(0).sqrt().clamp_min(1e-30), TIMES * self.worst
            few = FEW if one.is_marked(step, module) else one.may_differ
            off, lost = _find_farthest(ours / scale, theirs / scale, allowed, few)
            words = f"the outputs of {module}: {lost:.0%} of the tokens of {one} are not in "
            words += f"{other}, the nearest ones off by {off:.1e}"
            if off <= allowed:
                self.worst = max(self.worst, off)
                whole = torch.cat(one.tokens(step, module, width)) / scale
                marked = other.tokens(step, module, width, kept=True)
                strange = [_find_farthest(part / scale, whole, allowed)[1] for part in marked if len(part)]
                if max(strange, default=0.0) <= other.may_differ:
                    continue
                words = f"the outputs of {module}: {max(strange):.0%} of the tokens of a rank of "
                words += f"{other} are not in {one}"
            cause = ""
            if module == modules[0] and step == 0:
                cause = (
                    "other batches: examples per device x accumulation x data ranks must be the same in both runs, "
                    "and so must data set, sampler and collator"
                )
            elif module == modules[0]:
                cause = "gradients agreed and weights do not: the optimizer, its clipping, groups or schedule"
            return Parted(step + 1, "forward", module, words, self.worst, cause)
        return None

    def _compare_update(self, step: int) -> Parted | None:
        for run in (self.one, self.other):
            # Ranks of one run that have other gradients of one parameter
            known: dict[str, tuple[int, Sample]] = {}
            apart: dict[str, tuple[int, int, float]] = {}
            for rank in run.ranks:
                for name, sample in rank.steps[step].gradients.items():
                    first, former = known.setdefault(name, (rank.rank, sample))
                    off = compute_sample_difference(sample, former)
                    if not off <= TIMES * self.worst:
                        apart[name] = first, rank.rank, off
            for name in self._order_latest_first(apart, step)[:1]:
                first, second, off = apart[name]
                words = f"ranks {first} and {second} of {run} have other gradients of {name}, off by {off:.1e}"
                return Parted(step + 1, "backward", name, words, self.worst, "data ranks that are not averaged")
        differs = self._compare_samples(step + 1)
        if differs is not None:
            return differs
        ours, theirs = (run.ranks[0].steps[step].settings for run in (self.one, self.other))
        for name in ours if ours.keys() == theirs.keys() else ():  # a stage's groups have numbers of their own
            if not math.isclose(ours[name], theirs[name], rel_tol=1e-6, abs_tol=1e-12):
                both = f"{ours[name]:.7g} in {self.one}, {theirs[name]:.7g} in {self.other}"
                return Parted(step + 1, "optimizer", name, f"{name} is {both}", self.worst)
        return None

    def _compare_samples(self, step: int) -> Parted | None:
        ours, theirs = self.one.samples(step), self.other.samples(step)
        kind, direction = ("gradient", "backward") if step else ("weight", "start")
        latest = self._order_latest_first(set(ours) | set(theirs), max(0, step - 1))
        norms = sorted(sample.norm for sample in ours.values())
        tiny, allowed = _TINY * norms[len(norms) // 2] if norms else 0.0, TIMES * self.worst
        offs = []
        for name in latest:
            if (name in ours) != (name in theirs):
                who = self.one if name in ours else self.other
                return Parted(step, direction, name, f"{who} alone has a {kind} of {name}", self.worst)
            if max(ours[name].norm, theirs[name].norm) > tiny:
                self.compared += 1
                offs.append((compute_sample_difference(theirs[name], ours[name]), name))
        bad = [(off, name) for off, name in offs if not off <= allowed]
        if not bad:
            return None
        off, name = bad[0]
        a, b = ours[name], theirs[name]
        both = f"norm {a.norm:.7g} in {self.one}, {b.norm:.7g} in {self.other}, off by {off:.1e}"
        words = f"the {kind} of {name}: {both}; {len(bad)} of {len(offs)} {kind}s differ"
        if step:
            pairs = [(theirs[name].norm, ours[name].norm) for _, name in bad]
            cause = describe_common_factor(pairs, len(ours), self.other.data_ranks)
            if not cause and len(bad) == len(offs) and self.one.data_ranks != self.other.data_ranks:
                cause = "a loss of the script's own that is a mean per data rank, of unlike numbers of targets"
        else:
            cause = "other weights at the start: another seed, checkpoint, or order of making them"
        return Parted(step, direction, name, words, self.worst, cause)

    def _order_latest_first(self, parameters: Iterable[str], step: int) -> list[str]:
        """Return the parameters in the order in which a backward pass computes their gradients."""
        order = {name: number for number, name in enumerate(self.one.modules(step))}
        return sorted(parameters, key=lambda name: -order.get(name.rpartition(".")[0], -1))


def _find_farthest(
    tokens: torch.Tensor, others: torch.Tensor, allowed: float, few: float = FEW
) -> tuple[float, float]:
    """Return how far tokens are from the nearest of the others, but for a few; and the share beyond `allowed`."""
    some = tokens[:: max(1, math.ceil(len(tokens) / _MOST_TOKENS))]
    nearest = torch.cat([torch.cdist(part, others, p=torch.inf).amin(1) for part in some.split(256)])
    off = float(torch.quantile(nearest, 1 - few, interpolation="lower"))
    return off, float((nearest > allowed).float().mean())

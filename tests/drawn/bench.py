"""Draw choices and layouts, run what they make on ranks and in one process, compare, and simplify what differs."""

import ast
import math
import random
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests import models
from tests.distributed import RankFailure, run, run_alone
from tests.training import axes, key_differences, weight_differences

Choices = dict[str, Any]

#: The errors of this package whose words say what to do.
REFUSALS = ("SpecError", "UsageError")
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_moe", "gpt_oss")
#: Models of two stacks, and what no layout of theirs has.
TWO_STACKS = ("t5", "t5_gated", "bart", "mbart")
NOT_OF_TWO_STACKS = ("pp", "cp", "tiled_mlp", "padding_free", "lean_loss")
#: Keys of a spec beside the sizes of its axes: which axis they need, and their values.
SPEC_KEYS: tuple[tuple[str, str, tuple], ...] = (
    ("dp_shard", "zero_stage", (0, 1, 2)),
    ("dp_shard", "gradient_reduction", ("micro_step", "step")),
    ("dp_shard", "offload", ("cpu", "optimizer")),
    ("dp_shard", "hierarchical_shard", (2,)),
    ("dp_", "batch_shares", ("auto", "3:1")),
    ("pp", "pipeline_schedule", ("gpipe", "interleaved_1f1b", "looped_bfs", "zbv_zero_bubble", "chimera")),
    ("pp", "pipeline_microbatches", (2, 4)),
    ("pp", "pipeline_split", ("[1,3]", "3:1")),
    ("tp", "sequence_parallel", ("true", "false")),
    ("tp", "tp_overlap", ("true",)),
    ("tp", "tp_mesh", ("2x2", "1x4")),
    ("cp", "context_parallel", ("ring", "ulysses", "allgather", "hybrid:2")),
    ("", "lean_loss", ("true", "false")),
    ("", "activation_checkpointing", ("selective", "full", "every:2")),
    ("", "activation_offload", ("true",)),
    ("", "tiled_mlp", ("true",)),
    ("", "monitor", ("full", "off", "trace:2", "noise")),
    ("", "async_save", ("true",)),
    ("", "attention", ("sdpa", "eager")),
    ("", "padding_free", ("true",)),
    ("", "nan_action", ("stop", "skip")),
)
#: What differs between two runs of one process too, and what only a layout has.
UNEQUAL = re.compile(r"runtime|per_second|^perf/|preparation_time|^expert_|^noise_")

#: Where a script that was stopped goes on: None on the layout that it was stopped on.
RESUMES_ON = (None, "dp_shard=2", "tp=2", "pp=2", "dp_replicate=2,pp=2", "dp_shard=2,tp=2", "cp=2")

#: Noise on initial weights, relative: what rounding of float32 puts on them at once.
NOISE = 1e-7
#: Of so many such runs the largest difference counts.
NOISY_RUNS = 4
#: How much larger than with that noise a difference may be that is called rounding.
OF_NOISE = 10.0

#: Lines that say that data ranks have other numbers than one process.
TOLD = re.compile(r"is taken for a mean over rows")


def _parts_of(chosen: Choices, spec: str) -> list[tuple[str, str | None]]:
    """The parts of a run, and where each of them runs."""
    stops = [("before", spec), ("after", chosen.get("resumes_on") or spec)]
    return stops if chosen.get("resumes") else [("whole", spec)]


@dataclass(frozen=True)
class Kind:
    """A kind of script.

    Attributes:
        choices: by name, the values of what a script may have in one way or another, the plain one first.
        fit: takes back choices that no script makes together, in one process either.
        script: `script(choices, folder, out, spec, part)` gives what it found by name, under "found"; the names of
            gradients in each step, under "gradient_keys"; and the folder that it saved, under "folder".
        tolerances: of numbers, relative, and of weights.
        leaves_out: is a number, by its name and key, not compared under these choices?
        left_out: axes and keys that no layout of such scripts has.
        parts: `parts(chosen, spec)` gives what runs one after another, each with its layout, None for one process.
        write: `write(model, folder)` writes an untrained model.
        size: by a number's key, how large what it is the difference of may be: a tolerance is relative to that.
    """

    choices: dict[str, tuple]
    fit: Callable[[Choices], Choices]
    script: Callable[..., dict[str, Any]]
    tolerances: Callable[[Choices], tuple[float, float]]
    leaves_out: Callable[[Choices, str, str], bool]
    size: Callable[[str], float] = lambda key: 0.0
    write: Callable[[str, str], None] = lambda model, folder: models.build(model).save_pretrained(folder)
    left_out: tuple[str, ...] = ()
    parts: Callable[[Choices, str], list[tuple[str, str | None]]] = _parts_of

    @property
    def plain(self) -> Choices:
        return {name: values[0] for name, values in self.choices.items()}

    def draw(self, seed: int, changed: int = 9) -> Choices:
        """Draw the choices of script number `seed`; about so many are not the plain ones."""
        dice, chance = random.Random(seed), 2 * changed / len(self.choices)
        chosen = {
            name: dice.choice(values) if dice.random() < chance else values[0] for name, values in self.choices.items()
        }
        chosen["model"] = dice.choice(self.choices["model"]) if dice.random() < 0.6 else self.plain["model"]
        return self.fit(chosen)

    def show(self, chosen: Choices) -> str:
        """The choices that are not plain, as `read` takes them."""
        return " ; ".join(f"{name}={chosen[name]!r}" for name in chosen if chosen[name] != self.plain[name])

    def read(self, text: str) -> Choices:
        """The choices of a line that `show` wrote."""
        given = dict(part.split("=", 1) for part in text.split(" ; ") if part)
        return {**self.plain, **{name: ast.literal_eval(value) for name, value in given.items()}}


def draw_layout(
    seed: int, chosen: Choices, worlds: tuple[int, ...] = (2, 2, 2, 4), left_out: tuple[str, ...] = ()
) -> str:
    """Draw a spec: one to three axes, and about one further key of those that go with them, but none left out."""
    dice = random.Random(f"layout {seed}")
    world = dice.choice(worlds)
    sizes = dice.choice({2: [(2,)], 4: [(2, 2), (2, 2), (4,)], 8: [(2, 2, 2), (2, 2, 2), (4, 2)]}[world])
    left_out += NOT_OF_TWO_STACKS if chosen["model"] in TWO_STACKS else ()
    axis_names = [name for name in ("dp_shard", "dp_replicate", "tp", "pp", "cp") if name not in left_out]
    names = dice.sample(axis_names, len(sizes))
    spec = {name: str(size) for name, size in zip(names, sizes, strict=True)}
    if chosen["model"] in EXPERTS and "dp_shard" in spec and dice.random() < 0.7:
        spec["ep"] = "2"
    fitting_keys = [entry for entry in SPEC_KEYS if any(axis.startswith(entry[0]) for axis in spec)]
    for _, name, values in fitting_keys:
        if name not in left_out and dice.random() < 1.5 / len(fitting_keys):
            spec[name] = str(dice.choice(values))
    return ",".join(f"{key}={value}" for key, value in spec.items())


class Bench:
    """A folder with initial models, and the runs of one script of a kind after another."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.root = tempfile.mkdtemp(prefix="drawn-")
        self.made: set[str] = set()

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def initial(self, model: str) -> str:
        """Folder of the untrained model."""
        folder = f"{self.root}/{model}"
        if model not in self.made:
            run_alone(self.kind.write, model, folder)
            self.made.add(model)
        return folder

    def try_script(self, chosen: Choices, spec: str) -> tuple[str, list[str]]:
        """Return "equal", "refused", "told", "rounding", "differs", "fails", or "no script"; and the words.

        What is told differs, as a line says; what is rounding differs as much in one process, whose initial weights
        have noise of the size of rounding; of no script one process fails, too.
        """
        out, folder, script = f"{self.root}/out", self.initial(chosen["model"]), self.kind.script
        parts = self.kind.parts(chosen, spec)
        shutil.rmtree(out, ignore_errors=True)
        try:
            # A run that is not stopped: one process that is resumed may go on in another order.
            reference = run_alone(script, chosen, folder, f"{out}/alone", None, "whole")
        except RankFailure as failure:
            return "no script", [_last_line(failure)]
        try:
            for part, layout in parts:
                call = partial(script, chosen, folder, f"{out}/ranks", layout, part)
                ranks = run(call, axes(layout)["world"], init=False)
        except RankFailure as failure:
            told = failure.message.startswith("hf_parallel: ")
            refused = told or any(kind in REFUSALS for kind in failure.kinds.values())
            return ("refused", [_last_line(failure)]) if refused else ("fails", [failure.first])
        found = self.compare(ranks, reference, chosen)
        if found and chosen.get("resumes"):
            # One process may lose what a layout loses, such as trained weights that no adapter's file has.
            for part, _ in parts:
                resumed = run_alone(script, chosen, folder, f"{out}/resumed", None, part)
            found = self.compare(ranks, resumed, chosen) and found
        lines = [line for rank in ranks for line in rank.get("told", []) if TOLD.search(line)]
        if found and not lines and self.is_rounding(found, reference, chosen):
            return "rounding", found
        return ("told" if found and lines else "differs" if found else "equal"), lines[:1] + found

    def is_rounding(self, found: list[str], reference: dict[str, Any], chosen: Choices) -> bool:
        """Is each of these differences there in one process with noise on its initial weights, and about as large?"""
        folder, sizes = f"{self.root}/noise", dict[str, float]()
        for seed in range(NOISY_RUNS):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(self.initial(chosen["model"]), folder)
            run_alone(add_noise, folder, seed)
            try:
                noisy = run_alone(self.kind.script, chosen, folder, f"{self.root}/out/noise", None, "whole")
            except RankFailure:
                continue
            for head, size in map(_split_difference, self.compare([noisy], reference, chosen)):
                sizes[head] = max(size, sizes.get(head, 0.0))
        return all(size <= OF_NOISE * sizes.get(head, 0.0) for head, size in map(_split_difference, found))

    def check(self, chosen: Choices, spec: str, may_end: tuple[str, ...] = ("equal",)) -> None:
        """Fail, with the words, unless the script ends in one of these ways."""
        ended, words = self.try_script(chosen, spec)
        assert ended in may_end, "\n".join([f"{ended}: {spec}: {self.kind.show(chosen)}", *words[:20]])

    def check_drawn(self, seed: int) -> None:
        """Fail unless the script and the layout of this number are equal to one process, or other in words."""
        chosen = self.kind.draw(seed)
        self.check(
            chosen, draw_layout(seed, chosen, left_out=self.kind.left_out), ("equal", "refused", "told", "no script")
        )

    def compare(self, ranks: list[dict[str, Any]], reference: dict[str, Any], chosen: Choices) -> list[str]:
        """Return every difference in words. Of a run that was resumed only what comes after it is compared."""
        relative, weights = self.kind.tolerances(chosen)
        lines = []
        for rank, outcome in enumerate(ranks):
            for name in sorted({*outcome["found"], *reference["found"]}):
                ours, theirs = outcome["found"].get(name), reference["found"].get(name)
                if self.kind.leaves_out(chosen, name, ""):
                    continue
                if ours is None or theirs is None:
                    lines.append(f"rank {rank}: {name}: only {'in one process' if ours is None else 'here'}")
                    continue
                for key in sorted({*ours, *theirs}):
                    if not UNEQUAL.search(key) and not self.kind.leaves_out(chosen, name, key):
                        pair = ours.get(key), theirs.get(key)
                        lines += _unequal(f"rank {rank}: {name}: {key}", *pair, relative, self.kind.size(key))
        steps = {len(outcome["gradient_keys"]) for outcome in ranks}
        expected = reference["gradient_keys"]
        if chosen.get("resumes"):
            expected = expected[-max(steps) :]
        elif steps != {len(expected)}:
            lines.append(f"steps {steps}, one process {len(expected)}")
        lines += key_differences([outcome["gradient_keys"] for outcome in ranks], expected)
        return lines + weight_differences(ranks[0]["folder"], reference["folder"], weights)

    def simplify(self, chosen: Choices, spec: str, kind: str) -> tuple[Choices, str]:
        """Take back one choice after another for as long as the script ends in the same way."""
        plain = self.kind.plain
        for name in sorted(name for name in chosen if chosen[name] != plain[name]):
            simpler = self.kind.fit({**chosen, name: plain[name]})
            if simpler != chosen and self.try_script(simpler, spec)[0] == kind:
                chosen = simpler
        for key in spec.split(","):
            simpler_spec = ",".join(other for other in spec.split(",") if other != key)
            if simpler_spec and axes(simpler_spec)["world"] > 1 and self.try_script(chosen, simpler_spec)[0] == kind:
                spec = simpler_spec
        return chosen, spec


def add_noise(folder: str, seed: int) -> None:
    """Change every weight of the files of a folder by the rounding of float32."""
    torch.manual_seed(seed)
    for file in Path(folder).rglob("*.safetensors"):
        weights = load_file(file)
        for weight in weights.values():
            if weight.is_floating_point():
                weight.mul_(1 + NOISE * torch.randn_like(weight))
        save_file(weights, file, {"format": "pt"})


def _split_difference(line: str) -> tuple[str, float]:
    """Return the name of what differs, without a rank, and by how much; infinity where a line has no numbers."""
    head, _, values = line.rpartition(": ")
    numbers = [float(number) for number in re.findall(r"-?\d+\.?\d*(?:e[+-]?\d+)?", values)]
    sizes = {1: numbers, 2: [abs(numbers[0] - numbers[-1])]} if numbers else {}
    return re.sub(r"^rank \d+: ", "", head), sizes.get(len(numbers), [math.inf])[0]


def _last_line(failure: RankFailure) -> str:
    return f"{failure.kind}: {failure.message.strip()[:400]}"


def _unequal(name: str, ours: Any, theirs: Any, relative: float, size: float) -> list[str]:
    numbers = all(isinstance(value, (int, float)) for value in (ours, theirs))
    if numbers and (ours == theirs or abs(ours - theirs) <= relative * max(abs(theirs), size)):
        return []
    if numbers and math.isnan(ours) and math.isnan(theirs):
        return []
    return [] if ours == theirs else [f"{name}: {ours!r}, one process {theirs!r}"]


def summarise(predictions: Any) -> dict[str, float]:
    """Numbers that change with any prediction and with the order of rows."""
    flat = torch.cat([torch.as_tensor(part).double().flatten() for part in _leaves(predictions)])
    weighed = flat * torch.linspace(0.5, 1.5, len(flat), dtype=flat.dtype)
    return {"sum": float(weighed.abs().sum()), "size": len(flat)}


def _leaves(parts: Any) -> list:
    return [leaf for part in parts for leaf in _leaves(part)] if isinstance(parts, (tuple, list)) else [parts]

"""Mixtures of experts over ranks of this machine: beside transformers' own expert parallelism, and a whole run.

    python benchmarks/experts.py [--steps 30] [--hidden 256] [--layers 4]      time and memory of a step, both
    python benchmarks/experts.py --curve docs/experts_balance.svg              300 steps, and how evenly tokens fall

Both libraries train the same model on the same forked processes: step times alternate between them, peak memory is of
a set of processes each. Only ratios mean anything.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import (
    AutoModelForCausalLM,
    MixtralConfig,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils.logging import disable_progress_bar

from tests.distributed import run, run_alone

ROWS, LENGTH, VOCABULARY, WARM = 8, 128, 2048, 3

#: Ranks, what transformers is asked for, and the spec.
CASES: list[tuple[int, dict[str, int], str]] = [
    (2, {"fsdp_size": 2, "ep_size": 2}, "dp_shard=2,ep=2"),
    (2, {"tp_size": 2, "ep_size": 2}, "tp=2,ep=2"),
    (4, {"fsdp_size": 4, "ep_size": 2}, "dp_shard=4,ep=2"),
    (4, {"fsdp_size": 4, "ep_size": 4}, "dp_shard=4,ep=4"),
]


@dataclass(frozen=True)
class Setting:
    """Size of the model and number of timed steps."""

    hidden: int
    layers: int
    steps: int

    def config(self) -> MixtralConfig:
        """A Mixtral of this size, with eight experts."""
        return MixtralConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.hidden,
            intermediate_size=2 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            num_local_experts=8,
            sliding_window=None,
            use_cache=False,
        )


# ---- beside transformers' own ---------------------------------------------------------------------------------------


class Steps:
    """One library's model, and a step of it."""

    def __init__(self, model: Any, data_ranks: int, place: int) -> None:
        self.model = model.train()
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
        self.tokens = tokens.chunk(data_ranks)[place]

    def __call__(self) -> float:
        """Forward, backward and update; the loss."""
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def theirs(folder: str, sizes: dict[str, int]) -> Steps:
    """transformers' expert parallelism, whose experts move tokens by all-to-all."""
    import torch.distributed as dist
    from transformers.distributed.configuration_utils import DistributedConfig

    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))
    data_ranks = sizes.get("fsdp_size", 1)
    return Steps(model, data_ranks, dist.get_rank() * data_ranks // dist.get_world_size())


def ours(folder: str, spec: str) -> Steps:
    """The same under a spec."""
    from hf_parallel.hooks import activation

    activation.activate(spec, source="benchmark")
    model = AutoModelForCausalLM.from_pretrained(folder)
    mesh = model._hf_parallel.mesh
    return Steps(model, mesh.data_size, mesh.data_rank)


def alternate(setting: Setting, folder: str, sizes: dict[str, int], spec: str) -> tuple[float, float, float]:
    """Median seconds of a step of theirs and of ours, taken in turns, and how far losses are apart at most."""
    both = [theirs(folder, sizes), ours(folder, spec)]
    times: list[list[float]] = [[], []]
    gap = 0.0
    for number in range(WARM + setting.steps):
        losses = []
        for steps, taken in zip(both, times, strict=True):
            start = time.perf_counter()
            losses.append(steps())
            taken += [time.perf_counter() - start] * (number >= WARM)
        gap = max(gap, abs(losses[0] - losses[1]))
    return statistics.median(times[0]), statistics.median(times[1]), gap


def peak(make: Any, *arguments: Any) -> int:
    """Bytes that training takes at most, beside what the process had before it made its model."""
    gc.collect()
    before = _status("VmRSS")
    steps = make(*arguments)
    steps()
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what reading the weights has freed is not theirs nor ours
    Path("/proc/self/clear_refs").write_text("5")  # from here on, not while a file is read
    for _ in range(3):
        steps()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024


def beside(setting: Setting) -> None:
    """The table."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(setting.config()).save_pretrained(folder)
        print(f"{'ranks':5}  {'layout':36}{'theirs':>9}{'ours':>9}{'time':>7}{'memory':>9}   losses apart")
        for ranks, sizes, spec in CASES:
            found = run(alternate, ranks, setting, folder, sizes, spec, timeout=300)
            mine, other = max(ours for _, ours, _ in found), max(theirs for theirs, _, _ in found)
            most = [max(run(peak, ranks, theirs, folder, sizes)), max(run(peak, ranks, ours, folder, spec))]
            print(
                f"{ranks:5}  {spec:36}{other * 1e3:7.0f}ms{mine * 1e3:7.0f}ms{mine / other:7.2f}"
                f"{most[1] / most[0]:9.2f}   {max(gap for *_, gap in found):.1e}",
                flush=True,
            )


# ---- a whole run ----------------------------------------------------------------------------------------------------

SPEC, RANKS, RUN_STEPS, EVERY, BATCH = "dp_shard=4,ep=2", 4, 300, 5, 16
TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "sliding_window": None,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.1,
    "initializer_range": 0.1,
    "use_cache": False,
}


class Kept(TrainerCallback):
    """What Trainer logs while it trains."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "loss" in logs:
            self.logs.append({"step": state.global_step, **logs})


def rows() -> list[dict[str, torch.Tensor]]:
    """Rows in which what follows a token depends on it, with one choice in five at random."""
    generator = torch.Generator().manual_seed(3)
    after = torch.randint(0, TINY["vocab_size"], (TINY["vocab_size"], 2), generator=generator)
    found = []
    for _ in range(BATCH * RUN_STEPS):
        tokens = torch.randint(0, TINY["vocab_size"], (25,), generator=generator)
        for place in (tokens[1:] % 5 > 0).nonzero().flatten().tolist():
            tokens[place + 1] = after[tokens[place], int(tokens[place - 1]) % 2]
        found.append({"input_ids": tokens, "labels": tokens})
    return found


def trained(folder: str, out: str, spec: str | None) -> list[dict[str, float]]:
    """The logs of an ordinary script."""
    ranks = 1
    if spec is not None:
        from hf_parallel.hooks import activation

        activation.activate(spec, source="benchmark")
        ranks = RANKS
    arguments = TrainingArguments(
        out,
        max_steps=RUN_STEPS,
        per_device_train_batch_size=BATCH // ranks,
        learning_rate=3e-3,
        logging_steps=EVERY,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )
    kept = Kept()
    trainer = Trainer(AutoModelForCausalLM.from_pretrained(folder), arguments, train_dataset=rows(), callbacks=[kept])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return kept.logs


def whole_run(path: str) -> None:
    """Train alone and over ranks, say where both end, and draw losses and balance."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(MixtralConfig(**TINY)).save_pretrained(folder)
        alone = run_alone(trained, folder, f"{folder}/one", None)
        start = time.perf_counter()
        logs = run(trained, RANKS, folder, f"{folder}/many", SPEC, init=False, timeout=500)[0]
    pairs = [(ours["loss"], theirs["loss"]) for ours, theirs in zip(logs, alone, strict=True)]
    ours, theirs = (statistics.mean(side[-10:]) for side in zip(*pairs, strict=True))
    print(f"{RUN_STEPS} steps under {SPEC} in {time.perf_counter() - start:.0f} s")
    apart = abs(ours / theirs - 1)
    print(f"loss of the last {10 * EVERY} steps: {ours:.4f}, of one process {theirs:.4f}, apart {apart:.1e}")
    print(f"largest gap of all logged losses: {max(abs(a / b - 1) for a, b in pairs):.1e}")
    first, last = logs[0], logs[-1]
    print(f"busiest expert over the mean: {first['expert_load']:.2f} at first, {last['expert_load']:.2f} at last")
    Path(path).write_text(picture(logs, alone), encoding="utf-8")


_WIDTH, _HEIGHT, _LEFT, _GAP, _COLOURS = 720, 190, 60, 70, ("#1f4e8c", "#d9822b", "#5b8fd6")


def picture(logs: list[dict[str, float]], alone: list[dict[str, float]]) -> str:
    """Two plots, one below the other, as SVG."""
    losses = {f"loss, {SPEC}": [log["loss"] for log in logs], "loss, one process": [log["loss"] for log in alone]}
    balance = {
        "busiest expert / mean, worst layer": [log["expert_load_worst"] for log in logs],
        "the same, mean of layers": [log["expert_load"] for log in logs],
    }
    height = 2 * (_HEIGHT + _GAP) + 30
    steps = [log["step"] for log in logs]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        'font-family="system-ui, Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        *_plot(losses, steps, 40),
        *_plot(balance, steps, 40 + _HEIGHT + _GAP),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _plot(curves: dict[str, list[float]], steps: list[float], top: float) -> list[str]:
    low, high = min(map(min, curves.values())), max(map(max, curves.values()))
    wide = _WIDTH - _LEFT - 30

    def at(step: float, value: float) -> str:
        return f"{_LEFT + wide * step / steps[-1]:.1f} {top + _HEIGHT * (high - value) / (high - low):.1f}"

    lines = []
    for part in range(5):
        value = low + (high - low) * part / 4
        lines.append(f'<path d="M{at(0, value)}L{at(steps[-1], value)}" stroke="#d3d9e0"/>')
        x, y = at(0, value).split()
        lines.append(f'<text x="{float(x) - 8}" y="{float(y) + 4:.1f}" text-anchor="end">{value:.2f}</text>')
        x = at(steps[-1] * part / 4, low).split()[0]
        lines.append(f'<text x="{x}" y="{top + _HEIGHT + 18}" text-anchor="middle">{steps[-1] * part / 4:.0f}</text>')
    for number, (name, values) in enumerate(curves.items()):
        points = "L".join(at(step, value) for step, value in zip(steps, values, strict=True))
        dashes = ' stroke-dasharray="5 4"' if number else ""
        lines.append(f'<path d="M{points}" fill="none" stroke="{_COLOURS[number]}" stroke-width="2"{dashes}/>')
        lines.append(f'<text x="{_LEFT + 250 * number}" y="{top - 12}" fill="{_COLOURS[number]}">{name}</text>')
    return lines


def main() -> None:
    """The table, or the run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--curve", help="draw 300 steps into this .svg")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    disable_progress_bar()
    if arguments.curve:
        whole_run(arguments.curve)
        return
    beside(Setting(arguments.hidden, arguments.layers, arguments.steps))


if __name__ == "__main__":
    main()

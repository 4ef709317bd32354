"""Tensor parallelism: hf_parallel beside transformers' own, in the same two processes, in turns.

    python benchmarks/tensor_parallel.py [--steps 12] [--hidden 64 256 1024] [--rows 2] [--length 128]

All models are Llamas with the same weights. Ours comes twice: with sequence parallelism, which is the default, and
without, which calls fewer collectives for the same bytes and keeps more. Prints, per width, of all three and of ours /
theirs

    cpu per layer    CPU time of forward and backward that one more layer costs the thread that calls them: what other
                     work on the machine disturbs least. Steps with all layers less steps with half of them.
    with gloo        the same of all threads of a process: gloo moves and adds bytes in threads of its own
    step             duration of forward, backward and SGD; only its ratio means anything
    collectives      calls in one step, however made (see tests/counting.py)
    sent             bytes a rank sends in one step by rings: all-reduce 2 (n - 1) / n of its tensor, all-gather and
                     reduce-scatter (n - 1) / n of the whole one. Theirs gathers the logits, ours reduces the loss.
    saved            bytes autograd keeps at the end of the forward, without parameters

Medians over steps and the mean of both ranks. On a CPU, products of 2 x 128 tokens rule from a width of 256 on; what
launching costs shows with `--rows 1 --length 32`.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils.logging import disable_progress_bar

from tests.activations import SavedBytes
from tests.counting import CountCollectives
from tests.distributed import run

RANKS, LAYERS, VOCABULARY = 2, 6, 4096
SPECS = (f"tp={RANKS}", f"tp={RANKS},sequence_parallel=false")
Figures = dict[str, float]


@dataclass(frozen=True)
class Batch:
    """What every step trains on."""

    rows: int
    length: int


@dataclass(frozen=True)
class Timed:
    """One step: seconds on the clock with SGD, CPU seconds of forward and backward in one and in all threads."""

    seconds: float
    cpu: float
    cpu_of_all: float


class Side:
    """One of the models, and what its steps have taken by number of layers."""

    def __init__(self, model: Any, batch: Batch) -> None:
        self.model = model.train()
        self.ids = torch.arange(batch.rows * batch.length).view(batch.rows, batch.length) % VOCABULARY
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.timed: dict[int, list[Timed]] = defaultdict(list)

    def forward(self) -> torch.Tensor:
        """The loss of a batch that is the same for all."""
        return self.model(input_ids=self.ids, labels=self.ids).loss

    def step(self, layers: int) -> Timed:
        """Train one step on the first `layers` layers."""
        self.model.config.num_hidden_layers = layers
        dist.barrier()
        start, cpu, cpu_of_all = time.perf_counter(), time.thread_time(), time.process_time()
        self.forward().backward()
        cpu, cpu_of_all = time.thread_time() - cpu, time.process_time() - cpu_of_all
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Timed(time.perf_counter() - start, cpu, cpu_of_all)

    def median(self, name: str, layers: int) -> float:
        """Of what was timed, over the steps with so many layers."""
        return statistics.median(getattr(timed, name) for timed in self.timed[layers])

    def per_layer(self, name: str) -> float:
        """What one more layer adds."""
        return (self.median(name, LAYERS) - self.median(name, LAYERS // 2)) / (LAYERS - LAYERS // 2)

    def figures(self) -> Figures:
        """What is printed of this side, on this rank."""
        saved = SavedBytes(list(self.model.parameters()))
        with CountCollectives() as counted:
            with saved:
                loss = self.forward()
            loss.backward()
        return {
            "cpu per layer, ms": self.per_layer("cpu") * 1e3,
            "with gloo, ms": self.per_layer("cpu_of_all") * 1e3,
            "step, ms": self.median("seconds", LAYERS) * 1e3,
            "collectives": sum(counted.counts.values()),
            "sent, kB": counted.sent / 1e3,
            "saved, kB": saved.total / 1e3,
        }


def compare(folder: str, steps: int, batch: Batch) -> list[Figures]:
    """Theirs, then ours under each spec, of the model in `folder`, measured in turns."""
    from transformers.distributed import DistributedConfig

    from hf_parallel import parallelize

    theirs = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=RANKS))
    ours = [parallelize(AutoModelForCausalLM.from_pretrained(folder), spec) for spec in SPECS]
    sides = [Side(model, batch) for model in (theirs, *ours)]
    for warm in (True, *[False] * steps):
        for layers in (LAYERS // 2, LAYERS):
            for side in sides:
                timed = side.step(layers)
                if not warm:
                    side.timed[layers].append(timed)
    return [side.figures() for side in sides]


def config(hidden: int) -> LlamaConfig:
    """A Llama of this width."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )


def report(hidden: int, steps: int, batch: Batch) -> None:
    """Print the lines of one width."""
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config(hidden)).save_pretrained(folder)
        by_rank = run(compare, RANKS, folder, steps, batch, timeout=1200)
    theirs, *ours = [mean(list(of_ranks)) for of_ranks in zip(*by_rank, strict=True)]
    for key, base in theirs.items():
        cells = "".join(f"{side[key]:14.1f}{side[key] / base:8.2f}" for side in ours)
        print(f"{hidden:6}  {key:20}{base:12.1f}{cells}", flush=True)


def mean(ranks: list[Figures]) -> Figures:
    """Of each figure."""
    return {key: statistics.mean(figures[key] for figures in ranks) for key in ranks[0]}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--hidden", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=128)
    arguments = parser.parse_args()
    disable_progress_bar()
    print(f"{'hidden':6}  {'':20}{'theirs':>12}{'ours':>14}{'ratio':>8}{'ours, no sp':>14}{'ratio':>8}")
    for hidden in arguments.hidden:
        report(hidden, arguments.steps, Batch(arguments.rows, arguments.length))


if __name__ == "__main__":
    main()

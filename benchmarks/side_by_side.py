"""The same training step under plain transformers and under hf_parallel, on this machine, side by side.

    python benchmarks/side_by_side.py [--steps 12] [--hidden 256] [--layers 4]

Prints, per layout, the median time of a step (forward, backward, SGD) of both, their ratio, and how many
collectives one step calls. Only ratios mean anything: absolute times depend on the machine. Plain transformers has no
trainable pipeline, so that row is compared with one process doing the whole batch.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.counting import CountCollectives
from tests.distributed import run

ROWS, LENGTH = 8, 128


@dataclass(frozen=True)
class Setting:
    """Size of the model and number of timed steps."""

    hidden: int
    layers: int
    steps: int

    def config(self) -> LlamaConfig:
        """A Llama of this size."""
        return LlamaConfig(
            vocab_size=4096,
            hidden_size=self.hidden,
            intermediate_size=4 * self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            use_cache=False,
        )


def plain(setting: Setting, folder: str, **sizes: int) -> tuple[float, str]:
    """transformers' own parallelism, or one process if no size is given."""
    if not sizes:
        return measure(setting, AutoModelForCausalLM.from_pretrained(folder), 1)
    from transformers.distributed.configuration_utils import DistributedConfig

    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(**sizes))
    return measure(setting, model, sizes.get("fsdp_size", 1))


def ours(setting: Setting, folder: str, spec: str) -> tuple[float, str]:
    """The same under a spec."""
    from hf_parallel.hooks import activation

    activation.activate(spec, source="benchmark")
    model = AutoModelForCausalLM.from_pretrained(folder)
    return measure(setting, model, model._hf_parallel.mesh.data_size)


def measure(setting: Setting, model: Any, data_ranks: int) -> tuple[float, str]:
    """Median seconds of a step, and collectives in one step."""
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ids = torch.arange(ROWS // data_ranks * LENGTH).view(-1, LENGTH) % 4096

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with CountCollectives() as counted:
        step()
    times = []
    for _ in range(setting.steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return statistics.median(times), str(sum(counted.counts.values()))


CASES: list[tuple[str, int, dict[str, int], str]] = [
    ("ZeRO-3 over 2", 2, {"fsdp_size": 2}, "dp_shard=2"),
    ("tensor parallel over 2", 2, {"tp_size": 2}, "tp=2"),
    ("pipeline over 2 (plain: 1 process)", 2, {}, "pp=2"),
]


def main() -> None:
    """Run all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    setting = Setting(**vars(parser.parse_args()))
    torch.set_num_threads(1)
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(setting.config()).save_pretrained(folder)
        print(f"{'':36}{'plain':>10}{'ours':>10}{'ratio':>8}   collectives plain / ours")
        for name, ranks, sizes, spec in CASES:
            theirs = run(plain_rank, ranks if sizes else 1, setting, folder, sizes, init=bool(sizes))[0]
            mine = run(ours, ranks, setting, folder, spec, init=False)[0]
            ratio = mine[0] / theirs[0]
            print(f"{name:36}{theirs[0] * 1e3:8.0f}ms{mine[0] * 1e3:8.0f}ms{ratio:8.2f}   {theirs[1]} / {mine[1]}")


def plain_rank(setting: Setting, folder: str, sizes: dict[str, int]) -> tuple[float, str]:
    """`plain` with its sizes as one argument, as the ranks are started."""
    return plain(setting, folder, **sizes)


if __name__ == "__main__":
    main()

"""ZeRO's stages beside accelerate's own FSDP2 and torch's DDP: both on the same processes, step by step in turns.

    python -m benchmarks.zero_side_by_side [--steps 12] [--ranks 2] [--hidden 256] [--layers 4]

Prints, for each stage, the median seconds of a step (forward, backward, SGD) of both and the median of their ratios,
each of two steps that followed each other. Only ratios mean anything: a machine that is busy is so for both. Stage 0
stands beside DDP, 2 and 3 beside `fully_shard` as accelerate's FullyShardedDataParallelPlugin calls it with
reshard_after_forward False and True; stage 1, which accelerate has not, beside the same as 2.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.distributed import run

ROWS, LENGTH, VOCABULARY = 2, 64, 4096
Step = Callable[[], None]


def _model(hidden: int, layers: int) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 4 * hidden}
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "use_cache": False}
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads, num_hidden_layers=layers)).train()


def _step(model: nn.Module) -> Step:
    """A step of `model` on this rank's rows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    rows = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) + 7 * torch.distributed.get_rank()
    tokens = rows % VOCABULARY

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _theirs(model: nn.Module, stage: int) -> nn.Module:
    """What accelerate makes of a model, at the stage that it has."""
    if stage == 0:
        return nn.parallel.DistributedDataParallel(model)
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model
    from accelerate.utils.dataclasses import DistributedType

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        reshard_after_forward=stage == 3,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )
    accelerator = Accelerator(cpu=True)
    accelerator.state.fsdp_plugin = plugin  # accelerate has FSDP on accelerators only: its own call, past that check
    accelerator.state.distributed_type = DistributedType.FSDP
    return fsdp2_prepare_model(accelerator, model)


def _rank(stage: int, hidden: int, layers: int, steps: int) -> tuple[float, float, float]:
    """Seconds of a step of theirs and of ours, and the ratio."""
    from hf_parallel import parallelize

    ours = _step(parallelize(_model(hidden, layers), f"zero_stage={stage}"))
    theirs = _step(_theirs(_model(hidden, layers), stage))
    pairs = []
    for number in range(steps + 2):
        turns = [theirs, ours] if number % 2 else [ours, theirs]
        seconds = {turn: _seconds(turn) for turn in turns}
        pairs.append((seconds[theirs], seconds[ours]))
    pairs = pairs[2:]
    others, own = zip(*pairs, strict=True)
    return statistics.median(others), statistics.median(own), statistics.median(b / a for a, b in pairs)


def _seconds(step: Step) -> float:
    torch.distributed.barrier()
    begin = time.perf_counter()
    step()
    torch.distributed.barrier()
    return time.perf_counter() - begin


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("steps", 12), ("ranks", 2), ("hidden", 256), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    print(f"{'':10}{'theirs':>10}{'ours':>10}{'ratio':>8}")
    for stage in range(4):
        theirs, ours, ratio = run(_rank, asked.ranks, stage, asked.hidden, asked.layers, asked.steps)[0]
        print(f"stage {stage:<4}{theirs * 1e3:8.0f}ms{ours * 1e3:8.0f}ms{ratio:8.2f}", flush=True)


if __name__ == "__main__":
    main()

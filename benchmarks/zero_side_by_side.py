"""ZeRO's stages beside accelerate's own FSDP2, torch's DDP and DeepSpeed, on the same processes in turns.

    python -m benchmarks.zero_side_by_side [--steps 12] [--ranks 2] [--hidden 256] [--layers 4]

Prints, for each stage, the median seconds of a step (forward, backward, SGD), and the median ratio of ours to it, each
of two steps of one round. Only ratios mean anything: a machine that is busy is so for all. DeepSpeed takes part where
it is installed. Stage 0 stands beside DDP, 2 and 3 beside `fully_shard` as accelerate's FullyShardedDataParallelPlugin
calls it with reshard_after_forward False and True; stage 1, which accelerate has not, beside the same as 2.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import sys
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
_WARM = 5  # rounds: what is compared between ranks in the first steps, and what allocators learn


def _model(hidden: int, layers: int) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": hidden, "intermediate_size": 4 * hidden}
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "use_cache": False}
    return AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads, num_hidden_layers=layers)).train()


def _tokens() -> torch.Tensor:
    """This rank's rows."""
    rows = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) + 7 * torch.distributed.get_rank()
    return rows % VOCABULARY


def _step(model: nn.Module) -> Step:
    """A step of `model` on this rank's rows."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        model(input_ids=_tokens(), labels=_tokens()).loss.backward()
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


def _deepspeeds(model: nn.Module, stage: int) -> Step:
    """A step by DeepSpeed's engine, whose kernels for CPUs are left out: torch's SGD, and gloo."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    zero = {"zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = {"train_micro_batch_size_per_gpu": ROWS, **zero}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)

    def step() -> None:
        engine.backward(engine(input_ids=_tokens(), labels=_tokens()).loss)
        engine.step()

    return step


def _rank(stage: int, hidden: int, layers: int, steps: int) -> dict[str, tuple[float, float]]:
    """Of each: median seconds of a step, and the ratio of ours to it."""
    from hf_parallel import parallelize

    made = {
        "ours": lambda model: _step(parallelize(model, f"zero_stage={stage}")),
        "accelerate": lambda model: _step(_theirs(model, stage)),
    }
    if importlib.util.find_spec("deepspeed"):
        made["deepspeed"] = lambda model: _deepspeeds(model, stage)
    each = {name: make(_model(hidden, layers)) for name, make in made.items()}
    rounds = []
    for number in range(steps + _WARM):
        turns = list(each)[number % len(each) :] + list(each)[: number % len(each)]
        rounds.append({name: _seconds(each[name]) for name in turns})
    rounds = rounds[_WARM:]
    return {
        name: (statistics.median(r[name] for r in rounds), statistics.median(r["ours"] / r[name] for r in rounds))
        for name in each
    }


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
    for stage in range(4):
        found = run(_rank, asked.ranks, stage, asked.hidden, asked.layers, asked.steps, timeout=400)[0]
        cells = [f"{name} {seconds * 1e3:5.0f} ms (ours x {ratio:.2f})" for name, (seconds, ratio) in found.items()]
        print(f"stage {stage}   " + "   ".join(cells), flush=True)


if __name__ == "__main__":
    main()

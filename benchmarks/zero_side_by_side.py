"""ZeRO's stages beside accelerate's own FSDP2, torch's DDP and DeepSpeed, on the same processes in turns.

    python -m benchmarks.zero_side_by_side [--steps 12] [--ranks 2] [--hidden 256] [--layers 4] [--monitor basic]
                                           [--stages 0 1 2 3]

Prints, for each stage, the median seconds of a step (forward, backward, SGD), and the median ratio of ours to it, each
of two steps of one round; in brackets the same of the processor time that the process of rank 0 used. Only ratios mean
anything: a machine that is busy is so for all. Ours are watched, as by default; nothing of this package is on while
the others step. DeepSpeed takes part where it is installed. Stage 0 stands beside DDP, 2 and 3 beside `fully_shard` as
accelerate's FullyShardedDataParallelPlugin calls it with reshard_after_forward False and True; stage 1, which
accelerate has not, beside the same as 2.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from transformers import AutoModelForCausalLM, LlamaConfig

import hf_parallel.hooks.patches  # noqa: F401 - once, before the ranks are forked
from hf_parallel import parallelize
from hf_parallel.ask.session import of_process
from hf_parallel.hooks import monitoring
from hf_parallel.monitor.meter import COMPUTE
from hf_parallel.ranks import observed
from tests.distributed import run

ROWS, LENGTH, VOCABULARY = 2, 64, 4096
Step = Callable[[], None]
_WARM = 5  # rounds: what is compared between ranks in the first steps, and what allocators learn


class Times(NamedTuple):
    """Of a step: seconds, and those of the process's processor time."""

    wall: float
    cpu: float


class Figures(NamedTuple):
    """Medians over steps, and of the ratios of ours to them."""

    median: Times
    ratio: Times


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


def _ours(model: nn.Module, stage: int, monitor: str) -> Step:
    """A step that is watched as one of a loop."""
    model = parallelize(model, f"zero_stage={stage},monitor={monitor}")
    step, watched = _step(model), monitoring.watch_model(model)
    if watched is None:
        return step

    def around() -> None:
        watched.meter.begin("benchmark")
        with watched.meter.phase(COMPUTE):
            step()
        watched.meter.end("benchmark")

    return around


@contextlib.contextmanager
def _without_ours() -> Iterator[None]:
    """In here nobody listens to collectives, and optimizers step as torch makes them."""
    listeners = of_process(observed.Listening).listeners
    hooks: Any = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    former = [dict(kind) for kind in hooks]
    for listener in listeners:
        observed.unlisten(listener)
    for kind in hooks:
        kind.clear()
    yield
    for kind, known in zip(hooks, former, strict=True):
        kind.update(known)
    for listener in listeners:
        observed.listen(listener)


def _rank(stage: int, hidden: int, layers: int, steps: int, monitor: str = "basic") -> dict[str, Figures]:
    """Of each: a step's times, and the ratio of ours to it."""
    made: dict[str, Callable[[nn.Module], Step]] = {
        "ours": lambda model: _ours(model, stage, monitor),
        "accelerate": lambda model: _step(_theirs(model, stage)),
    }
    if importlib.util.find_spec("deepspeed"):
        made["deepspeed"] = lambda model: _deepspeeds(model, stage)
    each = {name: make(_model(hidden, layers)) for name, make in made.items()}
    rounds = []
    for number in range(steps + _WARM):
        turns = list(each)[number % len(each) :] + list(each)[: number % len(each)]
        rounds.append({name: _times(each[name], name == "ours") for name in turns})
    rounds = rounds[_WARM:]
    return {
        name: Figures(
            Times(*(statistics.median(r[name][of] for r in rounds) for of in range(2))),
            Times(*(statistics.median(r["ours"][of] / r[name][of] for r in rounds) for of in range(2))),
        )
        for name in each
    }


def _times(step: Step, ours: bool) -> Times:
    with contextlib.nullcontext() if ours else _without_ours():
        torch.distributed.barrier()
        begin = time.perf_counter(), time.process_time()
        step()
        cpu = time.process_time() - begin[1]
        torch.distributed.barrier()
        return Times(time.perf_counter() - begin[0], cpu)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("steps", 12), ("ranks", 2), ("hidden", 256), ("layers", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--monitor", default="basic", choices=("off", "basic", "full"))
    parser.add_argument("--stages", type=int, nargs="+", default=range(4))
    asked = parser.parse_args()
    for stage in asked.stages:
        sizes = stage, asked.hidden, asked.layers, asked.steps, asked.monitor
        found = run(_rank, asked.ranks, *sizes, timeout=400)[0]
        print(f"stage {stage}   " + "   ".join(_cell(name, one) for name, one in found.items()), flush=True)


def _cell(name: str, found: Figures) -> str:
    (wall, cpu), ratio = found.median, found.ratio
    return f"{name} {wall * 1e3:.0f} ms ({cpu * 1e3:.0f}), ours x {ratio.wall:.2f} ({ratio.cpu:.2f})"


if __name__ == "__main__":
    main()

"""Context parallelism on this machine: what a limit of memory lets train, and how long steps take.

    python benchmarks/context.py memory [--length 16384] [--ranks 4] [--limit 500]
    python benchmarks/context.py speed [--length 8192] [--ranks 2] [--steps 6] [--device cuda]
    python benchmarks/context.py plan

`memory` trains two steps of a row in one process without a limit, in one process with it, and on `--ranks` processes
of which each has it: RLIMIT_DATA, so many MiB above what the process has before there is a model. `speed` takes the
seconds of steps of one process, of a ring, of all keys gathered at once and of Ulysses, turn by turn; on CUDA also
those of torch's own `context_parallel`. Only ratios mean anything. `plan` prints the memory and the time that the
planner predicts for an 8B on H100s: rows of 128 k tokens on 8 GPUs, of 1 M on 64.
"""

from __future__ import annotations

import argparse
import functools
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

from tests.distributed import RankFailure, run, run_alone

MIB = 2**20
TORCHS = "torch's context_parallel"


def model(length: int, hidden: int, layers: int, device: str | torch.device = "cpu") -> Any:
    """A Llama of this size, the same in every process."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_hidden_layers": layers, "vocab_size": 515}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": length}
    built = LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False)).to(device).train()
    return built.bfloat16() if torch.device(device).type == "cuda" else built  # as flash kernels want it


# ---- memory ---------------------------------------------------------------------------------------------------------


def data_bytes() -> int:
    """What RLIMIT_DATA counts of this process: memory of its own that it may write to."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData"))


def limited_losses(length: int, limit: int | None, spec: str | None) -> tuple[list[float], int]:
    """Losses of two SGD steps with at most `limit` MiB more than there is at the start, and the most there was.

    Raises:
        RuntimeError: an allocation beyond the limit.
    """
    import hf_parallel

    before = data_bytes()
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (before + limit * MIB, resource.RLIM_INFINITY))
    built, most, losses = model(length, 64, 2), 0, []
    if spec is not None:
        hf_parallel.parallelize(built, spec)
    optimizer = torch.optim.SGD(built.parameters(), lr=0.1)
    ids = torch.arange(length)[None] * 7 % 515
    for _ in range(2):
        loss = built(input_ids=ids, labels=ids).loss
        most = max(most, data_bytes() - before)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, most // MIB


def memory(length: int, ranks: int, limit: int) -> dict[str, list[float] | str]:
    """Losses by run, or how it failed."""
    found: dict[str, list[float] | str] = {}
    spec = f"cp={ranks}"
    runs: dict[str, Callable[[], Any]] = {
        "one process, no limit": lambda: [run_alone(limited_losses, length, None, None, timeout=500)],
        f"one process, {limit} MiB": lambda: [run_alone(limited_losses, length, limit, None, timeout=500)],
        f"{spec}, {limit} MiB each": lambda: run(limited_losses, ranks, length, limit, spec, timeout=500),
    }
    for name, call in runs.items():
        try:
            outcomes = call()
            found[name] = outcomes[0][0]
            print(f"{name}: losses {outcomes[0][0]}, {max(most for _, most in outcomes)} MiB after the forward")
        except RankFailure as failure:
            found[name] = failure.message
            print(f"{name}: {failure.kind}: {failure.message.splitlines()[0][:160]}")
    return found


# ---- speed ----------------------------------------------------------------------------------------------------------


def seconds(built: Any, ids: torch.Tensor) -> tuple[float, float]:
    """Of a forward and a backward, by the clock and of this process alone."""
    started, own = time.perf_counter(), time.process_time()
    built(input_ids=ids, labels=ids).loss.backward()
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started, time.process_time() - own


def torchs_own(built: Any, ids: torch.Tensor) -> tuple[float, float]:
    """The same under torch's `context_parallel`, which runs on CUDA only: a ring over a causal row without packs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    labels = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    own, labels = ids.clone(), labels.clone()
    started, busy = time.perf_counter(), time.process_time()
    with context_parallel(mesh, buffers=[own, labels, positions], buffer_seq_dims=[1, 1, 1]):
        built(input_ids=own, shift_labels=labels, labels=labels, position_ids=positions).loss.backward()
    torch.cuda.synchronize()
    return time.perf_counter() - started, time.process_time() - busy


def timed(
    length: int, steps: int, device: str, ways: Sequence[str], hidden: int = 128, layers: int = 2
) -> dict[str, list[tuple[float, float]]]:
    """Return the seconds of the steps of each way on this rank, one after the other in turn; the first warms up.

    Args:
        ways: values of `context_parallel`, or `TORCHS` alone: should it fail on one rank, no other way may follow, as
            ranks would disagree about collectives.
    """
    import hf_parallel
    from hf_parallel.apply.parallelize import choose_default_device

    place = choose_default_device() if device == "cuda" else torch.device(device)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    ids = torch.arange(length, device=place)[None] * 7 % 515
    made = functools.partial(model, length, hidden, layers, place)
    calls: dict[str, Callable[[], tuple[float, float]]] = {}
    if TORCHS not in ways:
        calls["one process"] = functools.partial(seconds, made(), ids)
    for way in ways:
        if way == TORCHS:
            calls[way] = functools.partial(torchs_own, made(), ids)
            continue
        spec = f"cp={dist.get_world_size()},context_parallel={way}"
        calls[way] = functools.partial(seconds, hf_parallel.parallelize(made(), spec), ids)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(steps + 1):
        for name in calls:
            dist.barrier()
            if name != "one process" or dist.get_rank() == 0:
                found[name].append(calls[name]())
    return {name: times[1:] for name, times in found.items()}


def speed(length: int, ranks: int, steps: int, device: str) -> None:
    """Print medians of the slowest rank, and their ratios to one process and to all keys gathered at once."""
    found = run(timed, ranks, length, steps, device, ("ring", "allgather", "ulysses"), timeout=580)
    if device == "cuda":
        try:
            more = run(timed, ranks, length, steps, device, (TORCHS,), timeout=580)
            found = [{**own, **others} for own, others in zip(found, more, strict=True)]
        except RankFailure as failure:
            print(f"{TORCHS}: {failure.message.splitlines()[0]}")
    rows = {}
    for name in found[0]:
        steps_of = [rank[name] for rank in found if rank[name]]
        clocks = [max(rank[step][0] for rank in steps_of) for step in range(steps)]
        own = [max(rank[step][1] for rank in steps_of) for step in range(steps)]
        rows[name] = statistics.median(clocks), min(clocks), statistics.median(own)
    print(f"{length} tokens, {ranks} processes, {steps} steps each in turn; seconds of a forward and a backward")
    print("| | median | least | of the process | / one process | / allgather |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, row in rows.items():
        others = (rows[other] for other in ("one process", "allgather"))
        ratios = [f"{row[0] / other[0]:.2f} ({row[2] / other[2]:.2f})" for other in others]
        print("|", " | ".join([name, *(f"{value:.2f}" for value in row), *ratios]), "|")


# ---- plan -----------------------------------------------------------------------------------------------------------

LLAMA_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336, "vocab": 128256}


def plan() -> None:
    """Print the planner's memory table, in GiB per GPU."""
    from hf_parallel.planner.candidates import Goal, choose_context_of, make_config
    from hf_parallel.planner.choices import predict_choice
    from hf_parallel.planner.hardware import make_cluster
    from hf_parallel.planner.shape import shape_of

    printed: list[str] = []
    for gpus, length in ((8, 131072), (64, 1048576)):
        goal = Goal(shape_of(LLAMA_8B), make_cluster("h100-80gb", gpus), length, 1)
        for way in ("ring", "ulysses" if gpus == 8 else "hybrid:8", "auto"):
            sizes = {"cp_size": gpus, "dp_shard_size": 1, "context_parallel": way}
            config = make_config(**sizes, activation_checkpointing="full")
            found = predict_choice(goal, config, 1)
            parts = found.prediction.breakdown.memory
            if not printed:
                print("|", " | ".join(["", *parts, "all", "seconds per step"]), "|")
                print("|", " | ".join(["---"] * (len(parts) + 3)), "|")
            taken = f": {choose_context_of(config, goal, 1)}" if way == "auto" else ""
            name = f"{length // 1024} k on {gpus}, {way}{taken}"
            printed.append(name)
            values = [*parts.values(), found.prediction.memory_gib, found.prediction.step_time_s]
            print("|", " | ".join([name, *(f"{value:.1f}" for value in values)]), "|")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["memory", "speed", "plan"])
    parser.add_argument("--length", type=int)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--limit", type=int, default=500, help="MiB")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    if given.what == "plan":
        plan()
    elif given.what == "memory":
        memory(given.length or 16384, given.ranks or 4, given.limit)
    else:
        speed(given.length or 8192, given.ranks or 2, given.steps, given.device)


if __name__ == "__main__":
    main()

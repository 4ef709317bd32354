"""Two hosts on a slow link, two processes each: seconds per step of every way to spread a model over them.

    python -m benchmarks.slow_network [--rates 100 1000] [--steps 3]

The hosts are network namespaces joined by a pair of virtual cards, which `tc` slows down to so many Mbit/s in each
direction: needs root and iproute2, and says so where they are missing. All layouts run after each other in the same
processes, so that their ratios do not depend on the machine; beside each stands what the planner predicts for it from
the link's speed and from the CPU's seconds that one process takes alone. Fails if at 100 Mbit/s ZeRO++ is not 5 times,
or HSDP 2.5 times, as fast as plain ZeRO-3.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

_SHARDS = "dp_shard=4"
_NEAR = f"{_SHARDS},hierarchical_shard=2"
LAYOUTS = {
    "ZeRO-3": _SHARDS,
    "ZeRO-2": f"{_SHARDS},zero_stage=2",
    "HSDP": "dp_replicate=2,dp_shard=2",
    "hpZ": _NEAR,
    "qwZ": f"{_SHARDS},quantize_weights=int8",
    "qgZ": f"{_SHARDS},quantize_gradients=int4",
    "ZeRO++": f"{_NEAR},quantize_weights=int8,quantize_gradients=int4",
    "pp=2": "pp=2,dp_shard=2,pipeline_microbatches=2",
}
WANTED = {"ZeRO++": 5.0, "HSDP": 2.5}  # times as fast as ZeRO-3, at 100 Mbit/s
ROWS, LENGTH = 2, 32
_HOSTS, _PORT = 2, 29999
_LATENCY = 1e-3  # seconds per step of a ring over the link, as measured with small messages


def _config() -> Any:
    from transformers import LlamaConfig

    shape: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "use_cache": False}
    return LlamaConfig(vocab_size=256, **shape, **heads)


def _model() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(_config())


# ---- one of the four processes --------------------------------------------------------------------------------------


def _rank(steps: int) -> None:
    """Time all layouts; rank 0 prints them as JSON."""
    import torch
    import torch.distributed as dist

    from hf_parallel import parallelize

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    alone, rank = _model(), dist.get_rank()
    found = {"alone": min(_seconds(lambda: _step(alone, _rows(rank, ROWS)), steps, time.process_time))}
    for name, spec in LAYOUTS.items():
        rows = _rows(rank % 2, 2 * ROWS) if "pp=2" in spec else _rows(rank, ROWS)  # as many per process
        model = parallelize(_model(), spec)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        begin = _crossed()
        found[name] = statistics.median(_seconds(lambda: _step(model, rows, optimizer), steps))  # noqa: B023 - it is called at once
        found[f"{name} bytes"] = (_crossed() - begin) / (steps + 1)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _crossed() -> int:
    """Bytes that this host has sent over the link so far."""
    with open("/proc/self/net/dev") as table:
        cards = [line.partition(":") for line in table]
    return sum(int(numbers.split()[8]) for name, _, numbers in cards if name.strip().startswith("hfp"))


def _rows(seed: int, count: int) -> Any:
    import torch

    return torch.randint(256, (count, LENGTH), generator=torch.Generator().manual_seed(seed))


def _step(model: Any, tokens: Any, optimizer: Any = None) -> None:
    model(input_ids=tokens, labels=tokens).loss.backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def _seconds(step: Callable[[], None], steps: int, clock: Callable[[], float] = time.perf_counter) -> list[float]:
    """Of each step, after one step that makes what is kept; all processes begin together."""
    import torch.distributed as dist

    taken = []
    for _ in range(steps + 1):
        dist.barrier()
        begin = clock()
        step()
        dist.barrier()
        taken.append(clock() - begin)
    return taken[1:]


# ---- the link -------------------------------------------------------------------------------------------------------


def missing() -> str | None:
    """Why there can be no slow link here."""
    if sys.platform != "linux" or not shutil.which("ip") or not shutil.which("tc"):
        return "network namespaces need Linux with iproute2 (ip, tc)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"hfp{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return None


@contextlib.contextmanager
def hosts(rate: int) -> Iterator[list[str]]:
    """Two namespaces joined by a link of `rate` Mbit/s."""
    names = [f"hfp{os.getpid()}-{host}" for host in range(_HOSTS)]
    cards = [f"hfp{host}" for host in range(_HOSTS)]
    try:
        for name in names:
            _ip("netns", "add", name)
        ends = [("name", card, "netns", name) for card, name in zip(cards, names, strict=True)]
        _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host, (name, card) in enumerate(zip(names, cards, strict=True)):
            _ip("-n", name, "addr", "add", f"10.99.0.{host + 1}/24", "dev", card)
            for device in (card, "lo"):
                _ip("-n", name, "link", "set", device, "up")
            shape = ["rate", f"{rate}mbit", "burst", f"{max(64, rate)}kb", "latency", "50ms"]
            subprocess.run(
                ["ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", card, "root", "tbf", *shape], check=True
            )
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def measure(rate: int, steps: int) -> dict[str, float]:
    """Seconds per step of each layout over a link of `rate` Mbit/s, and of one process `alone`."""
    with hosts(rate) as names:
        ranks = []
        for rank in range(2 * _HOSTS):
            where = {"RANK": str(rank), "WORLD_SIZE": str(2 * _HOSTS), "LOCAL_RANK": str(rank % 2)}
            where |= {"MASTER_ADDR": "10.99.0.1", "MASTER_PORT": str(_PORT), "GLOO_SOCKET_IFNAME": f"hfp{rank // 2}"}
            command = ["ip", "netns", "exec", names[rank // 2], sys.executable, "-W", "ignore"]
            command += ["-m", "benchmarks.slow_network", "--rank", "--steps", str(steps)]
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            ranks.append(subprocess.Popen(command, env={**os.environ, **where}, stdout=output, text=True))
        try:
            text, _ = ranks[0].communicate(timeout=580)
        finally:
            for process in ranks:
                process.terminate()
                process.wait()
    return json.loads(text.strip().splitlines()[-1])


# ---- what the planner says ------------------------------------------------------------------------------------------


def predicted(rate: int, alone: float) -> dict[str, float]:
    """Seconds per step by the planner: what one process computes alone, and transfers that nothing hides."""
    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.planner.candidates import to_layout
    from hf_parallel.planner.hardware import Cluster, Efficiency, Link, find_gpu
    from hf_parallel.planner.predict import predict

    base = find_gpu("h100-80gb")  # of its compute nothing is left beside these links
    efficiency = Efficiency(
        network=0.95,
        link=1.0,
        hidden=0.0,
        hidden_gradients=0.0,
        contention=0.0,
        kernel_us=0.0,
        wait_us=0.0,
        step_ms=1e3 * alone,
    )
    between = Link(f"{rate} Mbit/s", rate * 1e6 / 8 / 2, _LATENCY)  # two processes share it
    cluster = Cluster(dataclasses.replace(base, efficiency=efficiency), 4, 2, Link("memory", 1e9, 1e-4), between)
    found = {}
    for name, spec in LAYOUTS.items():
        config = ParallelConfig.parse(spec).resolve(4)
        pipeline = config.pp_size > 1
        found[name] = predict(
            model=_config(),
            gpu=cluster,
            gpus=4,
            gpus_per_node=2,
            layout=to_layout(config),
            seq=LENGTH,
            micro_batch=ROWS,
            global_batch=ROWS * (8 if pipeline else 4) // (2 if pipeline else 1),
            precision="fp32",
            engine="hf_parallel",
        ).step_time_s
    return found


def main() -> int:
    """Print the tables; 1 if a layout is slower than it is to be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=int, nargs="+", default=[100, 1000], help="Mbit/s")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        _rank(arguments.steps)
        return 0
    reason = missing()
    if reason is not None:
        print(f"skipped: {reason}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are taken down
    slow = []
    for rate in arguments.rates:
        slow += _table(rate, measure(rate, arguments.steps))
    print("\n".join(slow))
    return bool(slow)


def _table(rate: int, measured: dict[str, float]) -> list[str]:
    """Print one; what of it is too slow."""
    expected, base = predicted(rate, measured["alone"]), measured["ZeRO-3"]
    print(
        f"\n{rate} Mbit/s{'':8} s per step  x ZeRO-3   predicted s  x ZeRO-3   MB each way  x ZeRO-3"
        f"   one process alone {measured['alone']:.3f} s"
    )
    sent = {name: measured[f"{name} bytes"] / 1e6 for name in LAYOUTS}
    for name in LAYOUTS:
        one, other, crossed = measured[name], expected[name], sent[name]
        print(
            f"{name:18} {one:9.3f} {base / one:9.2f} {other:13.3f} {expected['ZeRO-3'] / other:9.2f}"
            f" {crossed:13.2f} {sent['ZeRO-3'] / crossed:9.2f}"
        )
    orders = [sorted(LAYOUTS, key=table.__getitem__) for table in (measured, expected)]
    print(
        f"fastest first   measured: {', '.join(orders[0])}\n               predicted: {', '.join(orders[1])}",
        flush=True,
    )
    wanted = WANTED if rate == 100 else {}
    return [
        f"{rate} Mbit/s: {name} is {base / measured[name]:.2f} times as fast as ZeRO-3, not {least}"
        for name, least in wanted.items()
        if base / measured[name] < least
    ]


if __name__ == "__main__":
    sys.exit(main())

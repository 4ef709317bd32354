"""`hf-parallel check --calibrate`: what this machine reaches, with each number of processes at work at once.

Each time is the best of several, of the slowest process: processes that share cores, memory or links wait for it too.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from hf_parallel.axes.context.kernels import Scores
from hf_parallel.axes.context.layout import Layout, Ring, Shape
from hf_parallel.axes.context.packs import make_unpacked_rows
from hf_parallel.axes.context.ring import RingAttention
from hf_parallel.check.report import Row
from hf_parallel.check.room import Room
from hf_parallel.planner.calibration import Calibration, Measured, choose_calibration_path, read_calibration
from hf_parallel.ranks import (
    exchange_equally,
    gather_sequence,
    reduce_scatter_sequence,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from hf_parallel.ranks.devices import synchronize
from hf_parallel.version import VERSION

_BUDGET_S, _FEWEST, _COLLECTIVES = 0.3, 5, 30
_WIDTH = 64  # of a token that collectives send
_CHAIN = 100  # kernels with next to nothing to do
#: m, n and each k of matrix products, bytes of a buffer, parameters of an optimizer, bytes of all-reduces.
_ON_CPU: tuple = (256, 512, (64, 128, 256, 512, 1024)), 8 << 20, 1 << 20, (1 << 10, 4 << 20)
_ON_GPU: tuple = (4096, 4096, (256, 1024, 4096, 8192)), 1 << 30, 1 << 27, (1 << 10, 256 << 20)
#: A small Llama; layers, rows, tokens and number of its steps, the first two kinds of which all devices run.
_PROBE = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn_hidden": 704, "vocab": 512, "gated_mlp": 1}
_PROBED = ((2, 2, 64, 12), (6, 2, 64, 12), (2, 2, 256, 12), (6, 2, 256, 12), (4, 8, 256, 5))


def calibrate_machine(device: torch.device, room: Room, path: str | None) -> Iterator[Row]:
    """Measure with 1, 2, 4, … processes and write the file; rank 0 yields a row for each. Collective."""
    counts = sorted({1 << i for i in range(room.world.bit_length()) if 1 << i <= room.world} | {room.world})
    groups = {count: dist.new_group(list(range(count))) for count in counts}
    found: dict[int, Measured] = {}
    for count in counts:
        room.step(f"speeds with {count} processes", times=10)
        own = _measure(device, groups[count], count) if room.rank < count else None
        each = [one for one in room.gather(own) if one is not None]
        if each:
            # Join what processes have measured at once: the longest times, the lowest rates
            products = [
                max(same, key=lambda product: product[-1])
                for same in zip(*(one.products for one in each), strict=True)
            ]
            reduced = [
                max(same, key=lambda pair: pair[1]) for same in zip(*(one.all_reduce for one in each), strict=True)
            ]
            collectives, probes = (
                [max(same, key=lambda own: own[-1]) for same in zip(*columns, strict=True)]
                for columns in ([one.collectives for one in each], [one.probes for one in each])
            )
            measured = found[count] = dataclasses.replace(
                max(each, key=lambda one: one.probe[-1]),
                products=products,
                all_reduce=reduced,
                collectives=collectives,
                probes=probes,
                contention=max(one.contention for one in each),
                attention=max((one.attention for one in each), key=lambda own: own[-2] + own[-1]),
                bandwidth=min(one.bandwidth for one in each),
                kernel_us=max(one.kernel_us for one in each),
                update_bytes=min(one.update_bytes for one in each),
                copy=min(one.copy for one in each),
            )
            _, m, n, k, seconds = max(products, key=lambda product: product[3] * (product[0] == "fp32"))
            link = f", all-reduce {reduced[-1][0] / reduced[-1][1] / 1e9:.3g} GB/s" if reduced else ""
            text = (
                f"{2 * m * n * k / seconds / 1e12:.3g} TFLOP/s fp32, {measured.bandwidth / 1e9:.3g} GB/s of memory, "
                f"{measured.kernel_us:.3g} us per kernel{link}, probe {measured.probe[-1] * 1e3:.3g} ms"
            )
            yield Row("calibrate", f"{count} process{'es' * (count > 1)}", text)
    if room.rank == 0:
        yield Row("calibrate", "file", _write_calibration(device, found, choose_calibration_path(path)))


def _measure(device: torch.device, group: dist.ProcessGroup, count: int) -> Measured:
    """Measure what this process reaches beside the others of its group."""
    on_cpu = device.type == "cpu"
    sizes, buffer, parameters, payloads = _ON_CPU if on_cpu else _ON_GPU
    best, typical = (functools.partial(of, device, group) for of in (_measure_best_seconds, _measure_typical_seconds))
    products = [
        (name, *own, best(_make_product_probe(device, dtype, *own)))
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16))
        for own in ((sizes[0], sizes[1], k) for k in sizes[2])
    ]
    m, n, k = sizes[0], sizes[1], sizes[2][2]
    odd = best(_make_product_probe(device, torch.float32, m, n + 3, k)) / best(
        _make_product_probe(device, torch.float32, m, n, k)
    )
    a, b = (torch.ones(buffer // 4, device=device) for _ in range(2))
    moved = best(lambda: torch.add(a, b, out=a))
    copy = 0.0
    if device.type != "cpu":
        host = torch.empty(buffer // 4, pin_memory=True)
        copy = buffer / best(lambda: a.copy_(host, non_blocking=True))
    start = torch.ones(8, device=device, requires_grad=True)
    probes = []
    for layers, rows, tokens, steps in _PROBED if on_cpu else _PROBED[:2]:  # of a GPU only its host shows
        measure = functools.partial(typical, calls=steps) if on_cpu else best
        took = measure(_make_step_probe(device, group, layers, rows, tokens))
        probes.append(({**_PROBE, "layers": layers}, rows, tokens, took))
    weights = [torch.nn.Parameter(torch.ones(parameters // 8, device=device)) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    return Measured(
        products=products,
        odd=max(1.0, odd),
        attention=_make_attention_probe(device, best),
        bandwidth=3 * buffer / moved,
        kernel_us=best(functools.partial(_launch_chain, start)) / (2 * _CHAIN) * 1e6,
        update_bytes=40
        * parameters
        / best(torch.optim.AdamW(weights, fused=device.type != "cpu").step),  # as Trainer makes it
        all_reduce=[(size, best(_make_all_reduce_probe(device, group, size), _COLLECTIVES)) for size in payloads]
        if count > 1
        else [],
        copy=copy,
        probe=probes[0],
        probes=probes,
        collectives=[found for size in payloads for found in _measure_collectives(device, group, size, typical)]
        if count > 1 and on_cpu
        else [],
        contention=_measure_contention(device, group, payloads[-1], typical) if count > 1 and on_cpu else 1.0,
    )


def _measure_best_seconds(
    device: torch.device, group: dist.ProcessGroup, call: Callable[[], object], wanted: int | None = None
) -> float:
    """Return the shortest of several calls: what else the machine does only makes them longer.

    Args:
        wanted: how many calls, for collectives, which all ranks call as often; default: as many as there is time for.
    """
    dist.barrier(group)
    call()
    synchronize(device)
    shortest, calls, end = float("inf"), 0, time.perf_counter() + _BUDGET_S
    while calls < (wanted or _FEWEST) or (wanted is None and time.perf_counter() < end):
        began = time.perf_counter()
        call()
        synchronize(device)
        shortest, calls = min(shortest, time.perf_counter() - began), calls + 1
    return shortest


def _measure_typical_seconds(
    device: torch.device, group: dist.ProcessGroup, call: Callable[[], object], calls: int = _COLLECTIVES
) -> float:
    """Return the median of calls that begin at once on all ranks: of collectives and steps none is undisturbed."""
    call()
    seconds = []
    for _ in range(calls):
        dist.barrier(group)
        began = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _make_product_probe(device: torch.device, dtype: torch.dtype, m: int, n: int, k: int) -> Callable[[], object]:
    a, b = torch.rand(m, k, device=device).to(dtype), torch.rand(k, n, device=device).to(dtype)
    return lambda: a @ b


def _make_attention_probe(device: torch.device, best: Callable) -> tuple[int, int, int, int, float, float]:
    rows, heads, width, tokens = (4, 4, 64, 128) if device.type == "cpu" else (2, 32, 128, 4096)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    parts = [torch.rand(rows, heads, tokens, width, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
    query, key, value = parts
    forward = functools.partial(torch.nn.functional.scaled_dot_product_attention, query, key, value, is_causal=True)
    out = forward()
    gradient = torch.ones_like(out)
    backward = best(lambda: torch.autograd.grad(out, parts, gradient, retain_graph=True))
    return rows, heads, width, tokens, best(forward), backward


def _launch_chain(start: torch.Tensor) -> None:
    """Launch a chain of kernels forward, and as many backward."""
    value = start
    for _ in range(_CHAIN):
        value = value * 1.0
    value.sum().backward()


def _make_all_reduce_probe(device: torch.device, group: dist.ProcessGroup, size: int) -> Callable[[], object]:
    buffer = torch.zeros(size // 4, device=device)
    return lambda: start_all_reduce(buffer, group).wait()


def _measure_collectives(
    device: torch.device, group: dist.ProcessGroup, size: int, typical: Callable
) -> list[tuple[str, int, float]]:
    """Measure each kind of collective bare, and as tensor, context and data parallelism make it; whole tensors.

    Returns:
        Names of kinds, with the axis in front where only its collectives are so; bytes; seconds.
    """
    ranks, rank = group.size(), group.rank()
    partner = rank ^ 1 if rank ^ 1 < ranks else None  # the last of an odd number has no neighbour
    tokens = -(-size // 4 // ranks // (2 * _WIDTH))
    own = torch.zeros(2, tokens, _WIDTH, device=device)  # two sequences: to join those of all ranks takes a copy
    message = own.new_zeros(ranks * own.numel())

    def send_and_receive() -> None:
        for sender in (0, 1):
            if partner is not None:
                (dist.send if rank % 2 == sender else dist.recv)(message, partner, group=group)

    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: start_all_reduce(message, group).wait(),
        "all_gather": lambda: start_all_gather(own, group).wait(),
        "reduce_scatter": lambda: start_reduce_scatter(message.view(ranks, -1), group).wait(),
        "all_to_all": lambda: exchange_equally(message.view(ranks, -1), group),
        "p2p": send_and_receive,
    }
    seconds = {kind: typical(call) for kind, call in calls.items()}
    seconds["p2p"] /= 2
    gather, reduce = seconds["all_gather"], seconds["reduce_scatter"]
    for axis, made, bare in (
        ("zero", _measure_sharded_layer(device, group, message.numel(), typical), 2 * gather + reduce),
        ("tp", _measure_region(group, own, typical), 2 * gather + 2 * reduce),
    ):
        slower = max(1.0, made / bare)
        seconds |= {f"{axis} all_gather": gather * slower, f"{axis} reduce_scatter": reduce * slower}
    found = [(kind, 4 * message.numel(), each) for kind, each in seconds.items()]
    return [*found, ("cp all_gather", *_measure_ring(device, group, size, typical))]


class _Weights(torch.nn.Module):
    """A layer with as many parameters as a Llama's, which computes almost nothing."""

    def __init__(self, numbers: int, device: torch.device) -> None:
        super().__init__()
        each = [torch.zeros(max(1, numbers // 9 // 8), 8, device=device) for _ in range(9)]
        self.weights = torch.nn.ParameterList(map(torch.nn.Parameter, each))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            value = value + weight.sum()
        return value


def _measure_sharded_layer(device: torch.device, group: dist.ProcessGroup, numbers: int, typical: Callable) -> float:
    """Return what FSDP2 adds to a layer: two gathers and a reduction, with its copies and its host's time."""
    mesh, start = DeviceMesh.from_group(group, device.type), torch.zeros((), device=device, requires_grad=True)
    plain, sharded = (torch.nn.Sequential(*(_Weights(numbers, device) for _ in range(2))) for _ in range(2))
    for part in (*sharded, sharded):
        fully_shard(part, mesh=mesh)

    def step(model: torch.nn.Module) -> None:
        model(start).backward()
        model.zero_grad()

    return (typical(lambda: step(sharded)) - typical(lambda: step(plain))) / 2


def _measure_region(group: dist.ProcessGroup, own: torch.Tensor, typical: Callable) -> float:
    """Return what a region of tp adds to its products: two gathers and two reductions, with what they copy.

    In a stack, where what is kept for the backward takes fresh memory, and ranks come from other work.
    """
    weights = [own.new_full((_WIDTH, _WIDTH), 0.1).requires_grad_() for _ in range(8)]
    whole = own.repeat(1, group.size(), 1)

    def step(is_parallel: bool) -> None:
        value = (own if is_parallel else whole).detach().requires_grad_()
        for weight in weights:
            entered = gather_sequence(value, group) if is_parallel else value
            left = torch.nn.functional.silu(entered @ weight) @ weight
            value = value + (reduce_scatter_sequence(left, group) if is_parallel else left)
        value.sum().backward()

    calls = _COLLECTIVES // 2
    return (typical(lambda: step(True), calls) - typical(lambda: step(False), calls)) / len(weights)


def _measure_ring(device: torch.device, group: dist.ProcessGroup, size: int, typical: Callable) -> tuple[int, float]:
    """Measure what a ring adds to attention: its exchanges where they are waited for, and joining partial results.

    Ranks attend to their parts of as many sequences as there are ranks, or each to a whole one, which is as much work.
    In a stack, whose products' gradients ranks come from.

    Returns:
        Bytes of all keys and values; seconds of each of three exchanges, of keys and values in the forward and in the
        backward, and of their gradients.
    """
    ranks, heads, layers = group.size(), 16, 4
    tokens = max(2, size // (8 * heads * _WIDTH * ranks**2)) * ranks
    ring = Ring(Layout(make_unpacked_rows(ranks, tokens), Shape(ranks, 1), tokens // ranks), group, 0, float("inf"))
    part = torch.zeros(ranks, heads, tokens // ranks, _WIDTH, device=device)
    whole = part.new_zeros(1, heads, tokens, _WIDTH)
    weights = [torch.full((_WIDTH, _WIDTH), 0.01, device=device).requires_grad_() for _ in range(layers)]

    def step(is_parallel: bool) -> None:
        value = (part if is_parallel else whole).detach().requires_grad_()
        for weight in weights:
            made = value @ weight
            if is_parallel:
                value = value + RingAttention.apply(made, made, made, None, Scores(), ring)
            else:
                value = value + torch.nn.functional.scaled_dot_product_attention(made, made, made, is_causal=True)
        value.sum().backward()

    calls = _COLLECTIVES // 2
    made, plain = (typical(functools.partial(step, is_parallel), calls) for is_parallel in (True, False))
    return 8 * whole.numel() * ranks, max(made - plain, made / 100) / layers / 3


def _measure_contention(device: torch.device, group: dist.ProcessGroup, size: int, typical: Callable) -> float:
    """Return which part of an all-reduce's seconds products lose that run beside it: 1 where it needs their core."""
    buffer, a = torch.zeros(size // 4, device=device), torch.rand(384, 384, device=device)
    alone, each = typical(_make_all_reduce_probe(device, group, size)), typical(lambda: a @ a)
    count = max(1, round(4 * alone / each))

    def multiply_meanwhile() -> None:
        started = start_all_reduce(buffer, group)
        for _ in range(count):
            a @ a
        started.wait()

    return min(1.0, max(0.0, (typical(multiply_meanwhile) - count * each) / alone))


def _make_step_probe(
    device: torch.device, group: dist.ProcessGroup, layers: int, rows: int, tokens: int
) -> Callable[[], object]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=_PROBE["hidden"],
        num_hidden_layers=layers,
        num_attention_heads=_PROBE["heads"],
        num_key_value_heads=_PROBE["kv_heads"],
        intermediate_size=_PROBE["ffn_hidden"],
        vocab_size=_PROBE["vocab"],
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(device)
    ids = torch.randint(0, _PROBE["vocab"], (rows, tokens), device=device)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cpu":
            dist.barrier(group)  # in training ranks wait for the slowest of each step

    return step


def _write_calibration(device: torch.device, found: dict[int, Measured], path: str) -> str:
    """Write the file; steps of finished runs on this device stay."""
    name = f"cpu x{os.cpu_count()}"
    if device.type != "cpu":
        from hf_parallel.planner.hardware import find_gpu

        name = find_gpu(torch.get_device_module(device).get_device_name(device)).name
    versions = {"torch": torch.__version__, "hf_parallel": VERSION}
    made = Calibration(name, datetime.date.today().isoformat(), versions, found)
    former = read_calibration(path)
    if former is not None and former.device == name:
        made.steps = former.steps
        made.processes = {**former.processes, **found}
    made.write(path)
    return path

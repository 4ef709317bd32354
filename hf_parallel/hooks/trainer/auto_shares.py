"""`batch_shares=auto`: how fast each data rank is, before a training and from its logs.

The same examples are trained on in the same order whatever the cut is, so that a clock changes no number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from hf_parallel.ask.keys.data import MEASURED
from hf_parallel.ask.spec import refuse
from hf_parallel.hooks import runtime
from hf_parallel.hooks.accelerate.shares import count_examples_of
from hf_parallel.ranks import messages
from hf_parallel.ranks.devices import measure_device_memory, measure_product_rate
from hf_parallel.ranks.mesh import compute_data_rank
from hf_parallel.ranks.shares import WORTH, SharesOfPass, compute_shares_of, cut_examples

if TYPE_CHECKING:
    from hf_parallel.monitor.meter import RankRow


#: The part of a device's memory that a cut may fill.
ROOM = 0.92


def measure_shares() -> None:
    """Compare the ranks by a matrix product, once. Collective."""
    current = runtime.current()
    if current is None or current.config.batch_shares != MEASURED or current.measured is not None:
        return
    if current.config.monitor == "off":
        refuse("batch_shares=auto", "monitor=off measures no step", "monitor=basic")
    seconds = _gather_of_data_ranks(
        [1 / rate for rate in messages.gather_objects(measure_product_rate(current.mesh.device))]
    )
    alike = max(seconds) < WORTH * min(seconds)
    first = compute_shares_of([1.0] * len(seconds) if alike else seconds)
    current.measured = runtime.MeasuredShares(first, SharesOfPass(first))


def _gather_of_data_ranks(values: Sequence[float]) -> list[float]:
    """Return the largest value among the ranks of each data rank."""
    config = runtime.mesh().config
    found = [0.0] * config.data_parallel_size
    for rank, value in enumerate(values):
        place = compute_data_rank(config, rank)
        found[place] = max(found[place], value)
    return found


def look(rows: list[RankRow], accumulation: int) -> str | None:
    """Cut batches anew if readings agree that it is worth it. The same on all ranks; collective where it is.

    Args:
        rows: what each rank has measured since the last reading.
        accumulation: micro-steps of a step, which have one cut.

    Returns:
        The line that says what changes.
    """
    current = runtime.current()
    measured = None if current is None else current.measured
    if measured is None or measured.sampler is None or not all(row.rows for row in rows):
        return None
    examples = count_examples_of(measured.sampler)
    seconds = _gather_of_data_ranks([row.compute / row.rows for row in rows])
    now, speeds = measured.of_pass.latest, measured.speeds
    most = _count_most_examples(measured, rows, cut_examples(examples, measured.of_pass.in_hand, 1))
    found = speeds.look(seconds, examples, now, most)
    if found is None:
        return None
    drawn = torch.tensor(measured.of_pass.drawn, device=runtime.mesh().device)
    dist.all_reduce(drawn, dist.ReduceOp.MAX)
    begin = -(-int(drawn) // accumulation) * accumulation
    measured.of_pass.change(begin, found)
    former, new = (" ".join(map(str, cut_examples(examples, one, 1))) for one in (now, found))
    each = " ".join(f"{one:.3g}" for one in speeds.medians)
    by_speed = cut_examples(examples, compute_shares_of(speeds.medians), 1)
    full = most is not None and cut_examples(examples, found, 1) != by_speed
    room = f" and have room for {' '.join(map(str, most))}" if full and most else ""
    speeds.forget()
    return (
        f"batch_shares=auto: data ranks compute an example in {each} s{room}, so they get {new} examples of each "
        f"micro-step in place of {former}; batch_shares={':'.join(f'{float(share):g}' for share in found)} begins so"
    )


def measure_memory_of_rank(device: torch.device) -> tuple[float, float] | None:
    """Return the bytes that this rank holds between steps, and those of its device; None on a CPU."""
    if device.type == "cpu":
        return None
    return float(torch.get_device_module(device).memory_allocated(device)), measure_device_memory(device)


def _count_most_examples(
    measured: runtime.MeasuredShares, rows: list[RankRow], cut: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Return how many examples fit on each data rank; None where memory is not counted. Collective at first.

    What a rank holds beyond the bytes between steps grows with its examples.

    Args:
        cut: the examples of each data rank in the micro-steps that `rows` are about.
    """
    if measured.memory is None:
        measured.memory = messages.gather_objects(measure_memory_of_rank(runtime.mesh().device))
    measured.largest = tuple(map(max, cut, measured.largest or cut))
    config, most = runtime.mesh().config, [sum(cut)] * len(cut)
    for rank, (row, memory) in enumerate(zip(rows, measured.memory, strict=True)):
        if memory is None:
            return None
        place, (held, whole) = compute_data_rank(config, rank), memory
        each = max(1.0, row.memory_peak - held) / measured.largest[place]
        most[place] = max(1, min(most[place], int((ROOM * whole - held) / each)))
    return tuple(most)

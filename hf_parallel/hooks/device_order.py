"""Unlike GPUs in another order than a layout needs: the slow ones would get the large parts."""

from __future__ import annotations

from fractions import Fraction

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.hooks import report, runtime
from hf_parallel.planner.detect import number_kinds_of, read_device_here
from hf_parallel.ranks import devices, messages
from hf_parallel.ranks.mesh import compute_coordinates, compute_data_rank
from hf_parallel.ranks.shares import WORTH


def warn_of_device_order(config: ParallelConfig) -> None:
    """Say so if slow GPUs get more of a batch, or more layers, than fast ones, and name the order that works.

    A warning only: a fast GPU may get less because it has less memory. Collective where parts are unlike.
    """
    shares, split, speeds = config.shares, config.split_layers, config.split_speeds
    if shares is None and split is None and speeds is None:
        return
    found = messages.gather_objects(read_device_here())
    kinds = number_kinds_of(found)
    if len(set(kinds)) == 1:
        return
    # FLOP/s of a matrix product on each rank.
    rates = messages.gather_objects(devices.measure_product_rate(runtime.mesh().device))
    parts = []  # the share of each rank in a batch times the number of its layers
    for rank in range(config.world_size):
        part, place = Fraction(1), compute_coordinates(config, rank)["pp"]
        if shares is not None:
            part *= shares[compute_data_rank(config, rank)]
        if split is not None:
            part *= sum(split[stage] for stage in config.stages_of_rank(place))
        if speeds is not None:
            part *= Fraction(speeds[place])
        parts.append(part)
    ranks = {kind: [rank for rank, own in enumerate(kinds) if own == kind] for kind in dict.fromkeys(kinds)}
    rate = {kind: sum(rates[rank] for rank in own) / len(own) for kind, own in ranks.items()}
    mean = {kind: sum(parts[rank] for rank in own) / len(own) for kind, own in ranks.items()}
    pairs = ((slow, fast) for slow in ranks for fast in ranks if rate[fast] > WORTH * rate[slow])
    slow, fast = next(((slow, fast) for slow, fast in pairs if mean[slow] > mean[fast]), (None, None))
    if slow is None or fast is None:
        return
    by_part = sorted(range(len(parts)), key=lambda rank: (-parts[rank], rank))
    by_rate = sorted(range(len(parts)), key=lambda rank: (-rate[kinds[rank]], rank))
    taken = dict(zip(by_part, by_rate, strict=True))  # place: who should be there
    order = [taken[place] for place in range(len(parts))]
    hosts = list(dict.fromkeys(found[rank].host for rank in order))
    works = f"start nodes in this order: {', '.join(hosts)}"
    if len(hosts) == 1:
        works = f"CUDA_VISIBLE_DEVICES={','.join(map(str, order))} gives the fast ones more"
    report.say(
        f"the order of GPUs: {found[slow].name} (rank {ranks[slow][0]}, …) has {float(mean[slow] / mean[fast]):.3g} x "
        f"the work of {found[fast].name} (rank {ranks[fast][0]}, …), which is {rate[fast] / rate[slow]:.2g} x as "
        f"fast; {works}"
    )

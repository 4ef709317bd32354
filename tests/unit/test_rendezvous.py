"""Ranks that start anew agree on a name for their store, although their forerunners' words are still in it."""

import threading

import torch.distributed as dist

from hf_parallel.hooks.rendezvous import agree_on_name


def started(store, world_size: int, late: int | None = None) -> list[str]:
    """All ranks of one start, the `late` one last."""
    names: dict[int, str] = {}

    def rank(number: int) -> None:
        names[number] = agree_on_name(store, number, world_size)

    threads = [threading.Thread(target=rank, args=[number]) for number in range(world_size) if number != late]
    if late is not None:
        threads.append(threading.Timer(0.2, rank, [late]))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return [names[number] for number in sorted(names)]


def test_each_start_has_its_own_name():
    """With as many ranks, fewer, and more; whoever comes last."""
    store = dist.HashStore()
    seen = []
    for world_size, late in ((3, None), (3, 0), (3, 2), (2, 1), (4, 3)):
        names = started(store, world_size, late)
        assert len(names) == world_size
        assert len(set(names)) == 1
        seen.append(names[0])
    assert len(set(seen)) == len(seen)

"""A store of their own for the ranks that torchrun has just started.

torchrun keeps one store through all restarts, and torch writes the ranks' addresses in it under the same names each
time. A rank that is first to look finds the address of a process that is gone (connection refused), or never connects.
The number of restarts differs between nodes that joined at different times, so the ranks agree on a name first:

    every rank       hello/3 = a number drawn by this process
    rank 0           welcome = a name, and the numbers it has seen; written again until all have answered
    every rank       goes on under that name once its own number is in the list
"""

from __future__ import annotations

import os
import time
import uuid

import torch
import torch.distributed as dist

from hf_parallel.ask.spec import refuse

_ROOM = "hf_parallel"
_PAUSE_S = 0.02
_LIMIT_S = 1800.0  # as torch waits for ranks


def make_own_store() -> dict[str, object]:
    """Return what `init_process_group` needs under torchrun; nothing elsewhere, where each start has its own store.

    One process alone has its group afterwards.
    """
    if dist.is_initialized():
        return {}
    if "WORLD_SIZE" not in os.environ:  # one process, which no launcher has started
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
        return {}
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return {}
    store, rank, world_size = next(dist.rendezvous("env://"))
    name = agree_on_name(dist.PrefixStore(_ROOM, store), rank, world_size)
    return {"store": dist.PrefixStore(f"{_ROOM}/{name}", store), "rank": rank, "world_size": world_size}


def agree_on_name(store: dist.Store, rank: int, world_size: int) -> str:
    """Agree on a name with the ranks that call this now, whatever others have left in the store.

    Raises:
        TimeoutError: not all of them come.
    """
    number, end = uuid.uuid4().hex, time.monotonic() + _LIMIT_S
    name = uuid.uuid4().hex
    store.set(f"hello/{rank}", number)
    greetings = [f"hello/{rank}" for rank in range(world_size)]
    answers = [f"{name}/{rank}" for rank in range(1, world_size)]
    while time.monotonic() < end:
        if rank == 0:
            if store.check(greetings):  # write down whom rank 0 has seen
                store.set("welcome", " ".join([name, *(store.get(key).decode() for key in greetings)]))
                if store.check(answers):
                    return name
        elif store.check(["welcome"]):
            found, *numbers = store.get("welcome").decode().split()
            if len(numbers) == world_size and numbers[rank] == number:
                store.set(f"{found}/{rank}", "here")
                return found
        time.sleep(_PAUSE_S)
    raise TimeoutError(f"hf_parallel: rank {rank} waited {_LIMIT_S:.0f} s for the other ranks")


def name_platform() -> str:
    """Return what computes in this process: CUDA, ROCm, another accelerator's name, or the CPU."""
    if not torch.accelerator.is_available():
        return "CPU"
    kind = torch.accelerator.current_accelerator()
    return "ROCm" if torch.version.hip else "CUDA" if kind is None or kind.type == "cuda" else kind.type


def refuse_unlike_platforms(store: dist.Store, rank: int) -> None:
    """Refuse ranks that no library of collectives joins, before the first collective hangs.

    Raises:
        SpecError: this rank computes on another platform than rank 0.
    """
    own, key = name_platform(), f"{_ROOM}/platform"
    if rank == 0:
        store.set(key, own)
    first = store.get(key).decode()
    if own != first:
        why = f"rank 0 computes on {first}, and no library of collectives joins both"
        refuse(f"rank {rank} on {own}", why, do=f"start processes on {first} alone")

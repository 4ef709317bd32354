"""Process groups of a mesh: one for each set of ranks, whoever asks for it.

    axes of one rank       all of them share one group                   made once, not once per axis
    data ranks, ends       the group of an axis where that is the same   no second communicator
    axis of all ranks      the default group
    host memory            gloo, connected as messages need it           1,023 sockets per rank would be the rule

If the default group has a communicator to split (`device_id` was given), one call makes all groups of an axis. If not,
each group is a call of its own. It costs ranks outside nothing, because NCCL connects a group when it is first used.
"""

from __future__ import annotations

import inspect
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Partition = list[list[int]]  # all groups along some axes, as global ranks

_LAZY = "TORCH_GLOO_LAZY_INIT"


@dataclass(eq=False)
class Groups:
    """The groups of one mesh. Every rank asks for the same ones in the same order."""

    device: torch.device
    _known: dict[tuple, dist.ProcessGroup | None] = field(default_factory=dict)

    def along(self, partition: Partition, urgent: bool = False, apart: str = "") -> dist.ProcessGroup:
        """Return this rank's group of `partition`, which all ranks are in. Collective over them at the first time.

        Args:
            urgent: computation waits for its messages, so on CUDA they go before kernels that run already.
            apart: a name for a group of its own, whose messages must not wait for others of the same ranks.
        """
        group = self.among(partition, urgent, apart)
        assert group is not None
        return group

    def among(self, partition: Partition, urgent: bool = False, apart: str = "") -> dist.ProcessGroup | None:
        """Return this rank's group of `partition`. Return None on ranks that are in no group of it."""
        options = make_urgent_options(self.device) if urgent else None
        key = (options is not None, apart, *map(tuple, partition))
        if key not in self._known:
            default = dist.distributed_c10d._get_default_group()
            are_all = len(partition) == 1 and len(partition[0]) == dist.get_world_size()
            if are_all and options is None and not apart:
                self._known[key] = default
            elif _is_split_from_default(default):
                told: dict[str, Any] = {"timeout": time_out(), "pg_options": options}
                mixed = self.device.type == "cuda" and can_send_host_memory(default)
                if mixed and "backend" in inspect.signature(dist.split_group).parameters:
                    # gloo would be given NCCL's options, warn, and fall back to a time-out of its own
                    told["backend"] = "cuda:nccl"
                self._known[key] = dist.split_group(split_ranks=partition, **told)
            else:
                self._known[key] = _make_groups_keep_own(partition, pg_options=options)
        return self._known[key]

    def on_host(self, partition: Partition, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """Return a group of the same ranks for messages in host memory: `group` itself where it takes them."""
        if can_send_host_memory(group):
            return group
        key = ("host", *map(tuple, partition))
        if key not in self._known:
            self._known[key] = _make_groups_keep_own(partition, backend="gloo")
        own = self._known[key]
        assert own is not None
        return own

    def for_numbers(self, ranks: list[int]) -> dist.ProcessGroup:
        """Return a group over host memory that a script may use at any time. Collective over its ranks at first.

        One rank that asks alone waits for the others, whose collectives it leaves as they are.
        """
        key = ("numbers", *ranks)
        if key not in self._known:
            timeout = time_out()
            self._known[key] = dist.new_group(ranks, timeout, "gloo", use_local_synchronization=True)
        own = self._known[key]
        assert own is not None
        return own

    def made(self) -> list[dist.ProcessGroup]:
        """Return all groups that this rank is in."""
        return [group for group in self._known.values() if group is not None]


def make_host_group() -> dist.ProcessGroup:
    """Make a new group of all ranks over host memory. Collective.

    gloo connects each pair of ranks at once, unless it is told to connect them at their first message.
    """
    former = os.environ.get(_LAZY)
    os.environ[_LAZY] = "1"
    try:
        return dist.new_group(backend="gloo", timeout=time_out())
    finally:
        if former is None:
            os.environ.pop(_LAZY)
        else:
            os.environ[_LAZY] = former


def can_send_host_memory(group: dist.ProcessGroup) -> bool:
    """Return whether a group sends tensors of the CPU. NCCL sends objects through the GPU, and the process waits."""
    return torch.device("cpu") in group._device_types


def connect_group(group: dist.ProcessGroup, device: torch.device) -> None:
    """Make a group's communicator before point-to-point messages of some of its ranks. Collective over the group.

    NCCL makes it at the first call, and waits there for all ranks: forever, if some of them have no message.
    """
    if group.size() > 1 and _does_connect_late(group):
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def _does_connect_late(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group).startswith("nccl")  # torch 2.15 has others of NCCL, which a script can name


def time_out() -> timedelta | None:
    """Return the time-out of the default group, for new groups: without it they have torch's default."""
    group = dist.distributed_c10d._get_default_group()
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    return getattr(options, "_timeout", None)


def _make_groups_keep_own(partition: Partition, **settings: Any) -> dist.ProcessGroup | None:
    """Make all groups of a partition, and return the group that holds this rank."""
    own = None
    # Otherwise ranks outside of a group would take part in a split of communicators that ranks inside never make.
    alone = _is_split_from_default(dist.distributed_c10d._get_default_group())
    for ranks in partition:
        group = dist.new_group(ranks, timeout=time_out(), use_local_synchronization=alone, **settings)
        if dist.get_rank() in ranks:
            own = group
    return own


def _is_split_from_default(default: object) -> bool:
    return getattr(default, "bound_device_id", None) is not None


def make_urgent_options(device: torch.device) -> object:
    """Return options of a group whose kernels run on a stream of high priority; None without NCCL."""
    if device.type != "cuda" or not dist.is_nccl_available() or "nccl" not in dist.get_backend_config():
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    limit = time_out()
    if limit is not None:
        options._timeout = limit
    return options


def read_machine_id() -> str:
    """Return a name of this machine that all containers of one kernel share."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return socket.gethostname()


def format_spans(numbers: Iterable[int]) -> list[str]:
    """Return numbers in order, such as those of ranks, as spans: `0-3`, `7`."""
    spans: list[list[int]] = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return [f"{first}" if first == last else f"{first}-{last}" for first, last in spans]

"""Weights from a trainer to a rollout server over gloo: the seam in the place of vLLM's NCCL engine.

The trainer's rank 0 is rank 0 of a group of two, beside its own world. What is sent was announced over HTTP before, as
names, dtypes and shapes; then consecutive tensors travel as one bucket of bytes.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hf_parallel.checkpoint.gather import as_bytes
from hf_parallel.checkpoint.hub_format import Entry
from hf_parallel.checkpoint.stream import in_buckets

#: What the server calls it in `weight_transfer_config`, where vLLM says "nccl".
BACKEND = "gloo"
#: Bytes of a bucket; a larger tensor is one of its own.
BUCKET = 256 << 20
_LIMIT = timedelta(minutes=30)


class Channel:
    """The group of a trainer (rank 0) and a server; each side makes its own with the same facts."""

    def __init__(self, init_info: dict, rank: int) -> None:
        host, port = init_info["master_address"], init_info["master_port"]
        size = init_info["world_size"]
        self.store: dist.Store | None = dist.TCPStore(host, port, size, is_master=rank == 0, timeout=_LIMIT)
        prefixed = dist.PrefixStore("hf_parallel/rollouts", self.store)
        self.group: Any = dist.ProcessGroupGloo(prefixed, rank, size, _LIMIT)

    def send(self, tensors: Iterable[torch.Tensor]) -> None:
        """In the order in which they were announced; no more than a bucket is held."""
        try:
            for bucket in in_buckets(tensors, BUCKET):
                self._broadcast(torch.cat([as_bytes(tensor.cpu()) for tensor in bucket]))
        except BaseException:  # as when a rank that has a part is lost: the server must not wait for the rest
            self.group = self.store = None  # closes the connection
            raise

    def receive(self, announced: Iterable[Entry]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same, one by one."""
        for bucket in in_buckets(announced, BUCKET):
            data = torch.empty(sum(one.nbytes for one in bucket), dtype=torch.uint8)
            self._broadcast(data)
            for one, part in zip(bucket, data.split([one.nbytes for one in bucket]), strict=True):
                yield one.name, part.clone().view(one.dtype).view(one.shape)  # a view need not start at its size

    def _broadcast(self, data: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        self.group.broadcast([data], options).wait()


def address_towards(host: str | None) -> str:
    """The address of this machine that `host` can be reached from."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host or "127.0.0.1", 9))  # sends nothing
            found = str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
    return "127.0.0.1" if found == "0.0.0.0" else found

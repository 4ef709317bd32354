"""Whose output folder it is, and whether a launcher has restarted this run.

torchrun --max-restarts (and `hf-parallel launch --max_restarts`) start all ranks again when one is lost, with the
script as it is. A restarted run knows its own checkpoints by the name it took when it began, which is kept in
_hf_parallel.lock.
"""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hf_parallel import checkpoint as folders
from hf_parallel.hooks import report

#: Seconds after which a network file system takes the locks of a lost node away (90 by default in NFS 4).
LEASE_S = 120.0


@dataclass(frozen=True)
class Run:
    """Its name, the same through all restarts, and how often it was restarted."""

    identity: str
    restarted: int


@contextlib.contextmanager
def own_folder(trainer: Any) -> Iterator[Run]:
    """Nobody else writes to the output folder inside. Collective.

    Raises:
        CheckpointError: another run does.
    """
    lock, run = None, [Run(uuid.uuid4().hex, 0)]
    if str(getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy)) != "no":
        lock, run = _claimed(trainer.args.output_dir)
    trainer._run_id = run[0].identity
    try:
        yield run[0]
    finally:
        if lock is not None:
            lock.release()


def _claimed(folder: str) -> tuple[folders.Lock | None, list[Run]]:
    found: list[Any] = [None, None]
    lock = None
    if dist.get_rank() == 0:
        try:
            lock, found[0] = _claim(folder)
        except (folders.CheckpointError, OSError) as error:
            found[1] = str(error)
    dist.broadcast_object_list(found, src=0)
    if found[1] is not None:
        raise folders.CheckpointError(found[1])
    return lock, found[:1]


def _claim(folder: str) -> tuple[folders.Lock, Run]:
    launch, restarted = _launch(), int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    lock = folders.Lock(folder, **({"patience": LEASE_S} if restarted else {}))
    same = restarted and lock.former.get("launch") == launch
    run = Run(lock.former["run"] if same else uuid.uuid4().hex, restarted)
    lock.write({"run": run.identity, "launch": launch})
    folders.put_back_former(folder)
    if lock.file is None:
        report.say(f"{folder} is on a file system without locks: let no other run write to it")
    return lock, run


def _launch() -> str:
    """What stays the same when a launcher restarts its ranks."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return name if name != "none" else f"{socket.gethostname()}:{os.getppid()}"

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
from typing import TYPE_CHECKING

import torch.distributed as dist
from transformers import TrainerCallback

from hf_parallel import checkpoint as folders
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.trainer.checkpoints import does_save_checkpoints, record_of
from hf_parallel.hooks.trainer.settings import check_arguments
from hf_parallel.ranks import messages

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

#: Seconds after which a network file system takes the locks of a lost node away (90 by default in NFS 4).
LEASE_S = 120.0


@dataclass(frozen=True)
class Run:
    """Its name, the same through all restarts, and whether this is one."""

    identity: str
    restarted: bool


@contextlib.contextmanager
def hold_own_folder(trainer: Trainer) -> Iterator[Run]:
    """Keep other runs from writing to the output folder inside. Collective.

    Raises:
        CheckpointError: another run does.
    """
    folder, run = trainer.args.output_dir, Run(uuid.uuid4().hex, False)
    held: list[folders.Lock] = []

    def claim() -> Run:
        known = sorted({agent for agent in agents if agent is not None})
        count = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
        lock = folders.Lock(folder, **({"patience": LEASE_S} if count else {}))
        restarted = is_restart(lock.former, count, known)
        run = Run(lock.former["run"] if restarted else uuid.uuid4().hex, restarted)
        lock.write({"run": run.identity, "launch": os.environ.get("TORCHELASTIC_RUN_ID"), "agents": known})
        folders.put_back_former(folder)
        if lock.file is None:
            report.say(f"{folder} is on a file system without locks: let no other run write to it")
        held.append(lock)  # of rank 0
        return run

    if does_save_checkpoints(trainer.args):
        several = dist.is_initialized()
        agents = messages.gather_objects(find_agent()) if several else [find_agent()]
        try:
            run = messages.send_from_one(claim) if several else claim()
        except OSError as error:
            why = error.strerror or str(error)
            raise folders.CheckpointError(
                f"output_dir={folder}: cannot be written to ({why}); give another"
            ) from error
    record_of(trainer).run = run.identity
    try:
        yield run
    finally:
        for lock in held:
            lock.release()


def is_restart(former: dict, count: int, agents: list[str]) -> bool:
    """Return whether a launcher of the folder's last owner started these processes too, after that one.

    Its count says so when a rank was lost, but stays 0 when a node has joined: then one of its agents is still there.
    The names of two jobs may be the same, and are where none was given.
    """
    if not agents or "run" not in former or former.get("pid") == os.getpid():
        return False
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return bool(set(agents) & set(former.get("agents", ()))) or (
        count > 0 and name != "none" and former.get("launch") == name
    )


#: Where Trainer keeps what callbacks remember, in one process: the signature of a run.
SIGNED = "hf_parallel"


@dataclass(eq=False)
class Signature(TrainerCallback):
    """The signature of a run: its name, and its rows per step."""

    facts: dict[str, object]

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        state.stateful_callbacks[SIGNED] = self.facts


def keep_rows_per_step(trainer: Trainer, rows: int | None, data_ranks: int) -> None:
    """With fewer or more data ranks than before: as many rows per step, by other accumulation or smaller batches.

    Else rows would be skipped or repeated, and the learning rate would be another one per row.
    """
    args, now = trainer.args, trainer.get_total_train_batch_size(trainer.args)
    found = divide_rows(rows, data_ranks, args.per_device_train_batch_size) if rows != now else None
    if rows is None or found is None or trainer._train_batch_size != args.per_device_train_batch_size:
        return
    former = (args.per_device_train_batch_size, args.gradient_accumulation_steps)
    args.per_device_train_batch_size, args.gradient_accumulation_steps = found
    trainer._train_batch_size = found[0]
    if runtime.current() is not None:
        check_arguments(args)
    report.say(
        f"{rows} rows per step are kept, by {data_ranks} data ranks now: per_device_train_batch_size "
        f"{former[0]} -> {found[0]}, gradient_accumulation_steps {former[1]} -> {found[1]}"
    )


def divide_rows(rows: int | None, data_ranks: int, batch: int) -> tuple[int, int] | None:
    """Return the rows per micro-step, at most `batch`, and how many micro-steps; None if they do not divide."""
    if rows is None or rows % data_ranks:
        return None
    share = rows // data_ranks
    size = next(size for size in range(min(batch, share), 0, -1) if share % size == 0)
    return size, share // size


def find_agent() -> str | None:
    """Return the process of torchrun on this node, which starts ranks again; None under another launcher."""
    return f"{socket.gethostname()}:{os.getppid()}" if "TORCHELASTIC_RUN_ID" in os.environ else None

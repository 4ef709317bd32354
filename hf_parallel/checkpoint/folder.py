"""A checkpoint's folder, which is whole or not there at all.

tmp-checkpoint-20/     while it is written
checkpoint-20/         the same folder, renamed once every rank has finished, it is described, and all is on disk
hf_parallel.lock       held by rank 0 of the one run that may write here
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
from collections.abc import Mapping
from typing import IO, Any

from hf_parallel.checkpoint.manifest import find_damages, has_manifest, write_manifest
from hf_parallel.checkpoint.saving import CheckpointError, Saving, make_lost_peer_error, wait_for_writer
from hf_parallel.ranks.mesh import ParallelMesh

LOCK = "_hf_parallel.lock"
LAYOUT = "hf_parallel.json"
_UNFINISHED = "_tmp-"  # not "checkpoint-…", by which Trainer counts checkpoints; "_…" is never uploaded
_FORMER = "_tmp-former-"
#: Seconds that a run which has just ended may take to let go of the folder.
PATIENCE = 5.0


class Checkpoint(Saving):
    """A save into `folder`, which becomes `final`."""

    def __init__(self, mesh: ParallelMesh, final: str, in_background: bool = False):
        super().__init__(mesh, in_background)
        self.final = os.path.abspath(final)
        self.run, self.name = os.path.split(self.final)
        self.folder = os.path.join(self.run, _UNFINISHED + self.name)

    def begin(self) -> None:
        """Make the folder, and remove what a crash has left. Collective."""
        wait_for_writer()
        if self.mesh.rank == 0:
            with self.noting():
                os.makedirs(self.run, exist_ok=True)
                put_back_former(self.run)
                starts = (f"{_UNFINISHED}checkpoint", f"{_FORMER}checkpoint")
                for found in os.listdir(self.run):
                    if found.startswith(starts) or found in (_UNFINISHED + self.name, _FORMER + self.name):
                        shutil.rmtree(os.path.join(self.run, found))
                os.makedirs(self.folder)
        self._agree()

    def commit(self) -> None:
        """Write what was put off, wait for all ranks, and give the folder its name. Collective, in any thread.

        Raises:
            CheckpointError: a rank could not write, or is gone. Nothing has the checkpoint's name then.
        """
        try:
            self.finish_streams()
        except RuntimeError as error:
            raise self.lost_peer(error) from error
        self._agree()
        if self.mesh.rank == 0:
            with self.noting():
                write_manifest(self.folder, self.checksums)
                # Flush everything in the folder from the system's memory to disk
                for place, _, files in os.walk(self.folder):
                    for file in files:
                        _flush_entry(os.path.join(place, file))
                    _flush_entry(place)
                former = os.path.join(self.run, _FORMER + self.name)
                if os.path.isdir(self.final):
                    os.rename(self.final, former)
                os.rename(self.folder, self.final)
                _flush_entry(self.run)
                shutil.rmtree(former, ignore_errors=True)
        self._agree(complete=True)

    def _agree(self, complete: bool = False) -> None:
        try:
            self.agree()
        except CheckpointError as error:
            if self.mesh.rank == 0:
                shutil.rmtree(self.folder, ignore_errors=True)
            raise CheckpointError(f"{self.name} was not written; {self._newest()} ({error})") from None
        except RuntimeError as error:
            if complete:  # rank 0 may or may not have renamed it by now
                told = f"all of {self.name} was written; whether it has its name is not known"
                raise make_lost_peer_error(error, told) from error
            raise self.lost_peer(error) from error

    def lost_peer(self, error: RuntimeError) -> CheckpointError:
        """Return the error to raise when a transfer has failed."""
        return make_lost_peer_error(error, f"{self.name} was not written; {self._newest()}")

    def _newest(self) -> str:
        last = next(iter(list_whole_checkpoints(self.run)), None)
        return "there is no earlier one" if last is None else f"{os.path.basename(last)} is the newest whole one"


def remove(path: str) -> None:
    """Delete a checkpoint: first its name, so that a crash leaves no half of it behind."""
    run, name = os.path.split(path.rstrip(os.sep))
    gone = os.path.join(run, _UNFINISHED + name)
    os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def put_back_former(run: str) -> None:
    """Rename former folders back after a crash between the two renames of `Checkpoint.commit`."""
    for found in os.listdir(run):
        name = os.path.join(run, found.removeprefix(_FORMER))
        if found.startswith(_FORMER) and not os.path.exists(name):
            os.rename(os.path.join(run, found), name)


def _flush_entry(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---- which checkpoint ----------------------------------------------------------------------------------------------


def list_whole_checkpoints(run: str) -> list[str]:
    """Return Trainer's checkpoints that look whole, newest first: nothing is missing, every size is right."""
    return [path for path in list_by_step(run) if not find_flaws(path)]


def find_flaws(path: str) -> list[str]:
    """Return what is visibly wrong with a checkpoint, a line each; no file is read."""
    if not os.path.isfile(os.path.join(path, "trainer_state.json")):
        return ["trainer_state.json is missing"]
    if not os.path.isfile(os.path.join(path, LAYOUT)) and not has_manifest(path):
        return []  # plain Trainer's, which has no manifest and writes its state last
    return find_damages(path, shares=0)


def list_by_step(run: str) -> list[str]:
    """Return the folders named like a checkpoint, whatever is in them, newest first."""
    if not os.path.isdir(run):
        return []
    steps = {}
    for name in os.listdir(run):
        stem, _, step = name.partition("-")
        if stem == "checkpoint" and step.isdigit():
            steps[int(step)] = os.path.join(run, name)
    return [steps[step] for step in sorted(steps, reverse=True)]


# ---- one run per folder --------------------------------------------------------------------------------------------


class Lock:
    """A lock on a folder that only this process may write to. It ends with the process, however that ends.

    A POSIX record lock: workers that a process has forked do not keep it, and network file systems know it.

    Raises:
        CheckpointError: another process holds the lock for `patience` seconds.
    """

    def __init__(self, folder: str, patience: float = PATIENCE):
        import fcntl

        os.makedirs(folder, exist_ok=True)
        self.path = os.path.join(folder, LOCK)
        self.former: dict[str, Any] = {}  # what the last owner has written
        self.file: IO[str] | None = None
        end = time.monotonic() + patience
        file = open(self.path, "a+", encoding="utf-8")  # noqa: SIM115 - open for as long as it is held
        while True:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.former, self.file = self._read(file), file
                return
            except (BlockingIOError, PermissionError):
                if time.monotonic() > end:
                    owner = self._read(file)
                    file.close()
                    raise CheckpointError(
                        f"{os.path.dirname(self.path)} belongs to another run (process {owner.get('pid', '?')} on "
                        f"{owner.get('host', '?')}), which still trains; another output_dir works"
                    ) from None
                time.sleep(0.1)
            except OSError:  # a file system without locks
                file.close()
                return

    @staticmethod
    def _read(file: IO[str]) -> dict[str, Any]:
        file.seek(0)
        try:
            found = json.loads(file.read())
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def write(self, facts: Mapping[str, object]) -> None:
        """Say who owns the folder now."""
        if self.file is not None:
            self.file.truncate(0)
            self.file.write(json.dumps({**facts, "pid": os.getpid(), "host": socket.gethostname()}))
            self.file.flush()

    def release(self) -> None:
        """Let others write."""
        if self.file is not None:
            with contextlib.suppress(OSError):
                self.file.close()

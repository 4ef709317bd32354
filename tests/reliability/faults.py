"""A small training run whose second save meets an accident, and what its folder must look like afterwards.

step 1, save, step 2, save (here), step 3, save
"""

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

import hf_parallel.hooks.patches  # noqa: F401 - once, before the ranks are forked
from tests.distributed import RankFailure, run
from tests.resuming import Ended, train
from tests.training import activate, axes

SPEC, FOUR = "dp_shard=2", "tp=2,dp_shard=2"
LAST, BAD = 1, 2  # the last good checkpoint, and the one that is disturbed
STEPS = 3
LIMIT_S = 120  # seconds; on a free machine 2 to 8
SHORT = {"max_steps": STEPS, "save_steps": 1, "gradient_accumulation_steps": 1}


def disturbed(spec: str, folder: str, out: str, fault: Callable, **settings: Any) -> Ended:
    """On one rank: the run with `fault(trainer)` set up before it."""
    activate(spec)
    return train(folder, out, axes(spec)["data_ranks"], change=fault, **{**SHORT, **settings})[0]


def failure(spec: str, folder: str, out: str, fault: Callable, **settings: Any) -> RankFailure:
    """How the ranks of a disturbed run ended."""
    try:
        run(partial(disturbed, spec, folder, out, fault, **settings), axes(spec)["world"], init=False, timeout=LIMIT_S)
    except RankFailure as error:
        return error
    raise AssertionError("the run took no notice of the fault")


def whole(spec: str, *jobs: tuple[str, str, Any]) -> list[Ended]:
    """Undisturbed runs, one after the other: (initial model, output folder, what to resume from)."""
    call = partial(_whole, spec, jobs)
    return run(call, axes(spec)["world"], init=False, timeout=LIMIT_S)[0]


def _whole(spec: str, jobs: Any) -> list[Ended]:
    activate(spec)
    ranks = axes(spec)["data_ranks"]
    return [train(folder, out, ranks, resume=resume, **SHORT)[0] for folder, out, resume in jobs]


# ---- accidents -----------------------------------------------------------------------------------------------------


def kill() -> None:
    """End this process as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(phase: str, rank: int, trainer: Any) -> None:
    """Kill this rank at a phase of the second save."""
    if int(os.environ["RANK"]) == rank:
        PHASES[phase](kill_in_bad_save())


def kill_in_bad_save() -> Callable:
    from hf_parallel.checkpoint import folder

    begun, init = [], folder.Checkpoint.__init__

    def noted(self: Any, mesh: Any, final: str, *args: Any, **kwargs: Any) -> None:
        begun.append(os.path.basename(final))
        init(self, mesh, final, *args, **kwargs)

    folder.Checkpoint.__init__ = noted
    return lambda: begun[-1] in (f"checkpoint-{BAD}", f"checkpoint_{BAD - 1}") and kill()


def _before(act: Callable) -> None:
    from hf_parallel.checkpoint import folder

    _first(folder.Checkpoint, "begin", act)


def _small_files(act: Callable) -> None:
    from hf_parallel.hooks.trainer import checkpoints

    _first(checkpoints, "save_rng_state", act)


def _weights(act: Callable) -> None:
    _in_the_middle("model.safetensors", act)


def _optimizer(act: Callable) -> None:
    _in_the_middle("state.safetensors", act)


def _adapter(act: Callable) -> None:
    """Tensors of an adapter are on their way to rank 0."""
    from hf_parallel.checkpoint import weights

    _at_call(weights, "gather_item", 3, act)


def _flush(act: Callable) -> None:
    """All is written, and not yet sure to be on disk."""
    from hf_parallel.checkpoint.saving import TensorFile

    _first(TensorFile, "close", act)


def _publish(act: Callable) -> None:
    """This rank's bytes are on disk, and the file has not got its name."""
    from hf_parallel.checkpoint import saving

    _first(saving, "_publish", act)


def _manifest(act: Callable) -> None:
    """When this rank has finished: rank 0 before it writes the manifest."""
    from hf_parallel.checkpoint import folder

    commit = folder.Checkpoint.finish_streams

    def finish(self: Any) -> None:
        commit(self)
        act()

    folder.Checkpoint.finish_streams = finish


def _rename(act: Callable) -> None:
    """Between manifest and rename on rank 0; while they wait for it on the others."""
    from hf_parallel.checkpoint import folder

    agree, rename = folder.Checkpoint._agree, os.rename

    def renamed(source: str, target: str) -> None:
        if os.path.isdir(source):
            act()
        rename(source, target)

    def last(self: Any, complete: bool = False) -> None:
        if complete:
            act()
        agree(self, complete)

    if os.environ["RANK"] == "0":
        os.rename = renamed
    else:
        folder.Checkpoint._agree = last


def _after(act: Callable) -> None:
    from hf_parallel.checkpoint import folder

    commit = folder.Checkpoint.commit

    def committed(self: Any) -> None:
        commit(self)
        act()

    folder.Checkpoint.commit = committed


PHASES: dict[str, Callable] = {
    "before": _before,
    "small files": _small_files,
    "weights": _weights,
    "adapter": _adapter,
    "optimizer": _optimizer,
    "flush": _flush,
    "publish": _publish,
    "manifest": _manifest,
    "rename": _rename,
    "after": _after,
}


def _first(owner: Any, name: str, act: Callable) -> None:
    original = getattr(owner, name)

    def replacement(*args: Any, **kwargs: Any) -> Any:
        act()
        return original(*args, **kwargs)

    setattr(owner, name, replacement)


def _in_the_middle(file: str, act: Callable) -> None:
    """This rank has put three pieces into a file, which is half written."""
    from hf_parallel.checkpoint.saving import TensorFile

    put, pieces = TensorFile.put, []

    def replacement(self: Any, *args: Any) -> None:
        if self.path.endswith(file):
            pieces.append(self)
            if len(pieces) % 3 == 0:
                act()
        put(self, *args)

    TensorFile.put = replacement


def _at_call(owner: Any, name: str, number: int, act: Callable) -> None:
    """At every so manieth call."""
    original, calls = getattr(owner, name), []

    def replacement(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) % number == 0:
            act()
        return original(*args, **kwargs)

    setattr(owner, name, replacement)


# ---- disks ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk(name: str, rank: int | None = None) -> Iterator[None]:
    """Files of this name go to a device that is always full: whoever writes them, or this rank alone."""
    import builtins

    opened, saved, write = builtins.open, torch.save, os.pwrite

    def meets(path: Any) -> bool:
        here = rank is None or int(os.environ["RANK"]) == rank
        return here and str(getattr(path, "name", path)).removesuffix(".tmp").endswith(name)

    def open_it(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return opened("/dev/full" if "w" in mode and meets(path) else path, mode, *args, **kwargs)

    def write_it(handle: int, data: Any, start: int) -> int:
        if meets(os.readlink(f"/proc/self/fd/{handle}")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data, start)

    builtins.open, torch.save = (
        open_it,
        lambda what, path, **how: saved(what, "/dev/full" if meets(path) else path, **how),
    )
    os.pwrite = write_it
    try:
        yield
    finally:
        builtins.open, torch.save, os.pwrite = opened, saved, write


@contextlib.contextmanager
def failing(call: str, name: str, rank: int) -> Iterator[None]:
    """A call on a file of this name that the system refuses, on one rank: `open`, or `fsync` of what is in memory."""
    original = getattr(os, call)

    def refused(file: Any, *args: Any, **kwargs: Any) -> Any:
        path = file if call == "open" else os.readlink(f"/proc/self/fd/{file}")
        if int(os.environ["RANK"]) == rank and str(path).endswith(f"{name}.tmp"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return original(file, *args, **kwargs)

    setattr(os, call, refused)
    try:
        yield
    finally:
        setattr(os, call, original)


def truncate(path: Path) -> None:
    """Lose the second half of a file."""
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def delete(path: Path) -> None:
    """Lose a file."""
    path.unlink()

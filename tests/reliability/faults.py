"""A small training run whose second save meets an accident, and what its folder must look like afterwards.

step 1, save, step 2, save (here), step 3, save
"""

import contextlib
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
from tests.training import axes

SPEC = "dp_shard=2"
LAST, BAD = 1, 2  # the last good checkpoint, and the one that is disturbed
STEPS = 3
LIMIT_S = 60
SHORT = {"max_steps": STEPS, "save_steps": 1, "gradient_accumulation_steps": 1}


def disturbed(spec: str, folder: str, out: str, fault: Callable, **settings: Any) -> Ended:
    """On one rank: the run with `fault(trainer)` set up before it."""
    from hf_parallel import hooks

    hooks.activate(spec, source="test")
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
    from hf_parallel import hooks

    hooks.activate(spec, source="test")
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
    return lambda: begun[-1] == f"checkpoint-{BAD}" and kill()


def _before(act: Callable) -> None:
    from hf_parallel.checkpoint import folder

    _first(folder.Checkpoint, "begin", act)


def _small_files(act: Callable) -> None:
    from transformers import Trainer

    _first(Trainer, "_save_rng_state", act)


def _weights(act: Callable) -> None:
    from hf_parallel.checkpoint import save

    _in_the_middle(save, act)


def _optimizer(act: Callable) -> None:
    from hf_parallel.checkpoint import resume

    _in_the_middle(resume, act)


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

    agree = folder.Checkpoint._agree

    def last(self: Any, complete: bool = False) -> None:
        if complete:
            act()
        agree(self, complete)

    if os.environ["RANK"] == "0":
        _first(folder.Checkpoint, "_rename", act)
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
    "optimizer": _optimizer,
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


def _in_the_middle(module: Any, act: Callable) -> None:
    """Three tensors of a stream are through, and a file is half written."""
    original = module.gathered

    def replacement(*args: Any) -> Iterator[Any]:
        for number, found in enumerate(original(*args)):
            if number == 3:
                act()
            yield found

    module.gathered = replacement


# ---- disks ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def full_disk(name: str) -> Iterator[None]:
    """Files of this name go to a device that is always full, whoever writes them."""
    import builtins

    opened, saved = builtins.open, torch.save

    def meets(path: Any) -> bool:
        return str(getattr(path, "name", path)).removesuffix(".tmp").endswith(name)

    def open_it(path: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return opened("/dev/full" if "w" in mode and meets(path) else path, mode, *args, **kwargs)

    builtins.open, torch.save = open_it, lambda what, path: saved(what, "/dev/full" if meets(path) else path)
    try:
        yield
    finally:
        builtins.open, torch.save = opened, saved


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

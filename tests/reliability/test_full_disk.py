"""What cannot be written is told on every rank in the same words; nothing that was whole is lost."""

import contextlib
import os
import resource
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.distributed import run
from tests.refusals import find_line
from tests.reliability.faults import LIMIT_S, SPEC, failing, full_disk
from tests.resuming import train
from tests.training import activate, axes

pytestmark = pytest.mark.clock

SOON_S = LIMIT_S / 2  # a fraction of a second on a free machine; a collective that nobody joins waits for minutes

#: Whose disk is full: the file that does not fit, and the rank that writes it.
FILES = {
    "model.safetensors": 0,
    "optimizer/state.safetensors": 0,
    "optimizer/index.json": 0,
    "scheduler.pt": 0,
    "rng_state_1.pth": 1,
    "trainer_state.json": 0,
    "config.json": 0,
    "training_args.bin": 0,
    "manifest.json": 0,
}


#: Who meets it, and what: all ranks write these files.
ON_ONE_RANK = {
    "weights on rank 1": (1, full_disk, "model.safetensors", 1),
    "weights on rank 0": (0, full_disk, "model.safetensors", 0),
    "moments on rank 1": (1, full_disk, "optimizer/state.safetensors", 1),
    "weights that rank 1 cannot open": (1, failing, "open", "model.safetensors", 1),
    "weights that rank 1 cannot flush": (1, failing, "fsync", "model.safetensors", 1),
    "moments that rank 1 cannot flush": (1, failing, "fsync", "optimizer/state.safetensors", 1),
}


@contextlib.contextmanager
def small_files(size: int):
    """The kernel refuses to let any file grow beyond this many bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@contextlib.contextmanager
def no_rename():
    rename = os.rename

    def refused(source, target):
        raise OSError(5, "Input/output error", target)

    os.rename = refused
    try:
        yield
    finally:
        os.rename = rename


def saved_in_vain(initial: str, out: str) -> dict[str, tuple[str, list[str]]]:
    """A run of one step, saved; then saves of another step on disks that are full: what they say, and what is left."""
    from hf_parallel import checkpoint

    activate(SPEC)
    faults = {name: partial(full_disk, name) for name in FILES}
    faults |= {name: partial(*fault) for name, (_, *fault) in ON_ONE_RANK.items()}
    faults |= {"any file above 64 KB": partial(small_files, 1 << 16), "the folder's name": no_rename}
    _, trainer = train(initial, out, axes(SPEC)["data_ranks"], max_steps=1, save_steps=1)
    found = {}
    for name, fault in faults.items():
        trainer.state.global_step = 2
        start = time.monotonic()
        try:
            with fault():
                trainer._save_checkpoint(trainer.model, None)
            found[name] = "", []
        except checkpoint.CheckpointError as error:
            assert time.monotonic() - start < SOON_S
            torch.distributed.barrier()
            found[name] = str(error), sorted(name for name in os.listdir(out) if "checkpoint" in name)
        torch.distributed.barrier()
    trainer._save_checkpoint(trainer.model, None)
    assert not checkpoint.find_flaws(f"{out}/checkpoint-2")
    found["plain"] = saved_over(trainer.model, f"{out}/checkpoint-1")
    return found


def saved_over(model, folder: str) -> tuple[str, list[str]]:
    """Over weights of another step, in more files, on a full disk of rank 1: what it says, and what has changed."""
    from hf_parallel import checkpoint

    former = {path.name: path.read_bytes() for path in Path(folder).glob("model*")}
    with full_disk(".safetensors", 1), pytest.raises(checkpoint.CheckpointError) as caught:
        model.save_pretrained(folder, max_shard_size="50KB")
    now = {path.name: path.read_bytes() for path in Path(folder).glob("model*")}
    torch.distributed.barrier()
    return str(caught.value), sorted(name for name in now.keys() | former if now.get(name) != former.get(name))


@pytest.fixture(scope="module")
def told(runs, tmp_path_factory):
    out = str(tmp_path_factory.mktemp("full"))
    return run(saved_in_vain, axes(SPEC)["world"], runs.initial("qwen3"), out, init=False, timeout=LIMIT_S)


@pytest.mark.parametrize("name", [*FILES, *ON_ONE_RANK, "any file above 64 KB", "the folder's name"])
def test_a_full_disk(told, name):
    (text, left), (other, _) = (rank[name] for rank in told)
    assert text == other
    assert find_line(text, "checkpoint-2", "checkpoint-1")
    assert f"rank {ON_ONE_RANK[name][0] if name in ON_ONE_RANK else FILES.get(name, 0)}: " in text
    assert name not in ON_ONE_RANK or text.count("rank ") == 1
    assert not name.endswith(".safetensors") or name in text
    assert left == ["checkpoint-1"]


def test_a_full_disk_under_a_plain_save(told):
    """The folder holds what it has held before, and nothing else."""
    (text, changed), (other, _) = (rank["plain"] for rank in told)
    assert text == other
    assert text.startswith("rank 1: OSError: [Errno 28]")
    assert changed == []

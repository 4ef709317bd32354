"""Disks that are full, files that are cut, processes that are killed: a clear line, and what was saved goes on."""

import errno
import os
import signal
from functools import partial

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from hf_parallel.axes.data import files as state_file
from hf_parallel.axes.data import host_step
from tests.distributed import RankFailure, run
from tests.parity.test_offload import Deep
from tests.resuming import ONE, STEPS, log_differences, train, trained
from tests.training import activate, none

BETWEEN = 2  # steps from one checkpoint to the next


class Breaks(TrainerCallback):
    """Something goes wrong on the second rank when step `after` is done."""

    def __init__(self, fault: str, after: int):
        self.fault, self.after = fault, after

    def on_step_begin(self, args, state, control, optimizer=None, **kwargs):
        if state.global_step == self.after and dist.get_rank() == 1:
            getattr(self, self.fault)(getattr(optimizer, "optimizer", optimizer))

    def full(self, optimizer):
        def msync(*args):
            state_file.ctypes.set_errno(errno.ENOSPC)
            return -1

        state_file._libc.msync = msync

    def cut(self, optimizer):
        os.ftruncate(vars(optimizer)[host_step._HELD].file._file.fileno(), 4096)

    def killed(self, optimizer):
        state_file.StatePart.write_back = lambda self, fd: os.kill(os.getpid(), signal.SIGKILL)


def broken(spec: str, job: dict, fault: str, after: int) -> None:
    activate(spec)
    train(data_ranks=2, change=lambda trainer: trainer.add_callback(Breaks(fault, after)), **job)


@pytest.mark.parametrize(
    ("fault", "after", "kind", "words"),
    [
        ("full", 2, "OSError", ["optimizer states could not be written", "No space left", "GiB are free"]),
        ("full", 3, "CheckpointError", ["optimizer states could not be written", "No space left"]),  # before a save
        ("cut", 2, "OSError", ["optimizer states were cut from", "GiB to 3.81e-06 GiB"]),
        ("killed", 2, "Killed", []),
    ],
)
def test_what_was_saved_goes_on(runs, tmp_path, fault, after, kind, words):
    initial, files = runs.initial("llama"), tmp_path / "states"
    spec = f"dp_shard=2,offload=nvme:{files}"
    (whole,) = trained(ONE, {"folder": initial, "out": str(tmp_path / "whole")})
    job = {"folder": initial, "out": str(tmp_path / "run"), "save_steps": BETWEEN}
    with pytest.raises(RankFailure) as caught:
        run(partial(broken, spec, job, fault, after), 2, init=False)
    assert caught.value.kind == kind, caught.value
    for word in [*words, f"offload=nvme:{files}", "from the last checkpoint"] if words else ():
        assert word in caught.value.message, caught.value.message
    assert [path.name for path in (tmp_path / "run").glob("*checkpoint*")] == [f"checkpoint-{BETWEEN}"]
    assert os.listdir(files) == []
    saved = str(tmp_path / "run" / f"checkpoint-{BETWEEN}")
    (again,) = trained(spec, {**job, "resume": saved})
    # relative; two epochs of AdamW at 1e-2 feed the rounding of sums back
    none(log_differences(again, whole, range(BETWEEN + 1, STEPS + 1), 1e-4))


@pytest.mark.parametrize("prepared", [True, False], ids=["at-start", "at-the-first-step"])
def test_a_disk_without_room_is_refused_with_the_number(tmp_path, prepared):
    """Where a script prepares its optimizer it is told at once, else when it steps."""

    def step():
        import hf_parallel

        def full(*args):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        os.posix_fallocate = full
        model = hf_parallel.parallelize(Deep(), f"dp_shard=1,offload=nvme:{tmp_path}")
        optimizer = torch.optim.AdamW(model.parameters())
        if prepared:
            host_step.check_host_optimizer(optimizer)
            raise AssertionError("not refused")
        model(torch.ones(1)).backward()
        optimizer.step()

    with pytest.raises(RankFailure) as caught:
        run(step, 1)
    message = caught.value.message
    for word in (f"offload=nvme:{tmp_path}", "0.125 GiB", "are free", "offload=optimizer"):
        assert word in message, message


def test_a_disk_gives_room_once(tmp_path):
    """An optimizer that nobody prepared is looked at when it first steps."""

    def step():
        import hf_parallel

        sizes, fallocate = [], os.posix_fallocate
        os.posix_fallocate = lambda fd, start, size: sizes.append(size) or fallocate(fd, start, size)
        model = hf_parallel.parallelize(torch.nn.Linear(64, 64, bias=False), f"dp_shard=1,offload=nvme:{tmp_path}")
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        return sizes

    assert run(step, 1) == [[2 * 4 * 64 * 64]]


def test_room_for_all_states_is_taken_at_the_start(tmp_path, monkeypatch):
    """Each chunk's states begin at a page, each state at a multiple of 64 bytes: of odd sizes, too."""
    monkeypatch.setattr(host_step, "CHUNK", 1000)

    def step():
        import hf_parallel

        model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Linear(33, 5, bias=False))
        hf_parallel.parallelize(model, f"dp_shard=1,offload=nvme:{tmp_path}")
        optimizer = torch.optim.AdamW(model.parameters())
        host_step.check_host_optimizer(optimizer)
        file = vars(optimizer)[host_step._HELD].file
        taken = file._reserved
        model(torch.ones(1, 7)).sum().backward()
        optimizer.step()
        return taken, file._reserved, file._used

    taken, reserved, used = run(step, 1)[0]
    assert taken == reserved == used > 4096


def test_parameters_that_were_cut_between_steps(tmp_path):
    """The file has no name, so nobody can take it away; what is left of it is not computed with."""

    def steps():
        import hf_parallel
        from hf_parallel.axes.data import files as parameter_file

        files, made = [], parameter_file.StateFile
        parameter_file.StateFile = lambda *args: files.append(made(*args)) or files[0]
        model = hf_parallel.parallelize(torch.nn.Linear(33, 515), f"dp_shard=2,offload=nvme_all:{tmp_path}")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(1, 33)).sum().backward()
            optimizer.step()
        assert os.listdir(tmp_path) == []
        os.ftruncate(files[0]._file.fileno(), 4096)
        model(torch.ones(1, 33))

    with pytest.raises(RankFailure) as caught:
        run(steps, 2)
    assert caught.value.kind == "OSError", caught.value
    for word in ("parameters were cut from", "GiB to 3.81e-06 GiB", "from the last checkpoint"):
        assert word in caught.value.message, caught.value.message

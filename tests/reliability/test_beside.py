"""What fails beside the training, in a thread or a worker of the data loader, ends all ranks, soon and by name."""

import os
import time
from functools import partial

import pytest
from transformers import TrainerCallback

import tests.distributed
from tests.reliability.faults import LIMIT_S, SPEC, failure, kill

pytestmark = pytest.mark.clock

FEW, MANY = 150, 200  # steps


class SaveAtOnce(TrainerCallback):
    """One save, in the first step; and a training that must not go on for long."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == 1

    def on_step_begin(self, args, state, control, **kwargs):
        assert state.global_step < FEW, "nobody noticed"
        time.sleep(0.02)


def broken_writer(trainer) -> None:
    from hf_parallel.checkpoint import resume

    def write(*args):
        raise ValueError("a mistake in the thread")

    if os.environ["RANK"] == "1":
        resume._write_tensors = write
    trainer.add_callback(SaveAtOnce())


def test_a_thread_that_writes_a_checkpoint(runs, tmp_path):
    """The other rank waits for it in its own thread, while its training goes on."""
    job = (runs.initial("llama"), str(tmp_path), broken_writer)
    ended = failure(f"{SPEC},async_save=true", *job, max_steps=MANY, save_steps=MANY)
    assert ended.kinds[1] == "ValueError"
    assert ended.rank == 1
    assert "a mistake in the thread" in ended.message
    assert "in write" in str(ended)  # where it happened
    assert ended.kinds[0] in ("CheckpointError", "RuntimeError")


class Broken:
    """Rows of which one on rank 1 cannot be read."""

    def __init__(self, rows, act):
        self.rows, self.act = rows, act

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if index == 20 and os.environ["RANK"] == "1":
            self.act()
        return self.rows[index]


def complain() -> None:
    raise ValueError("a mistake in the worker")


def broken_rows(act, trainer) -> None:
    trainer.train_dataset = Broken(trainer.train_dataset, act)


@pytest.mark.parametrize(
    ("act", "kind", "text"),
    [(complain, "ValueError", "a mistake in the worker"), (kill, "RuntimeError", "is killed by signal: Killed")],
)
def test_a_worker_of_the_data_loader(monkeypatch, runs, tmp_path, act, kind, text):
    """The worker that is left of a rank that has ended goes by itself within 5 s; the runner ends it at once."""
    monkeypatch.setattr(tests.distributed, "GRACE_S", 12.0)
    start = time.monotonic()
    job = (runs.initial("llama"), str(tmp_path), partial(broken_rows, act))
    ended = failure(SPEC, *job, max_steps=MANY, save_steps=MANY, dataloader_num_workers=1)
    assert time.monotonic() - start < LIMIT_S / 2
    assert ended.rank == 1
    assert ended.kinds == {1: kind, 0: "RuntimeError"}
    assert text in ended.message

"""Ranks that stand still where none of them may be at fault: a line says where they are, and the run goes on."""

import os
import time

import pytest
from torch.utils.data import Dataset

from tests.distributed import run
from tests.refusals import find_line
from tests.rows import data
from tests.training import activate, arguments_of, trainer_of

pytestmark = pytest.mark.clock

HELD_S = 6.0


class Held(Dataset):
    """An example that a worker of rank 1 waits for, as where a worker is stuck."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        if os.environ["RANK"] == "1" and index == 0:
            time.sleep(HELD_S)
        return self.rows[index]


def train(folder: str, out: str) -> int:
    from transformers import AutoModelForCausalLM

    from hf_parallel.ranks import desync

    desync.LOOK_S, desync.QUIET_S, desync.IDLE = 0.2, 2.0, 0.2
    ranks = activate("pp=2")
    arguments = arguments_of(out, ranks, max_steps=2, dataloader_num_workers=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer, _ = trainer_of(model, out, settings=arguments, train_dataset=Held(data("llama", 12, 1)))
    trainer.train()
    return trainer.state.global_step


def test_a_stuck_worker_of_one_rank(runs, tmp_path, capfd):
    assert run(train, 2, runs.initial("llama"), str(tmp_path), init=False) == [2, 2]
    said = capfd.readouterr().err
    assert "all ranks have been idle for" in said
    assert find_line(said, "rank 1", "data loader", "test_idle_ranks.py")

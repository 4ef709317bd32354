"""A rank that is killed in the middle of training takes the whole run down, quickly and by name."""

import os
import re

import pytest

from tests.reliability.launching import hf_parallel_launch, launch, torchrun

pytestmark = pytest.mark.clock

LIMIT_S = 30

SCRIPT = """
import os
import signal
import sys
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

notes = Path(sys.argv[1])
(notes / f"pid-{os.environ['RANK']}").write_text(str(os.getpid()))


class Accident(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1 and os.environ["RANK"] == "1":
            (notes / "killed-at").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)


rows = [{"input_ids": torch.arange(16) + i, "labels": torch.arange(16) + i} for i in range(40)]
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
arguments = TrainingArguments(sys.argv[2], per_device_train_batch_size=4, report_to=[], max_steps=10)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows, callbacks=[Accident()])
trainer.train()
(notes / "trained").touch()
"""


@pytest.mark.slow
@pytest.mark.parametrize("launcher", [torchrun, hf_parallel_launch])
def test_all_ranks_end_and_the_killed_one_is_named(launcher, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    ended = launch(launcher(2, "tp=2"), str(script), str(tmp_path), str(tmp_path / "out"))
    assert (tmp_path / "killed-at").exists(), f"no second step:\n{ended.err[-3000:]}"
    took = ended.when - float((tmp_path / "killed-at").read_text())
    assert took <= LIMIT_S, f"the launcher ended {took:.0f} s after the kill"
    assert ended.code != 0
    assert not (tmp_path / "trained").exists()
    assert re.search(r"\brank\b\W*1\b", ended.out + ended.err), f"rank 1 is not named:\n{ended.err[-3000:]}"
    assert [rank for rank in (0, 1) if alive(int((tmp_path / f"pid-{rank}").read_text()))] == []


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

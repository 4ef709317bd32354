"""`torchrun --max-restarts`: an unchanged script that loses a rank twice ends where one that lost none does."""

import json
import runpy
import sys

import pytest

from tests.distributed import run
from tests.reliability.launching import launch, torchrun

SCRIPT = """
import json
import os
import signal
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

notes = Path(sys.argv[1])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class Accident(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if sys.argv[2] == "killed" and os.environ["RANK"] == "1" and (attempt, state.global_step) in ((0, 2), (1, 5)):
            os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (24, 16))]
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2,
)
arguments = TrainingArguments(
    str(notes / sys.argv[2]), per_device_train_batch_size=2, report_to=[], max_steps=8, save_steps=2, logging_steps=1,
    learning_rate=1e-2,
)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows, callbacks=[Accident()])
trainer.train()
losses = {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}
if trainer.is_world_process_zero():
    (notes / f"{sys.argv[2]}.json").write_text(json.dumps([attempt, losses]))
"""


def undisturbed(script: str, notes: str) -> None:
    """The same script on ranks of the harness, which start in a moment."""
    from hf_parallel import hooks

    hooks.activate("dp_shard=-1", source="test")
    sys.argv = [script, notes, "through"]
    runpy.run_path(script, run_name="__main__")


@pytest.mark.slow
def test_two_lost_ranks_change_nothing(tmp_path):
    """Every loss is equal bit for bit: those before the last restart were written down by the former attempts."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = torchrun(2, "dp_shard=-1", "--max-restarts", "2")
    ended = launch(command, str(script), str(tmp_path), "killed", timeout=180)
    assert ended.code == 0, ended.err[-3000:]
    for step in (2, 4):
        assert f"started again by the launcher: going on from {tmp_path}/killed/checkpoint-{step}" in ended.err
    run(undisturbed, 2, str(script), str(tmp_path), env={"TORCHELASTIC_RESTART_COUNT": "0"}, init=False)
    killed, through = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("killed", "through"))
    assert [killed[0], through[0]] == [2, 0]
    assert killed[1] == through[1]
    assert set(killed[1]) == {str(step) for step in range(1, 9)}

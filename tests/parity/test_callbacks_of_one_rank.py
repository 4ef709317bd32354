"""Callbacks that decide something on one rank alone, as by a clock: all ranks do what rank 0 decides."""

import os

import pytest
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.distributed import run
from tests.refusals import find_line
from tests.rows import data
from tests.training import activate, arguments_of, trainer_of


class Decides(TrainerCallback):
    """Sets a flag of Trainer's control at one event of step 2, on one rank alone."""

    def __init__(self, event, flag, rank):
        self.flag, self.here = flag, os.environ["RANK"] == str(rank)
        setattr(self, event, self.decide)

    def decide(self, args, state, control, **kwargs):
        if self.here and state.global_step == 2:
            setattr(control, self.flag, True)


def train(spec: str, folder: str, out: str, event: str, flag: str, rank: int, everywhere: bool) -> tuple:
    """Steps made, and the steps that are saved and evaluated."""
    ranks = activate(spec)
    settings = arguments_of(out, ranks, max_steps=4, save_strategy="steps", save_steps=100, save_only_model=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    options = {"train_dataset": data("llama", 60, 1), "eval_dataset": data("llama", 5, 2)}
    trainer, _ = trainer_of(model, out, settings=settings, **options)
    if everywhere or os.environ["RANK"] == str(rank):  # many scripts add a callback on the main process alone
        trainer.add_callback(Decides(event, flag, rank))
    trainer.train()
    evaluated = [log["step"] for log in trainer.state.log_history if "eval_loss" in log]
    return trainer.state.global_step, evaluated, sorted(name for name in os.listdir(out) if "checkpoint-" in name)


#: What follows of each flag that rank 0 sets after step 2.
FOLLOWS = {
    "should_training_stop": (2, [], []),
    "should_evaluate": (4, [2], []),
    "should_save": (4, [], ["checkpoint-2"]),
}


@pytest.mark.parametrize("everywhere", [True, False], ids=["on all ranks", "added on one"])
@pytest.mark.parametrize("flag", list(FOLLOWS))
@pytest.mark.parametrize("spec", ["tp=2", "pp=2", "dp_shard=2"])
def test_rank_0_decides(runs, tmp_path, capfd, spec, flag, everywhere):
    out = run(train, 2, spec, runs.initial("llama"), str(tmp_path), "on_step_end", flag, 0, everywhere, init=False)
    steps, evaluated, saved = FOLLOWS[flag]
    assert [rank[:2] for rank in out] == [(steps, evaluated)] * 2
    assert [name for name in out[0][2] if name == "checkpoint-2"] == saved
    said = f"control.{flag} is True on rank 0 and False on rank 1: rank 0 decides for all"
    assert capfd.readouterr().err.count(said) == 1


@pytest.mark.parametrize("event", ["on_step_begin", "on_pre_optimizer_step", "on_log"])
def test_at_other_events(runs, tmp_path, event):
    out = run(
        train, 2, "tp=2", runs.initial("llama"), str(tmp_path), event, "should_training_stop", 0, True, init=False
    )
    assert [rank[0] for rank in out] in ([2, 2], [3, 3])


def test_another_rank_does_not_decide(runs, tmp_path, capfd):
    folder = runs.initial("llama")
    out = run(train, 2, "tp=2", folder, str(tmp_path), "on_step_end", "should_training_stop", 1, True, init=False)
    assert [rank[0] for rank in out] == [4, 4]
    assert find_line(capfd.readouterr().err, "control.should_training_stop", "False on rank 0", "True on rank 1")

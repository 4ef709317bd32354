"""Callbacks that decide something on one rank alone, as by a clock: all ranks do what rank 0 decides."""

import os
import time

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from tests.distributed import run, run_alone
from tests.refusals import find_line
from tests.rows import data
from tests.training import activate, arguments_of, check_numbers, none, trainer_of, weight_differences


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


class Shows(TrainerCallback):
    """What scripts do with their model where `state.is_world_process_zero`: samples, losses, a copy of the weights."""

    trainer: Trainer

    def __init__(self, out: str):
        self.out, self.seen = out, []

    def show(self, args, state, control, model=None, **kwargs):
        if not state.is_world_process_zero:
            return
        batch = torch.arange(22).view(2, 11).to(model.device)
        with torch.no_grad():
            loss = model(input_ids=batch, labels=batch).loss.item()
        where = f"{self.out}/{len(self.seen)}"
        model.save_pretrained(where) if len(self.seen) % 2 else self.trainer.save_model(where)
        self.seen.append((loss, model.generate(batch, max_new_tokens=5, do_sample=False).tolist()))

    on_step_end = on_evaluate = on_save = on_train_end = show


def train_and_show(spec: str | None, folder: str, out: str, shown: str) -> tuple[list, list[float]]:
    """What the callback has seen, and the losses of the steps."""
    ranks = activate(spec)
    settings = arguments_of(
        out, ranks, max_steps=3, save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2
    )
    model, callback = AutoModelForCausalLM.from_pretrained(folder), Shows(shown)
    options = {"train_dataset": data("llama", 60, 1), "eval_dataset": data("llama", 5, 2), "callbacks": [callback]}
    callback.trainer, _ = trainer_of(model, out, settings=settings, **options)
    callback.trainer.train()
    return callback.seen, [log["loss"] for log in callback.trainer.state.log_history if "loss" in log]


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "pp=2", "cp=2", "dp_replicate=2"])
def test_what_rank_0_shows(runs, tmp_path, spec):
    """Its evaluations, samples and saved weights are those of one process, and so is the training around them."""
    folder, before = runs.initial("llama"), time.monotonic()
    expected, losses = run_alone(train_and_show, None, folder, str(tmp_path / "one"), str(tmp_path / "shown"))
    alone = time.monotonic() - before
    ranks = run(train_and_show, 2, spec, folder, str(tmp_path / "two"), str(tmp_path / spec), init=False)
    assert time.monotonic() - before - alone < 60  # nobody waits for the end of anybody's patience, 24 times
    (seen, first), (nothing, second) = ranks
    assert (len(seen), len(expected), nothing) == (8, 8, [])
    check_numbers([first, second], losses)
    check_numbers([[loss for loss, _ in seen]], [loss for loss, _ in expected])
    assert [tokens for _, tokens in seen] == [tokens for _, tokens in expected]
    for place in range(8):
        none(weight_differences(f"{tmp_path}/{spec}/{place}", f"{tmp_path}/shown/{place}", 1e-6))

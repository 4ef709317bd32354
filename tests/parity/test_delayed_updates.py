"""`pipeline_schedule=pipedream_2bw`: the numbers of its rule, W(t+1) = W(t) - lr f'(W(t-1)), in one process."""

import dataclasses
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer, TrainerCallback

from tests import models
from tests.distributed import run
from tests.rows import data, pad
from tests.training import BF16, Outcome, Tolerance, activate, axes, fit, none, trainer_of, weight_differences

SCHEDULE = ",pipeline_schedule=pipedream_2bw"
STEPS = 6  # of an epoch
ADAM = (("optim", "adamw_torch"), ("learning_rate", 1e-2), ("adam_epsilon", 1e-4))


@dataclass(frozen=True)
class Case:
    """A script: two epochs of six steps, whose last batch is ragged; evaluation every four steps."""

    model: str = "llama"
    accumulation: int = 1
    arguments: tuple[tuple[str, Any], ...] = ()
    lora: bool = False
    saves: tuple[int, ...] = ()
    resume: str | None = None

    @property
    def rule(self) -> type[Trainer]:
        """The schedule's rule in one process."""
        return Rule

    @property
    def tolerance(self) -> Tolerance:
        """AdamW divides by gradients, and makes more of how they are rounded."""
        if ("bf16", True) in self.arguments:
            return dataclasses.replace(BF16, weights=1.5e-3)
        return Tolerance(weights=1e-5) if self.arguments == ADAM else Tolerance()

    def is_fresh(self, step: int) -> bool:
        """Does a step begin on the newest weights: at both ends of an epoch, and after a save?"""
        return step % STEPS in (0, STEPS - 1) or step in self.saves


class Rule(Trainer):
    """One process: gradients of the weights from before the last update, unless the pipeline has drained."""

    case: Case
    before: list[torch.Tensor]
    begins = True

    def training_step(self, model, inputs, num_items_in_batch=None):
        parameters = [p for p in model.parameters() if p.requires_grad]
        now = [p.detach().clone() for p in parameters]
        if self.begins:
            self.used = now if self.case is None or self.case.is_fresh(self.state.global_step) else self.before
            self.before = now
        self.begins = self.accelerator.gradient_state.sync_gradients
        _put(parameters, self.used)
        loss = super().training_step(model, inputs, num_items_in_batch)
        _put(parameters, now)
        return loss


def _put(parameters, values):
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)


class Evaluated(TrainerCallback):
    """Keeps the losses of evaluations."""

    def __init__(self):
        self.losses = []

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.losses.append(metrics["eval_loss"])


def script(spec: str | None, out: str, case: Case, initial: str, delayed: bool = True) -> Outcome:
    """The user's script; in one process it follows the rule, without its delay if not `delayed`."""
    data_ranks = activate(spec)
    model = LlamaForCausalLM.from_pretrained(initial)
    if case.lora:
        model = with_lora(model)
    settings = {
        "num_train_epochs": 2,
        "learning_rate": 0.5,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "linear",
        "gradient_accumulation_steps": case.accumulation,
        "eval_strategy": "steps",
        "eval_steps": 4,
        **({"save_strategy": "steps", "save_steps": case.saves[0]} if case.saves else {}),
        **dict(case.arguments),
    }
    rows = 8 * case.accumulation * STEPS - 2
    seen = Evaluated()
    more = {
        "train_dataset": data("llama", rows, 11, uneven_lengths=True),
        "eval_dataset": data("llama", 13, 12, uneven_lengths=True),
        "data_collator": pad,
    }
    trainer, recorder = trainer_of(
        model, out, data_ranks, settings, Trainer if spec else case.rule, callbacks=[seen], **more
    )
    trainer.case = case if delayed else None
    if case.resume:
        train = trainer.train
        trainer.train = lambda: train(resume_from_checkpoint=case.resume)
    outcome = fit(trainer, recorder, f"{out}/saved")
    outcome.more = seen.losses
    return outcome


def with_lora(model):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(models.SEED)
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]))


def check(runs, spec: str, case: Case) -> list[Outcome]:
    """Compare with the rule; without its delay the numbers must be others."""
    initial = runs.initial("llama", **({"tie_word_embeddings": True} if case.model == "tied" else {}))
    ranks = runs.compare(script, spec + SCHEDULE, case, initial, tolerance=case.tolerance)
    evaluations = runs.alone(script, case, initial).more
    assert len(evaluations) == 4  # three, and one at the end
    for rank in ranks:
        assert rank.more == pytest.approx(evaluations, rel=case.tolerance.eval_loss)
    undelayed = runs.alone(script, case, initial, False)
    assert weight_differences(ranks[0].folder, undelayed.folder, case.tolerance.weights)
    return ranks


@pytest.mark.parametrize("spec", ["pp=2", "pp=4", "pp=2,tp=2", "pp=2,dp_replicate=2"])
def test_as_its_rule(runs, spec):
    check(runs, spec, Case())


CASES = {
    "accumulated": Case(accumulation=2),
    "adam": Case(arguments=ADAM),
    "checkpointing": Case(arguments=(("gradient_checkpointing", True),)),
    "clipped": Case(arguments=(("max_grad_norm", 0.1),)),
    "tied": Case(model="tied"),
    "adapters": Case(lora=True),
    "bf16": Case(arguments=(("bf16", True),)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("spec", ["pp=2", "pp=4", "pp=2,tp=2", "pp=2,dp_replicate=2"])
def test_kinds_of_training(runs, spec, name):
    check(runs, spec, CASES[name])


@pytest.mark.parametrize("other", ["pp=4", None])
@pytest.mark.parametrize("spec", ["pp=2", "pp=2,dp_replicate=2"])
def test_resume(runs, spec, other):
    """What is in flight at a save is begun anew, so a resumed run goes on as the one that was not interrupted."""
    case = Case(saves=(4, 8), arguments=ADAM)
    (first, *_) = check(runs, spec, case)
    again = dataclasses.replace(case, resume=str(Path(first.folder).parent / "checkpoint-4"))
    call = partial(script, (other or spec) + SCHEDULE, runs._folder(), again, runs.initial("llama"))
    resumed = run(call, axes(other or spec)["world"], init=False)[0]
    none(weight_differences(resumed.folder, first.folder, 1e-5 if other else 0.0))
    assert len(resumed.logs) == 2 * STEPS - 4
    if other is None:
        assert resumed.logs == first.logs[4:]

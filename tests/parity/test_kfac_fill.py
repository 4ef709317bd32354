"""`pipeline_fill=kfac`: the numbers of K-FAC with curvature as old as its rule says, in one process."""

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Trainer
from transformers.pytorch_utils import Conv1D

from tests import models
from tests.distributed import run
from tests.rows import data, pad
from tests.training import Outcome, Tolerance, activate, axes, fit, none, trainer_of, weight_differences

FILL = ",pipeline_fill=kfac"
ADAM = (("optim", "adamw_torch"), ("learning_rate", 1e-3), ("adam_epsilon", 1e-4))
STEPS = 4  # of an epoch
#: An inverse makes up to 1 / sqrt(damping) of a rounding error.
TOLERANCE = Tolerance(loss=2e-5, grad_norm=5e-5, weights=1e-5)


@dataclass(frozen=True)
class Case:
    """A script: two epochs of four steps, whose last batch is ragged."""

    model: str = "llama"
    changes: tuple[tuple[str, Any], ...] = ()
    interval: int = 1
    damping: float = 0.01
    accumulation: int = 1
    arguments: tuple[tuple[str, Any], ...] = ()
    lora: bool = False
    saves: tuple[int, ...] = ()
    resume: str | None = None

    def used(self, step: int) -> int:
        """Return the step whose curvature preconditions this one."""
        fresh = max(start for start in (0, *self.saves) if start <= step)
        return fresh + max(0, (step - fresh) // self.interval - 1) * self.interval


class Rule(Trainer):
    """K-FAC in one process: each optimizer step has its curvature, and uses that of an older one."""

    case: Case

    def prepare(self):
        self.linears = [
            module
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Linear | Conv1D) and ".layers." in f".{name}".replace(".h.", ".layers.")
            if module.weight.requires_grad
        ]
        self.step_sums, self.inverses = {}, {}
        for module in self.linears:
            module.register_forward_hook(self.keep)

    def keep(self, module, args, output):
        if not self.model.training:
            return
        a = args[0].detach()[self.real].double()
        if module.bias is not None:
            a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
        sums = self.step_sums.setdefault(id(module), [0.0, 0.0])
        sums[0] = sums[0] + a.t() @ a

        def keep_gradient(e):
            e = e.flatten(0, -2).double() * self.items
            sums[1] = sums[1] + e.t() @ e

        output.register_hook(keep_gradient)

    def training_step(self, model, inputs, num_items_in_batch=None):
        if not hasattr(self, "linears"):
            self.prepare()
        self.real = inputs["attention_mask"].bool() & (inputs["labels"] != -100).any(1, keepdim=True)
        self.items = float(num_items_in_batch)
        self.tokens = getattr(self, "tokens", 0) + int(self.real.sum())
        # Trainer counts first labels too, which are targets of no token, for some models.
        self.targets = getattr(self, "targets", 0) + int((inputs["labels"][:, 1:] != -100).sum())
        loss = super().training_step(model, inputs, num_items_in_batch)
        if self.accelerator.sync_gradients:
            self.end_step()
        return loss

    def end_step(self):
        step = self.state.global_step
        self.inverses[step] = {key: self.inverted(*sums) for key, sums in self.step_sums.items()}
        for module in self.linears:
            a, g = self.inverses[self.case.used(step)][id(module)]
            weight, bias = module.weight.grad, module.bias
            whole = (weight.t() if isinstance(module, Conv1D) else weight).double()
            if bias is not None:
                whole = torch.cat([whole, bias.grad[:, None].double()], 1)
            whole = g @ whole @ a
            if bias is not None:
                bias.grad.copy_(whole[:, -1])
                whole = whole[:, :-1]
            weight.copy_(whole.t() if isinstance(module, Conv1D) else whole)
        self.step_sums, self.tokens, self.targets = {}, 0, 0

    def inverted(self, a, g):
        a, g = a / self.tokens, g / self.targets
        traces = [factor.trace() / len(factor) for factor in (a, g)]
        pi = math.sqrt(traces[0] / traces[1]) if min(traces) > 0 else 1.0
        root = math.sqrt(self.case.damping)
        return [
            torch.linalg.inv(f + part * torch.eye(len(f)).to(f.device)) for f, part in ((a, pi * root), (g, root / pi))
        ]


def script(spec: str | None, out: str, case: Case, initial: str) -> Outcome:
    """The user's script; in one process it follows the rule."""
    data_ranks = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(initial)
    if case.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(models.SEED)
        config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "down_proj"])
        model = get_peft_model(model, config)
    settings = {
        "num_train_epochs": 2,
        "learning_rate": 0.05,
        "max_grad_norm": 0.5,
        "gradient_accumulation_steps": case.accumulation,
        **({"save_strategy": "steps", "save_steps": case.saves[0]} if case.saves else {}),
        **dict(case.arguments),
    }
    rows = 8 * case.accumulation * STEPS - 5
    more = {"train_dataset": data("llama", rows, 11, uneven_lengths=True, length=33), "data_collator": pad}
    trainer, recorder = trainer_of(model, out, data_ranks, settings, Trainer if spec else Rule, **more)
    trainer.case = case
    if case.resume:
        train = trainer.train
        trainer.train = lambda: train(resume_from_checkpoint=case.resume)
    return fit(trainer, recorder, f"{out}/saved")


def spec_of(spec: str, case: Case) -> str:
    return f"{spec}{FILL},kfac_interval={case.interval},kfac_damping={case.damping}"


def check(runs, spec: str, case: Case) -> list[Outcome]:
    """Compare with the rule; curvature of other steps must give other weights."""
    initial = runs.initial(case.model, **dict(case.changes))
    ranks = runs.compare(script, spec_of(spec, case), case, initial, tolerance=TOLERANCE)
    assert len(ranks[0].logs) == 2 * STEPS
    other = runs.alone(script, dataclasses.replace(case, interval=case.interval + 1), initial)
    assert weight_differences(ranks[0].folder, other.folder, TOLERANCE.weights)
    return ranks


@pytest.mark.parametrize("spec", ["pp=2", "pp=4", "pp=2,dp_replicate=2", "pp=2,pipeline_schedule=gpipe"])
def test_as_its_rule(runs, spec):
    """Seven layers, 33 tokens, vocabulary of 515 in one tied matrix."""
    check(runs, spec, Case(changes=(("num_hidden_layers", 7), ("tie_word_embeddings", True))))


CASES = {
    "interval of 2": Case(interval=2),
    "interval of 3": Case(interval=3, damping=0.1),
    "accumulated": Case(accumulation=2),
    "adam": Case(arguments=ADAM),
    "adapters": Case(lora=True),
    "biases": Case(model="gpt2"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("spec", ["pp=2", "pp=2,dp_replicate=2", "pp=2,pipeline_schedule=gpipe"])
def test_kinds_of_training(runs, spec, name):
    check(runs, spec, CASES[name])


@pytest.mark.parametrize("other", ["pp=4", None])
@pytest.mark.parametrize("spec", ["pp=2", "pp=2,dp_replicate=2"])
def test_resume(runs, spec, other):
    """The step after a save takes its own curvature, so a resumed run goes on as the one that was not interrupted."""
    case = Case(saves=(3, 6))
    (first, *_) = check(runs, spec, case)
    again = dataclasses.replace(case, resume=str(Path(first.folder).parent / "checkpoint-3"))
    call = partial(script, spec_of(other or spec, again), runs._folder(), again, runs.initial("llama"))
    resumed = run(call, axes(other or spec)["world"], init=False)[0]
    none(weight_differences(resumed.folder, first.folder, TOLERANCE.weights if other else 0.0))
    assert len(resumed.logs) == 2 * STEPS - 3
    if other is None:
        assert resumed.logs == first.logs[3:]

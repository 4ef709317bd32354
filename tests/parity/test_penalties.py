"""Losses with penalties of weights: distances from a copy, norms, sparsity, rows that are to be orthogonal.

Each has the losses, norms and weights of one process, with batches of uneven counts, accumulation and a ragged end.
"""

import pytest
import torch
from accelerate import Accelerator
from transformers import Trainer

from tests import models
from tests.distributed import RankFailure, run, run_alone_once
from tests.loops import take_step
from tests.rows import Rows
from tests.training import activate, axes, close, fit, none, trainer_of

ODD = {"num_hidden_layers": 2, "vocab_size": 515}


def penalty_of(model, former):
    """Five penalties, by methods, functions and operators; the last one is refused beside packed weights."""
    parameters = dict(model.named_parameters())
    former = {name: one.to(model.device) for name, one in former.items()}
    distance = sum(((p - former[name]) ** 2).sum() for name, p in parameters.items())
    distances = sum(torch.nn.functional.mse_loss(p, former[name] / 2) for name, p in parameters.items())
    sparsity = torch.zeros((), device=distance.device)
    for name, p in parameters.items():
        if "mlp" in name:
            sparsity += p.abs().sum()
    norms = torch.stack([torch.norm(p, 2) for p in parameters.values()]).norm(2)
    penalty = 0.3 * distance + 2 * distances + 1e-3 * sparsity + norms * 0.01
    return penalty if model.config.model_type == "phi3" else penalty + 1e-3 * unlike(parameters)


def unlike(parameters):
    """How far rows of projections are from orthogonal."""
    rows = [p for name, p in parameters.items() if "o_proj" in name]
    return sum(torch.norm(p @ p.t() - torch.eye(len(p), device=p.device)) ** 2 for p in rows)


class Penalty(Trainer):
    """Adds the penalties to the loss, which it computes before them, or after."""

    when = "after"

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        before = penalty_of(model, self.former) if self.when == "before" else None
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss = loss + penalty_of(model, self.former) if before is None else before + loss
        return (loss, outputs) if return_outputs else loss


class PenaltyBefore(Penalty):
    """The same, in the other order."""

    when = "before"


def train(spec, out, kind, trainer_class):
    data_ranks = activate(spec)
    model = models.build(kind, **ODD)
    former = {name: 0.9 * p.detach().clone() for name, p in model.named_parameters()}
    settings = {"gradient_accumulation_steps": 2}
    trainer, recorder = trainer_of(model, out, data_ranks, settings, trainer_class, train_dataset=Rows(27, 11))
    trainer.former = former
    return fit(trainer, recorder)


CASES = [("llama", spec, Penalty) for spec in ("dp_shard=2", "tp=2", "cp=2", "zero_stage=1,dp_shard=2")]
CASES += [("llama", "dp_shard=2", PenaltyBefore), ("phi3", "dp_shard=2,tp=2", Penalty)]


@pytest.mark.parametrize(("kind", "spec", "trainer_class"), CASES)
def test_trainer(runs, kind, spec, trainer_class):
    runs.compare(train, spec, kind, trainer_class)


def loop(kind, spec=None):
    """Three steps of uneven batches."""
    activate(spec)
    accelerator = Accelerator()
    model = models.build(kind, **ODD)
    former = {name: 0.9 * p.detach().clone() for name, p in model.named_parameters()}
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    numbers = []
    for batch in torch.randint(0, 515, (3, 4, 33), generator=torch.Generator().manual_seed(1)).to(accelerator.device):
        loss = model(input_ids=batch, labels=batch).loss + penalty_of(model, former)
        numbers += take_step(accelerator, model, optimizer, loss)
    return numbers


@pytest.mark.parametrize(("kind", "spec"), [("mixtral", "dp_shard=2,ep=2"), ("llama", "tp=2,dp_replicate=2")])
def test_loop(kind, spec):
    wanted = run_alone_once(loop, kind)
    for numbers in run(loop, axes(spec)["world"], kind, spec, init=False):
        for number, (ours, theirs) in enumerate(zip(numbers, wanted, strict=True)):
            none(close(f"number {number}", ours, theirs, 2e-5))  # relative; sums of fp32 in another order


class InPlace(Penalty):
    """Sums up the penalty in a tensor that is whole, by a function."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        total = torch.zeros((), device=self.args.device)
        for p in model.parameters():
            total += torch.sum(p**2)
        return super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch) + total


class Unlike(Penalty):
    """Wants orthogonal rows of projections."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = super().compute_loss(model, inputs, num_items_in_batch=num_items_in_batch)
        return loss + unlike(dict(model.named_parameters()))


WORKS = "loss = loss . penalty works where loss .= penalty does not"
REFUSED = [("llama", spec, InPlace, WORKS) for spec in ("tp=2", "dp_shard=2")]
REFUSED += [("phi3", "tp=2", Unlike, "packed weights, whose rows ranks store in another order")]


@pytest.mark.parametrize(("kind", "spec", "trainer_class", "words"), REFUSED)
def test_refusals_in_words(tmp_path, kind, spec, trainer_class, words):
    with pytest.raises(RankFailure, match=words):
        run(train, 2, spec, str(tmp_path), kind, trainer_class, init=False)

"""A script's own loss where data ranks, pipelines among them, have unlike numbers of examples and of targets."""

import pytest
import torch
from transformers import Trainer

from tests import models
from tests.parity.test_scripts_losses import MeanLoss, ModelsLoss
from tests.rows import Rows, pad
from tests.training import Outcome, activate, fit, own_loss, trainer_of


class MeanOfExamples(Trainer):
    """A mean over examples of the mean of each."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        targets = inputs["labels"][:, 1:]
        losses = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].mT, targets, reduction="none").sum(1)
        loss = (losses / (targets != -100).sum(1).clamp(min=1)).mean()
        return (loss, outputs) if return_outputs else loss


class TwoTerms(Trainer):
    """The model's own loss, and a mean over examples."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + 0.01 * outputs.logits[:, 0].square().mean()
        return (loss, outputs) if return_outputs else loss


TRAINERS = {
    "mean": MeanLoss,
    "models": ModelsLoss,
    "examples": MeanOfExamples,
    "two terms": TwoTerms,
    "counted": Trainer,
}


def train(spec: str | None, out: str, kind: str, rows: int, steps: int) -> Outcome:
    """Batches of 8 examples of unlike lengths; of the last 3 or 6 two data ranks have 3 and 0, or 4 and 2."""
    data_ranks = activate(spec)
    sets = {"train_dataset": Rows(rows, 11, uneven_lengths=True), "eval_dataset": Rows(5, 12, uneven_lengths=True)}
    sets |= {"data_collator": pad, "compute_loss_func": own_loss if kind == "counted" else None}
    settings = {"gradient_accumulation_steps": steps, "num_train_epochs": 2}
    return fit(*trainer_of(models.build("llama"), out, data_ranks, settings, TRAINERS[kind], **sets))


@pytest.mark.parametrize("kind", TRAINERS)
@pytest.mark.parametrize(
    ("spec", "rows", "steps"),
    [
        ("dp_shard=2", 19, 1),
        ("pp=2,dp_shard=2", 19, 1),
        ("pp=2,dp_shard=2", 22, 1),
        ("pp=2,dp_replicate=2", 19, 1),
        ("pp=2,dp_replicate=2", 22, 2),
        ("pp=2,dp_shard=2,pipeline_microbatches=2", 22, 2),
    ],
)
def test_same_numbers_as_one_process(runs, spec, rows, steps, kind):
    for rank in runs.compare(train, spec, kind, rows, steps):
        assert len(rank.logs) == 2 * -(-rows // (8 * steps))

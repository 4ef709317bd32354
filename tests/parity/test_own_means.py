"""A script's own loss that is a mean over tokens by its own arithmetic: data ranks weigh by how many they have."""

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer

from hf_parallel.hooks import report
from tests import models
from tests.distributed import run
from tests.rows import Rows, pad
from tests.training import Outcome, activate, axes, fit, trainer_of


def token_losses(logits, labels):
    return cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="none")


class MaskedMean(Trainer):
    """Over labels, which the model is given too: it computes a loss that nobody reads."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        losses, held = token_losses(outputs.logits, inputs["labels"]), inputs["labels"][:, 1:].flatten() != -100
        self.log({"figure": losses.mean().item()})
        self.calls = getattr(self, "calls", torch.zeros(())) + 1  # a state that no further call may change
        loss = (losses * held).sum() / held.sum() * (1 + self.calls / 10)
        return (loss, outputs) if return_outputs else loss


class MeanOfMask(Trainer):
    """Over the tokens of the mask; labels leave the batch before the model is called."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels, mask = inputs.pop("labels"), inputs["attention_mask"]
        logits = model(**inputs)["logits"]
        chosen = logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
        loss = -(chosen * mask).sum() / mask.sum()
        return (loss, {"logits": logits}) if return_outputs else loss


class EvaluatedAlone(MeanOfMask):
    """Evaluates by a step of its own, past `compute_loss`."""

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            loss, outputs = super().compute_loss(model, dict(inputs), return_outputs=True)
        return loss, outputs["logits"], inputs["labels"]


class TwoTerms(Trainer):
    """A mean over targets and one over examples: no count makes one of both."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits, held = model(**inputs).logits, labels[:, 1:].flatten() != -100
        return (token_losses(logits, labels) * held).sum() / held.sum() + logits[:, 0].square().mean()


def masked_mean(outputs, labels, num_items_in_batch=None):
    """A `compute_loss_func` that ignores the count."""
    held = labels[:, 1:].flatten() != -100
    return (token_losses(outputs.logits, labels) * held).sum() / held.sum()


KINDS = {"labels": MaskedMean, "mask": MeanOfMask, "function": Trainer, "terms": TwoTerms, "alone": EvaluatedAlone}


def train(spec: str | None, out: str, kind: str, steps: int = 1, batch: int = 8) -> Outcome:
    """Three steps of unlike lengths, of which the last is ragged, and an evaluation."""
    data_ranks = activate(spec)
    sets = {"train_dataset": Rows(22 * steps, 11, uneven_lengths=True), "data_collator": pad}
    if kind != "terms":
        sets["eval_dataset"] = Rows(13, 12, uneven_lengths=True)
    settings = {"gradient_accumulation_steps": steps, "per_device_train_batch_size": batch // data_ranks}
    sets["compute_loss_func"] = masked_mean if kind == "function" else None
    return fit(*trainer_of(models.build("llama"), out, data_ranks, settings, KINDS[kind], **sets))


@pytest.mark.parametrize(
    ("kind", "spec", "steps", "batch"),
    [
        *((kind, "dp_shard=2", 1, 8) for kind in ("labels", "mask", "function")),
        ("alone", "dp_shard=2", 1, 8),
        ("labels", "dp_shard=2,tp=2", 2, 8),
        ("mask", "dp_replicate=2,cp=2", 1, 8),
        ("labels", "dp_shard=4", 1, 4),
        ("labels", "pp=2,dp_shard=2", 1, 8),
        ("mask", "pp=2,dp_shard=2", 2, 8),
    ],
)
def test_a_mean_over_tokens_is_that_of_one_process(runs, kind, spec, steps, batch):
    runs.compare(train, spec, kind, steps, batch)


def test_what_is_no_mean_over_one_thing_is_told(tmp_path):
    def told():
        lines: list[str] = []
        report.say = lines.append
        train("dp_shard=2", str(tmp_path), "terms")
        return [line for line in lines if "script's loss" in line]

    (line,) = run(told, axes("dp_shard=2")["world"], init=False)[0]
    assert "taken for a mean over rows" in line

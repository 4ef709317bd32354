"""Steps of a script's own that never call Trainer's, with one loader or with a second one of other examples."""

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler
from transformers import Trainer

from tests import models
from tests.distributed import RankFailure, run
from tests.rows import Rows
from tests.training import Outcome, activate, fit, trainer_of


class OwnStep(Trainer):
    """As those of adversarial trainings, which go back several times in a step."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        model.train()
        loss = self.compute_step(model, self._prepare_inputs(inputs))
        self.accelerator.backward(loss)
        return loss.detach()

    def compute_step(self, model, inputs):
        return self.compute_loss(model, inputs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = outputs.loss + outputs.logits[:, 0].square().mean()  # over targets, and over examples
        return (loss, outputs) if return_outputs else loss


class PreparedFirst(OwnStep):
    """Calls Trainer's own with a batch that it has prepared, which is another object."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        return Trainer.training_step(self, model, self._prepare_inputs(inputs), num_items_in_batch)


class SecondLoader(OwnStep):
    """Reads a second loader in each step, which ends before the first one and begins anew."""

    batches, rows = None, 16

    def compute_step(self, model, inputs):
        return self.compute_loss(model, inputs) + self.compute_loss(model, self.read_others()) / 2

    def read_others(self):
        if self.batches is None:
            others = Rows(self.rows, 12)
            size = self.args.per_device_train_batch_size
            loader = DataLoader(others, size, sampler=RandomSampler(others), collate_fn=self.data_collator)
            self.loader = self.accelerator.prepare(loader)
            self.batches = iter(self.loader)
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.loader)
            batch = next(self.batches)
        return batch


class RaggedSecond(SecondLoader):
    """The second loader ends with a batch of 5 rows."""

    rows = 13


class EvaluatesSecond(OwnStep):
    """Reads the second loader in its evaluation."""

    batches, rows, read_others = None, 16, SecondLoader.read_others

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            loss, outputs = self.compute_loss(model, inputs, return_outputs=True)
            loss = loss + self.compute_loss(model, self.read_others()) / 2
        return loss, outputs.logits, inputs["labels"]


class Shortened(OwnStep):
    """Computes its loss from a batch of which it has changed every tensor."""

    def compute_step(self, model, inputs):
        return self.compute_loss(model, {key: value[:, 1:].clone() for key, value in inputs.items()})


class Alike(Rows):
    """Rows that repeat one token."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        return {**row, "input_ids": row["input_ids"][:1].expand(16), "labels": row["labels"][-1:].expand(16)}


class Penalty(OwnStep):
    """Adds the distance to former weights in place."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs).loss
        loss += 0.1 * sum(torch.sum((p - p.detach() / 2) ** 2) for p in model.parameters())
        return loss


class PenaltyBeside(OwnStep):
    """Adds it to the loss of its step, where each stage of a pipeline would log its own part."""

    def compute_step(self, model, inputs):
        return model(**inputs).loss + 0.1 * sum(p.square().sum() for p in model.parameters())


class PenaltyOfKnown(OwnStep):
    """Knows the weights before it trains; the last stage of a pipeline would add its own alone."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss + 0.1 * sum(p.square().sum() for p in self.known)

    def train(self, *args, **kwargs):
        self.known = list(self.model.parameters())
        return super().train(*args, **kwargs)


class LogitsByPlace(OwnStep):
    """Reads what a training step of a pipeline does not keep."""

    def compute_step(self, model, inputs):
        return model(**inputs)[1].mean()


KINDS = {
    "own": OwnStep,
    "prepared": PreparedFirst,
    "second": SecondLoader,
    "ragged": RaggedSecond,
    "evaluates": EvaluatesSecond,
    "shortened": Shortened,
    "penalty": Penalty,
    "beside": PenaltyBeside,
    "known": PenaltyOfKnown,
    "place": LogitsByPlace,
}


def train(spec: str | None, out: str, kind: str, rows: Rows | None = None) -> Outcome:
    """Four steps, of which the last is ragged: of 30 rows, on four data ranks, one has none."""
    data_ranks = activate(spec)
    settings = {"per_device_train_batch_size": 8 // data_ranks}
    sets = {"train_dataset": Rows(30, 11) if rows is None else rows}
    sets["eval_dataset"] = Rows(13, 12) if kind == "evaluates" else None
    made = trainer_of(models.build("llama"), out, data_ranks, settings, KINDS[kind], **sets)
    return fit(*made, predicts=kind == "evaluates")


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("own", "dp_shard=2"),
        ("prepared", "dp_shard=4"),
        ("second", "dp_shard=4"),
        ("penalty", "dp_shard=2"),
        ("second", "pp=2,dp_shard=2"),
        ("ragged", "dp_shard=4"),
        ("ragged", "pp=2,dp_shard=2"),
        ("evaluates", "dp_shard=4"),
        ("evaluates", "pp=2,dp_shard=2"),
        ("shortened", "dp_shard=4"),
        ("shortened", "pp=2,dp_shard=2"),
    ],
)
def test_a_step_of_its_own_counts_each_example_once(runs, kind, spec):
    runs.compare(train, spec, kind)


@pytest.mark.parametrize("spec", ["dp_shard=4", "pp=2,dp_shard=2"])
def test_ranks_agree_that_a_batch_is_of_a_second_loader(runs, spec):
    """Of the last 3 rows the first rank has two, which differ; the others have one or none, which tells nothing."""
    runs.compare(train, spec, "second", Alike(27, 11))


@pytest.mark.parametrize(
    ("kind", "spec", "words"),
    [
        ("beside", "pp=2", "each stage of pp_size=2 has its own alone: p.grad.add_.* works"),
        ("known", "pp=2", "each stage of pp_size=2 has its own alone: p.grad.add_.* works"),
        ("place", "pp=2", "keeps no output 1; call the model without labels"),
    ],
)
def test_what_a_step_cannot_have_is_said_in_words(tmp_path, kind, spec, words):
    with pytest.raises(RankFailure, match=words):
        run(train, 2, spec, str(tmp_path), kind, init=False)

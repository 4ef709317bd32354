"""The last batch of a loop's loader, which accelerate fills with repeated rows: the model's loss leaves them out."""

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from hf_parallel.hooks import report
from tests import models
from tests.distributed import run, run_alone
from tests.loops import prepare_loop, take_step
from tests.rows import Rows
from tests.training import axes, none, number_differences

BATCH, LENGTH = 8, 33


class Labelled(Rows):
    """Rows with what a head of another kind predicts: unlike counts of labels."""

    def __init__(self, count, kind):
        super().__init__(count, 11, length=LENGTH)
        self.kind = kind

    def __getitem__(self, index):
        row = super().__getitem__(index)
        tokens = row["input_ids"]
        if self.kind == "classes":
            row["labels"] = tokens[0] % models.CLASSES
        elif self.kind == "numbers":
            row["labels"] = tokens[0].float() / models.VOCABULARY
        elif self.kind == "tokens":
            row["labels"] = torch.where(row["labels"] == -100, -100, tokens % models.CLASSES)
        return row


KINDS = {
    "causal": (AutoModelForCausalLM, "llama", {}),
    "seq2seq": (AutoModelForSeq2SeqLM, "t5", {}),
    "labels' last": (AutoModelForSeq2SeqLM, "mbart", {}),
    "classes": (AutoModelForSequenceClassification, "bert", {}),
    "numbers": (AutoModelForSequenceClassification, "bert", {"num_labels": 1}),
    "tokens": (AutoModelForTokenClassification, "bert", {}),
}


def loop(spec, folder, kind, rows, own=False, copied=False):
    """Losses and norms of two epochs, and what is said of repeated sequences."""
    accelerator, model, optimizer = prepare_loop(spec, folder, kind=KINDS[kind][0])
    losses, norms, lines = [], [], []
    report.say = report.say_here = lambda *said: lines.append(said[-1])
    loader = accelerator.prepare(DataLoader(Labelled(rows, kind), BATCH // accelerator.num_processes))
    for _ in range(2):
        for batch in loader:
            batch = {key: value.clone() for key, value in batch.items()} if copied else batch
            labels = batch.pop("labels") if own else None
            outputs = model(**batch)
            loss = outputs.logits.float().pow(2).mean() if own else outputs.loss
            norms.append(take_step(accelerator, model, optimizer, loss)[1])
            losses.append(accelerator.gather(loss.detach()).mean().item())
            assert labels is None or len(labels) == len(batch["input_ids"])
    return losses, norms, [line for line in lines if "repeated sequences" in line]


#: Of 8 and more: 3 are left, which the first data rank has; 6, of which the second has two; 1.
@pytest.mark.parametrize(
    ("kind", "rows", "spec"),
    [
        ("causal", 11, "dp_shard=2"),
        ("causal", 14, "dp_replicate=2,tp=2"),
        ("causal", 11, "pp=2,dp_shard=2"),
        ("seq2seq", 11, "dp_shard=2"),
        ("labels' last", 9, "dp_shard=2"),
        ("classes", 11, "dp_shard=2"),
        ("classes", 14, "dp_replicate=2,dp_shard=2"),
        ("numbers", 14, "dp_shard=2"),
        ("tokens", 9, "dp_shard=2"),
    ],
)
def test_repeated_rows_have_no_part(runs, kind, rows, spec):
    _, name, changes = KINDS[kind]
    folder = runs.initial(name, **changes)
    losses, norms, _ = run_alone(loop, None, folder, kind, rows)
    for ours, normed, told in run(loop, axes(spec)["world"], spec, folder, kind, rows, init=False):
        none(number_differences(ours, losses) + number_differences(normed, norms))
        assert not told


def test_copies_of_the_last_batch_are_known(runs):
    """`{key: value.to(device)}` makes copies where a batch lay elsewhere: its repeated rows have no part either."""
    folder = runs.initial("llama")
    losses, norms, _ = run_alone(loop, None, folder, "causal", 11)
    for ours, normed, told in run(loop, 2, "dp_shard=2", folder, "causal", 11, False, True, init=False):
        none(number_differences(ours, losses) + number_differences(normed, norms))
        assert not told


def test_a_loss_of_the_loops_own_counts_them_and_a_line_says_so(runs):
    folder = runs.initial("llama")
    for _, _, told in run(loop, 2, "dp_shard=2", folder, "causal", 11, True, init=False):
        assert len(told) == 1
        assert "here 5" in told[0]
    for _, _, told in run(loop, 2, "dp_shard=2", folder, "causal", 16, True, init=False):
        assert not told


class Pairs(Rows):
    """Two sequences per example."""

    def __init__(self, count):
        super().__init__(2 * count, 11, length=LENGTH)

    def __len__(self):
        return super().__len__() // 2

    def __getitem__(self, index):
        return [super(Pairs, self).__getitem__(2 * index + place) for place in (0, 1)]


def as_blocks(examples):
    """Put the first sequences of all pairs before the second ones, as TRL does."""
    found = [pair[place] for place in (0, 1) for pair in examples]
    return {key: torch.stack([row[key] for row in found]) for key in found[0]}


def pairs(spec, folder):
    """How many targets the model is given of the last pairs, without gradients and in training; what is said of it."""
    accelerator, model, _ = prepare_loop(spec, folder)
    loader = accelerator.prepare(DataLoader(Pairs(9), BATCH // accelerator.num_processes, collate_fn=as_blocks))
    given, lines = [], []
    accelerator.unwrap_model(model).register_forward_pre_hook(
        lambda _, args, kwargs: given.append(int((kwargs["labels"] != -100).sum())), with_kwargs=True
    )
    report.say = report.say_here = lambda *said: lines.append(said[-1])
    *_, batch = loader
    with torch.no_grad():
        model(**batch)
    silent = [line for line in lines if "repeated sequences" in line]
    model(**batch).loss.backward()
    told = [line for line in lines if "repeated sequences" in line]
    return given, int((batch["labels"] != -100).sum()), silent, told


def test_rows_of_a_last_batch_of_pairs_are_all_kept(runs):
    """Which rows repeat others is not known where an example has two: none loses its targets, and a line says so."""
    for given, targets, silent, told in run(pairs, 2, "dp_shard=2", runs.initial("llama"), init=False):
        assert targets > 0
        assert given == [targets, targets]
        assert not silent
        assert len(told) == 1
        assert "here 7" in told[0]

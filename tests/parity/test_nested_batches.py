"""Batches of batches, as unlearning has them: rows to forget and rows to keep, in dictionaries or in tuples."""

from itertools import accumulate

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import Trainer

from hf_parallel.ranks.nested_batches import open_batches
from tests import models
from tests.distributed import RankFailure, run
from tests.rows import Rows, pad
from tests.training import Outcome, activate, fit, trainer_of


class Both(Dataset):
    """Rows to forget beside others to keep."""

    def __init__(self, size: int, seed: int):
        self.forget, self.keep = (Rows(size, seed + i, uneven_lengths=True) for i in range(2))

    def __len__(self) -> int:
        return len(self.forget)

    def __getitem__(self, index: int) -> dict:
        return {"forget": self.forget[index], "keep": self.keep[index]}


def by_name(rows: list[dict]) -> dict:
    """A batch of each kind by its name."""
    return {kind: pad([row[kind] for row in rows]) for kind in rows[0]}


def by_place(rows: list[dict]) -> list[tuple]:
    """A batch of each kind by its place, as a tuple of tensors."""
    return [tuple(batch[key] for key in ("input_ids", "labels")) for batch in by_name(rows).values()]


class Difference(Trainer):
    """The model's own losses: it should forget some rows and keep others."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        forgotten, kept = model(**inputs["forget"]), model(**inputs["keep"])
        loss = kept.loss - forgotten.loss / 2
        return (loss, forgotten) if return_outputs else loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        with torch.no_grad():
            loss = self.compute_loss(model, inputs)
        return loss, None, None


class Ascent(Difference):
    """One call of the model, and a mean over tokens by the script's own arithmetic."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["forget"].pop("labels")
        logits = model(**inputs["forget"]).logits[:, :-1]
        held = labels[:, 1:] != -100
        losses = cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")
        return -(losses * held).sum() / held.sum()


class Places(Difference):
    """Tensors without names, in tuples."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        (ids, labels), (others, _) = inputs
        forgotten = model(ids, labels=labels)
        return forgotten.loss + model(others).logits[:, 0].square().mean()


def beside_ends(rows: list[dict]) -> tuple[dict, list[int]]:
    """One to three answers to each question as one batch, and where those of a question end."""
    counts = [1 + int(row["forget"]["input_ids"][0]) % 3 for row in rows]
    answers = [row["keep"] for row, count in zip(rows, counts, strict=True) for _ in range(count)]
    return pad(answers), list(accumulate(counts))


class Answers(Difference):
    """A mean over questions of means over their answers."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        batch, ends = inputs
        scores = model(batch["input_ids"]).logits[:, 0].square().mean(dim=-1)
        return torch.stack([part.mean() for part in scores.tensor_split(ends[:-1])]).mean()


KINDS = {"difference": (Difference, by_name), "ascent": (Ascent, by_name), "places": (Places, by_place)}
KINDS["answers"] = (Answers, beside_ends)


def train(spec: str | None, out: str, kind: str, full: bool = False, steps: int = 1) -> Outcome:
    """Three steps, of which the last is ragged: of 22 rows, on four data ranks, one has none."""
    data_ranks = activate(spec)
    trainer_class, collate = KINDS[kind]
    sets = {"train_dataset": Both(22, 11), "eval_dataset": Both(13, 21), "data_collator": collate}
    settings = {"per_device_train_batch_size": 8 // data_ranks, "remove_unused_columns": False}
    settings |= {"dataloader_drop_last": full, "gradient_accumulation_steps": steps}
    return fit(*trainer_of(models.build("llama"), out, data_ranks, settings, trainer_class, **sets))


@pytest.mark.parametrize(
    ("kind", "spec"),
    [
        ("difference", "dp_shard=4"),
        ("difference", "pp=2,dp_shard=2"),
        ("ascent", "dp_shard=2,cp=2"),
        ("ascent", "pp=2"),
        ("places", "dp_shard=4"),
    ],
)
def test_a_batch_of_batches_gives_the_numbers_of_one_process(runs, kind, spec):
    runs.compare(train, spec, kind)


@pytest.mark.parametrize(
    ("spec", "full", "steps"),
    [("dp_shard=2", True, 1), ("pp=2,dp_shard=2", True, 1), ("pp=2", False, 2), ("tp=2", False, 1)],
)
def test_a_batch_beside_which_something_else_stands(runs, spec, full, steps):
    runs.compare(train, spec, "answers", full, steps)


def test_repeated_examples_of_unlike_numbers_of_rows_are_refused(tmp_path):
    with pytest.raises(RankFailure, match="unlike numbers of rows.*dataloader_drop_last=True works"):
        run(train, 2, "dp_shard=2", str(tmp_path), "answers", init=False)


class Unshared(Difference):
    """A loader of its own that nobody shares out."""

    def get_train_dataloader(self):
        return torch.utils.data.DataLoader(self.train_dataset, batch_size=4, collate_fn=self.data_collator)


def test_a_loader_of_such_batches_that_all_data_ranks_read_alike_is_refused(tmp_path):
    def alike():
        KINDS["unshared"] = (Unshared, by_name)
        train("dp_shard=2", str(tmp_path), "unshared")

    with pytest.raises(RankFailure, match="gives all 2 data ranks the same batches"):
        run(alike, 2, init=False)


def test_parts_keep_their_form():
    a, b, c = (torch.tensor([i]) for i in range(3))
    forms = {"x": {"ids": a, "y": [b, c]}, "z": c}, (a, [b, {"ids": c}]), [(a, b), (c,)], ({"ids": a}, [c], None)
    for batch in forms:
        flat, close = open_batches(batch)
        assert all(value is None or isinstance(value, (torch.Tensor, list)) for value in flat.values())
        assert close(flat) == batch
        assert type(close(flat)) is type(batch)
    for batch in ({"ids": a, "boxes": [{"x": b}]}, [], "text", ["text"]):
        assert open_batches(batch)[0] is batch

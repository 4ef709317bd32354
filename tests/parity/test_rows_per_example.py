"""Batches with two rows per example, [all first; all second] or in turns, in scripts nobody here knows."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer

from hf_parallel.hooks.trainer.rows import are_in_turns, trim, without_targets
from tests.distributed import RankFailure, run
from tests.rows import data
from tests.training import Outcome, activate, fit, trainer_of


class PairTrainer(Trainer):
    """A user's preference loss: a mean over pairs."""

    sides = staticmethod(lambda values: values.chunk(2))

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        targets = inputs["input_ids"][:, 1:, None]
        log_probs = outputs.logits[:, :-1].float().log_softmax(-1).gather(2, targets)[..., 0].sum(1)
        chosen, rejected = self.sides(log_probs)
        loss = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()
        return (loss, outputs) if return_outputs else loss


class TurnsTrainer(PairTrainer):
    """The rows of a pair are behind one another, as in reward models of papers."""

    sides = staticmethod(lambda values: values.unflatten(0, (-1, 2)).unbind(1))


class Stream(torch.utils.data.IterableDataset):
    """Rows one after another."""

    def __init__(self, rows: list):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def pairs(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Each row, and the row read backwards."""
    first = {key: torch.stack([torch.as_tensor(row[key]) for row in rows]) for key in rows[0]}
    return {key: torch.cat([value, value.flip(1)]) for key, value in first.items()}


def turns(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Each row, behind it the row read backwards, and a number per row in a list."""
    batch = {key: value.unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1) for key, value in pairs(rows).items()}
    return {**batch, "lengths": [int(row[0]) for row in batch["input_ids"]]}


def train(spec: str | None, out: str, initial: str, kind: type[Trainer], rows: int, stream: bool = False) -> Outcome:
    """Three steps of 8 examples, then an evaluation of 6."""
    data_ranks = activate(spec)
    examples = [dict(row) for row in data("llama", rows, 1)]
    sets = {
        "train_dataset": Stream(examples) if stream else examples,
        "eval_dataset": [dict(row) for row in data("llama", 6, 2)],
        "data_collator": turns if kind is TurnsTrainer else pairs,
    }
    model = AutoModelForCausalLM.from_pretrained(initial)
    return fit(*trainer_of(model, out, data_ranks, {"max_steps": 3}, kind, **sets))


#: 6: less than one batch. 22: a ragged last batch.
CASES = [
    (PairTrainer, 6, "dp_shard=2"),
    (PairTrainer, 22, "dp_shard=2"),
    (Trainer, 22, "pp=2"),
    (TurnsTrainer, 22, "dp_shard=2"),
    (TurnsTrainer, 22, "pp=2"),
]


@pytest.mark.parametrize(("kind", "rows", "spec"), CASES)
def test_two_rows_per_example(runs, kind, rows, spec):
    runs.compare(train, spec, runs.initial("llama"), kind, rows)


@pytest.mark.parametrize("rows", [3, 22])
def test_a_stream_does_not_tear_examples_apart(runs, tmp_path, rows):
    """Accelerate shares the last batch of a stream out row by row: three pairs would be six examples."""
    given = "dp_shard=2", str(tmp_path), runs.initial("llama"), PairTrainer, rows
    with pytest.raises(RankFailure, match="2 data ranks.*dataloader_drop_last=True works"):
        run(train, 2, *given, stream=True, init=False)


def test_a_collator_tells_how_it_orders_rows():
    """Examples whose rows are alike tell nothing; numbers that a collator draws do not mislead."""
    alike, unlike = {"input_ids": torch.tensor([7, 8, 7])}, {"input_ids": torch.tensor([5, 6, 7])}

    def noisy(rows):
        return {**turns(rows), "noise": torch.randn(2 * len(rows), 1), "labels": torch.ones(len(rows))}

    for collate, expected in {pairs: False, turns: True, noisy: True}.items():
        assert are_in_turns(collate, alike, 2) is None
        assert are_in_turns(collate, unlike, 2) is expected


def test_rows_in_turns_are_trimmed():
    batch = {"labels": torch.arange(8)[:, None].expand(8, 3), "lengths": list(range(8)), "ids": list("abcd")}
    kept = trim(batch, 3, 4, 2, in_turns=True)
    assert kept["labels"][:, 0].tolist() == kept["lengths"] == [0, 1, 2, 3, 4, 5]
    assert kept["ids"] == list("abc")
    assert trim(batch, 3, 4, 2)["lengths"] == [0, 1, 2, 4, 5, 6]
    assert without_targets(batch, 3, 4, in_turns=True)["labels"][:, 0].tolist() == [0, 1, 2, 3, 4, 5, -100, -100]

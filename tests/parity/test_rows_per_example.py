"""Batches with two rows per example, [all first; all second], in scripts nobody here knows."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer

from tests.distributed import RankFailure, run
from tests.rows import data
from tests.training import Outcome, activate, fit, trainer_of


class PairTrainer(Trainer):
    """A user's preference loss: a mean over pairs."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"])
        targets = inputs["input_ids"][:, 1:, None]
        log_probs = outputs.logits[:, :-1].float().log_softmax(-1).gather(2, targets)[..., 0].sum(1)
        chosen, rejected = log_probs.chunk(2)
        loss = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()
        return (loss, outputs) if return_outputs else loss


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


def train(spec: str | None, out: str, initial: str, kind: type[Trainer], rows: int, stream: bool = False) -> Outcome:
    """Three steps of 8 examples, then an evaluation of 6."""
    data_ranks = activate(spec)
    examples = [dict(row) for row in data("llama", rows, 1)]
    sets = {
        "train_dataset": Stream(examples) if stream else examples,
        "eval_dataset": [dict(row) for row in data("llama", 6, 2)],
        "data_collator": pairs,
    }
    model = AutoModelForCausalLM.from_pretrained(initial)
    return fit(*trainer_of(model, out, data_ranks, {"max_steps": 3}, kind, **sets))


#: 6: less than one batch. 22: a ragged last batch.
CASES = [(PairTrainer, 6, "dp_shard=2"), (PairTrainer, 22, "dp_shard=2"), (Trainer, 22, "pp=2")]


@pytest.mark.parametrize(("kind", "rows", "spec"), CASES)
def test_two_rows_per_example(runs, kind, rows, spec):
    runs.compare(train, spec, runs.initial("llama"), kind, rows)


@pytest.mark.parametrize("rows", [3, 22])
def test_a_stream_does_not_tear_examples_apart(runs, tmp_path, rows):
    """Accelerate shares the last batch of a stream out row by row: three pairs would be six examples."""
    given = "dp_shard=2", str(tmp_path), runs.initial("llama"), PairTrainer, rows
    with pytest.raises(RankFailure, match="2 data ranks.*dataloader_drop_last=True works"):
        run(train, 2, *given, stream=True, init=False)

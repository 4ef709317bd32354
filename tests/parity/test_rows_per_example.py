"""Batches with two rows per example, [all first; all second], in scripts nobody here knows."""

import tempfile

import pytest
import torch
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer

from tests import models
from tests.distributed import RankFailure, run, run_alone
from tests.rows import data
from tests.training import arguments_of, axes, spec_id


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


@pytest.fixture(scope="module")
def initial(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("pairs"))
    run_alone(lambda: models.build("llama").save_pretrained(folder))
    return folder


def train(spec: str | None, initial: str, kind: type[Trainer], rows: int, stream: bool = False) -> list[float]:
    """Loss and gradient norm of three steps of 8 examples, then the evaluation loss of 6."""
    if spec:
        from hf_parallel import hooks

        hooks.activate(spec, source="test")
    arguments = arguments_of(tempfile.mkdtemp(), axes(spec)["data_ranks"] if spec else 1, max_steps=3)
    examples = [dict(row) for row in data("llama", rows, 1)]
    trainer = kind(
        model=AutoModelForCausalLM.from_pretrained(initial),
        args=arguments,
        train_dataset=Stream(examples) if stream else examples,
        eval_dataset=[dict(row) for row in data("llama", 6, 2)],
        data_collator=pairs,
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    logs = [log[key] for log in trainer.state.log_history if "loss" in log for key in ("loss", "grad_norm")]
    return [*logs, trainer.evaluate()["eval_loss"]]


#: 6: less than one batch. 22: a ragged last batch.
CASES = [(PairTrainer, 6, "dp_shard=2"), (PairTrainer, 22, "dp_shard=2"), (Trainer, 22, "pp=2")]


@pytest.mark.parametrize(
    ("kind", "rows", "spec"), CASES, ids=[f"{kind.__name__}-{rows}-{spec_id(spec)}" for kind, rows, spec in CASES]
)
def test_two_rows_per_example(initial, kind, rows, spec):
    expected = run_alone(train, None, initial, kind, rows)
    for found in run(train, 2, spec, initial, kind, rows, init=False):
        assert found == pytest.approx(expected, rel=1e-5)  # sums of fp32 in another order


@pytest.mark.parametrize("rows", [3, 22])
def test_a_stream_does_not_tear_examples_apart(initial, rows):
    """Accelerate shares the last batch of a stream out row by row: three pairs would be six examples."""
    with pytest.raises(RankFailure, match="2 data ranks.*dataloader_drop_last=True works"):
        run(train, 2, "dp_shard=2", initial, PairTrainer, rows, stream=True, init=False)

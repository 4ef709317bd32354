"""The effective batch of a step: what keeps one process's, and how the learning rate follows where nothing does."""

import itertools
import re

import pytest

from hf_parallel.planner.batch import StepBatch


def test_factors_and_tokens():
    batch = StepBatch(rows=4, accumulation=3, data_ranks=8)
    assert (batch.alone, batch.sequences) == (12, 96)
    assert batch.in_words(33) == "96 sequences (4 per device x 3 accumulation x 8 data ranks), 3,168 tokens"


@pytest.mark.parametrize(("rows", "accumulation", "ranks"), [*itertools.product((1, 3, 8), (1, 4, 6), (2, 3, 8))])
def test_arguments_keep_the_batch_of_one_process(rows, accumulation, ranks):
    """Exactly, with no more sequences on a device than the script has; or it is said that none do."""
    batch = StepBatch(rows, accumulation, ranks)
    found = re.search(
        r"--per_device_train_batch_size (\d+) --gradient_accumulation_steps (\d+)", batch.advice("adamw")
    )
    if batch.alone % ranks:
        assert found is None
        assert re.search(rf"\b{batch.alone} .*\b{ranks} data ranks", batch.advice("adamw_torch"))
        return
    assert int(found[1]) * int(found[2]) * ranks == batch.alone
    assert int(found[1]) <= rows


def test_one_data_rank_changes_nothing():
    """tp, pp and cp leave a step its sequences."""
    assert StepBatch(4, 2, 1).advice("adamw_torch") == ""


@pytest.mark.parametrize(
    ("optimizer", "rule"),
    [
        ("sgd", "learning_rate x 4 (linear rule, sgd)"),
        ("SGD", "learning_rate x 4 (linear rule, SGD)"),
        ("adamw_torch_fused", "learning_rate x 2 (square-root rule, adamw_torch_fused)"),
        ("AdamW", "learning_rate x 2 (square-root rule, AdamW)"),
    ],
)
def test_rules(optimizer, rule):
    assert StepBatch(8, 1, 4).advice(optimizer).endswith(f", else {rule}")

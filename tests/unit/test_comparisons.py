"""What the tests compare with one process: a number, a gradient or a weight that is another one is seen, by name."""

import re
from copy import deepcopy

import pytest
import torch
from safetensors.torch import save_file

from tests.training import Outcome, Tolerance, check_numbers, differences, number_differences, over, pairs


@pytest.fixture
def outcome(tmp_path):
    """A run of two steps that evaluates, predicts and saves."""
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    logs = [{"loss": 2.0, "grad_norm": 3.0}, {"loss": 1.0, "grad_norm": 0.0}]
    return Outcome(logs, [["a"], ["a", "b"]], str(tmp_path), 1.5, torch.zeros(2, 3), torch.arange(2))


CHANGES = {
    "rank 1: loss in step 2": lambda run: run.logs[1].update(loss=1.0001),
    "rank 1: grad_norm in step 2": lambda run: run.logs[1].update(grad_norm=1e-9),
    "rank 1: loss in step 1: nan": lambda run: run.logs[0].update(loss=float("nan")),
    "rank 1: 1 steps logged": lambda run: run.logs.pop(),
    "rank 1: eval_loss": lambda run: setattr(run, "eval_loss", 1.4999),
    "rank 1: predictions off": lambda run: run.predictions.add_(1e-3),
    r"rank 1: predictions \(1, 3\)": lambda run: setattr(run, "predictions", torch.zeros(1, 3)),
    "rank 1: predicted rows": lambda run: setattr(run, "label_ids", torch.tensor([1, 0])),
    "gradients in step 1: 2 of 1": lambda run: run.gradient_keys[0].append("c"),
}
SAVED = {
    "weight a: off by": {"a": torch.ones(3) + 1e-5},
    "weight a: torch.float64": {"a": torch.ones(3, dtype=torch.float64)},
    "weights: 2 of 1; missing .*extra .*b": {"a": torch.ones(3), "b": torch.ones(1)},
}


def test_what_is_equal_is_no_difference(outcome):
    """Gradients may lie on one rank each."""
    first, second = deepcopy(outcome), deepcopy(outcome)
    first.gradient_keys, second.gradient_keys = [["a"], ["a"]], [[], ["b"]]
    assert differences([first, second], outcome, Tolerance()) == []


@pytest.mark.parametrize("said", CHANGES)
def test_each_departure_of_a_rank_is_named(outcome, said):
    other = deepcopy(outcome)
    CHANGES[said](other)
    (found,) = differences([outcome, other], outcome, Tolerance())
    assert re.match(said, found)


@pytest.mark.parametrize("said", SAVED)
def test_each_departure_of_a_folder_is_named(outcome, tmp_path, said):
    other, folder = deepcopy(outcome), tmp_path / "other"
    folder.mkdir()
    save_file(SAVED[said], folder / "model.safetensors")
    other.folder = str(folder)
    (found,) = differences([other], outcome, Tolerance())
    assert re.match(said, found)


def test_numbers_one_by_one():
    check_numbers([[1.0, 0.0]], [1.0, 0.0])
    for ours in ([1.0], [1.0, 1e-9], [1.0001, 0.0], [float("nan"), 0.0]):
        assert number_differences(ours, [1.0, 0.0])
        with pytest.raises(AssertionError, match="rank 1: "):
            check_numbers([[1.0, 0.0], ours], [1.0, 0.0])


def test_cases_of_a_table():
    assert pairs({"few": "tp=2", "more": "tp=2,pp=2 cp=2"}) == [
        ("few", "tp=2"),
        ("more", "tp=2,pp=2"),
        ("more", "cp=2"),
    ]

    @over("{model}", "tp=2", model=["llama"])
    def case():
        """Of one row."""

    assert [mark.args for mark in case.pytestmark] == [("model", ["llama"]), ("spec", ("tp=2",)), ("{model}",)]

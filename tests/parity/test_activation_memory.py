"""A Llama layer keeps what the literature says, all of it divided by tp: see docs/reference/activation_formula.md."""

import pytest
import torch

from tests import activations, models
from tests.activations import formula, own_bytes, transformers_bytes, transformers_formula
from tests.distributed import run, run_alone


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_saved_bytes_are_those_of_the_formula(tp):
    expected = formula(tp, torch.bfloat16)
    for measured in run(own_bytes, tp, f"tp={tp}", torch.bfloat16):
        assert measured == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("dtype", "autocast"), [(torch.float32, False), (torch.float32, True)])
def test_other_precisions(dtype, autocast):
    """fp32 throughout, and fp32 weights under autocast, as `TrainingArguments(bf16=True)` has it."""
    expected = formula(2, dtype, autocast)
    for measured in run(own_bytes, 2, "tp=2", dtype, autocast):
        assert measured == pytest.approx(expected, rel=0.05)


def test_formula_in_one_process():
    """What is divided is what plain transformers keeps."""
    assert run_alone(own_bytes, None, torch.bfloat16) == pytest.approx(formula(1, torch.bfloat16), rel=0.05)


def test_less_than_transformers_own_tensor_parallelism(tmp_path):
    """There norms, residual stream and the inputs of q, k, v, gate and up are whole on every rank."""
    models.build("llama", **activations.SIZES).to(torch.bfloat16).save_pretrained(tmp_path)
    plain = run(transformers_bytes, 4, str(tmp_path), 4)
    assert plain[0] == pytest.approx(transformers_formula(4), rel=0.05)
    for theirs, ours in zip(plain, run(own_bytes, 4, "tp=4", torch.bfloat16), strict=True):
        assert theirs > 1.5 * ours

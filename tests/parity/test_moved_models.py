"""A script moves or casts the whole model, `model.to(device)` or `.float()`, before the training and after it.

torch exchanges the contents of DTensors for that, which it refuses where anything has a weak reference to one.
"""

import pytest
import torch
from transformers import AutoModelForMaskedLM, BertForMaskedLM

from tests import models
from tests.rows import data
from tests.training import BF16, Tolerance, activate, fit, trainer_of

HOW = {"bf16": {"bf16": True}, "adafactor": {"optim": "adafactor", "learning_rate": 1e-3}}


def script(spec, out, kind, folder=None, how=None):
    """Train two steps, with moves around them."""
    data_ranks = activate(spec)
    model = models.build(kind) if folder is None else AutoModelForMaskedLM.from_pretrained(folder)
    if kind == "llama":
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    model.to("cpu")
    rows = data("llama", 16, 11)
    trainer, recorder = trainer_of(model, out, data_ranks, {"max_steps": 2, **HOW.get(how, {})}, train_dataset=rows)
    trainer.train()
    for move in (torch.nn.Module.cpu, torch.nn.Module.float):
        move(model)
    return fit(trainer, recorder, f"{out}/saved")


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "pp=2"])
def test_parameters_that_are_assigned_first(runs, spec):
    runs.compare(script, spec, "llama")


@pytest.mark.parametrize("spec", ["dp_shard=2"])
def test_a_tied_bias(runs, spec, tmp_path):
    """Of BERT's head, as in a sparse encoder: loading ties it, and asks who gathers it."""
    torch.manual_seed(models.SEED)
    BertForMaskedLM(models.CONFIGS["bert"]()).save_pretrained(tmp_path)
    runs.compare(script, spec, "bert", str(tmp_path))


@pytest.mark.parametrize(("spec", "how"), [("dp_shard=2", "adafactor"), ("tp=2", "bf16")])
def test_after_steps_that_remember_parameters(runs, spec, how):
    runs.compare(script, spec, "llama", None, how, tolerance=BF16 if how == "bf16" else Tolerance())

"""A step whose examples have no target, as prompts that fill a truncated batch: no gradient, as in one process."""

import pytest
import torch
from transformers import BertForMaskedLM

from tests import models
from tests.rows import data
from tests.training import activate, fit, trainer_of

SPECS = ("dp_shard=2", "tp=2", "cp=2")


def script(spec, out, kind, **settings):
    """Train three steps, the second of them on labels that are all ignored."""
    data_ranks = activate(spec)
    rows = [dict(row) for row in data("t5" if kind == "t5" else "llama", 24, 11)]
    for row in rows[8:16]:
        row["labels"] = torch.full_like(row["labels"], -100)
    torch.manual_seed(models.SEED)
    masks = kind == "bert"
    model = BertForMaskedLM(models.CONFIGS[kind]()) if masks else models.build(kind)
    trainer, recorder = trainer_of(
        model,
        out,
        data_ranks,
        {"train_sampling_strategy": "sequential", "max_steps": 3, **settings},
        train_dataset=rows,
    )
    return fit(trainer, recorder, f"{out}/saved")


@pytest.mark.parametrize("spec", SPECS)
def test_no_gradient(runs, spec):
    runs.compare(script, spec, "llama")


@pytest.mark.parametrize(("spec", "kind"), [("tp=2", "bert"), ("tp=2", "t5"), ("dp_shard=2", "gemma2")])
def test_no_gradient_of_other_losses(runs, spec, kind):
    runs.compare(script, spec, kind)


@pytest.mark.parametrize("spec", ["dp_shard=2,lean_loss=false", "tp=2,lean_loss=true"])
def test_lean_or_not(runs, spec):
    runs.compare(script, spec, "llama")

"""A script that sets a default device, by which torch calls its losses by name once more: as in one process."""

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import AutoModelForTokenClassification

from tests import models
from tests.distributed import run, run_alone_once
from tests.rows import Rows
from tests.training import activate, axes, close, none


def loop(spec=None):
    """Two steps over batches with unlike counts of targets, whose mean the model takes."""
    activate(spec)
    accelerator = Accelerator()
    torch.set_default_device(accelerator.device)
    torch.manual_seed(0)
    model = AutoModelForTokenClassification.from_config(models.bert(num_labels=5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = DataLoader(Rows(8, 11), batch_size=4 // (2 if spec else 1), generator=torch.Generator(accelerator.device))
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
    numbers = []
    for batch in rows:
        loss = model(**{**batch, "labels": batch["labels"].where(batch["labels"] < 0, batch["labels"] % 5)}).loss
        accelerator.backward(loss)
        numbers.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
    return numbers


@pytest.mark.parametrize("spec", ["dp_shard=2"])
def test_means_are_weighed_once(spec):
    wanted = run_alone_once(loop)
    for numbers in run(loop, axes(spec)["world"], spec, init=False):
        assert len(numbers) == len(wanted) == 2
        for step, (ours, theirs) in enumerate(zip(numbers, wanted, strict=True)):
            none(close(f"norm {step}", ours, theirs, 1e-5))  # relative; sums in another order

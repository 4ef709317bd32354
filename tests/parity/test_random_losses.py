"""A loss that draws random numbers draws those of one process over epochs, evaluations and checkpoints."""

from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Trainer

from tests import models
from tests.distributed import run, run_alone
from tests.rows import Rows
from tests.training import activate, arguments_of


class Noisy(Trainer):
    """A trainer whose loss is scaled by chance."""

    def compute_loss(self, model: Any, inputs: dict, return_outputs: bool = False, **kwargs: Any) -> Any:
        factor = 1 + torch.rand(3).mean()
        loss, outputs = super().compute_loss(model, inputs, True, **kwargs)
        return (factor * loss, outputs) if return_outputs else factor * loss


def losses(spec: str | None, out: str) -> list[float]:
    """Return the losses of three epochs, and of what follows a checkpoint in the midst of the second."""
    data_ranks, found = activate(spec), []
    for checkpoint in (None, f"{out}/checkpoint-5"):
        settings = {"num_train_epochs": 3, "max_steps": -1, "save_strategy": "steps", "save_steps": 1}
        settings |= {"eval_strategy": "steps", "eval_steps": 2}
        arguments = arguments_of(out, data_ranks, **settings)
        trainer = Noisy(models.build("llama"), arguments, train_dataset=Rows(22, 5), eval_dataset=Rows(11, 6))
        trainer.train(resume_from_checkpoint=checkpoint)
        found += [log[key] for log in trainer.state.log_history for key in ("loss", "eval_loss") if key in log]
    return found


@pytest.mark.parametrize("spec", ["tp=2", "pp=2", "cp=2"])
def test_losses_that_draw(tmp_path, spec):
    expected = run_alone(losses, None, str(tmp_path / "alone"))
    assert len(expected) > 20
    for found in run(losses, 2, spec, str(tmp_path / "ranks"), init=False):
        assert found == pytest.approx(expected, rel=1e-5)


def losses_of_loop(spec: str | None) -> list[float]:
    """Return the losses of three epochs of a loop of its own, each of which draws its order and its noise."""
    data_ranks, found = activate(spec), []
    accelerator, model = Accelerator(cpu=True), models.build("llama")
    loader = DataLoader(Rows(22, 5), batch_size=8 // data_ranks, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for _ in range(3):
        for batch in loader:
            loss = (1 + torch.rand(3).mean()) * model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(accelerator.gather(loss.detach()).mean().item())
    return found


@pytest.mark.parametrize("spec", ["tp=2", "pp=2", "cp=2"])
def test_losses_of_a_loop(spec):
    expected = run_alone(losses_of_loop, None)
    for found in run(losses_of_loop, 2, spec, init=False):
        assert found == pytest.approx(expected, rel=1e-5)

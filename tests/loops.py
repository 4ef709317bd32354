"""The plainest loops of scripts, for tests that compare their losses with those of one process."""

from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM

from tests import models
from tests.training import activate


def rows(*shape: int) -> torch.Tensor:
    """Tokens of this shape, the same ones everywhere."""
    return torch.randint(0, models.VOCABULARY, shape, generator=torch.Generator().manual_seed(3))


def losses(model: Any, batches: Iterable[torch.Tensor], rate: float = 0.1) -> list[float]:
    """Of one step of plain SGD per batch [rows, length]."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=rate)
    found = []
    for batch in batches:
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def prepare_loop(
    spec: str | None, folder: str, rate: float = 0.1, kind: Any = AutoModelForCausalLM
) -> tuple[Accelerator, Any, Any]:
    """Begin a loop of Accelerate under a layout, or in one process: its accelerator, model and plain SGD."""
    activate(spec)
    accelerator = Accelerator(cpu=True)
    model = kind.from_pretrained(folder).train()
    return accelerator, *accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=rate))


def take_step(
    accelerator: Accelerator, model: Any, optimizer: Any, loss: torch.Tensor, most: float = 1.0
) -> list[float]:
    """Step down from a loss, clipped to a norm of `most`; its value on this rank, and the norm before."""
    accelerator.backward(loss)
    norm = accelerator.clip_grad_norm_(model.parameters(), most)
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item(), float(norm)]

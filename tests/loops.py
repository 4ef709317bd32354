"""The plainest loop of a script, for tests that compare its losses with those of one process."""

from collections.abc import Iterable
from typing import Any

import torch

from tests import models


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

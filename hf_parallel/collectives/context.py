"""What autograd hands to both passes of a `torch.autograd.Function`."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Context(Protocol):
    """The context of one call: what the forward pass leaves in it the backward pass finds."""

    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[torch.Tensor, ...]:
        """What `save_for_backward` was given."""

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep inputs and outputs, in a way that sees whether they are changed."""

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        """Outputs without a gradient."""

    def set_materialize_grads(self, value: bool) -> None:
        """Are gradients that nobody has zeros, or None?"""

    def __getattr__(self, name: str) -> Any: ...

    def __setattr__(self, name: str, value: object) -> None: ...

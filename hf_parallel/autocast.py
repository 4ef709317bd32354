"""What autocast does, where this package does it before, or instead of, autocast itself."""

from __future__ import annotations

import contextlib

import torch


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast lowers products to, here and now; None where it is off."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def as_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """What autocast does to an argument of F.linear, or of attention."""
    dtype = autocast_dtype(tensor.device)
    return tensor if dtype is None or tensor.dtype == torch.float64 else tensor.to(dtype)


def no_autocast(device: str) -> contextlib.AbstractContextManager:
    """Nothing where autocast is off already, which is the rule in a backward: torch's context takes a while."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()

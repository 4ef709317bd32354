"""setfit: a head that trains in a loop of its own trains alike on all data ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_parallel.axes.data.parameters import make_identical
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.patching import patch


@patch("setfit.modeling:SetFitModel.fit", "each data rank would train a head of its own, on batches of its own order")
def fit_alike(original: Callable, self: Any, *args: object, **kwargs: object) -> None:
    """Train a differentiable head on whole batches on every rank: its loader is not shared out, nor is the head."""
    mesh = runtime.mesh()
    if mesh.data_size > 1 and self.has_differentiable_head:
        for axis in ("dp_replicate", "dp_shard"):
            runtime.equalise_random_state(axis, 0)
        make_identical(self.model_head, mesh.device)
        report.say(
            f"setfit trains its head in a loop of its own: each of {mesh.data_size} data ranks takes whole batches"
        )
    original(self, *args, **kwargs)

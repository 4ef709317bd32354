"""torchmetrics: metrics are gathered over data ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@patch("torchmetrics.metric:Metric.sync", "gathers over all processes, and so twice what ranks of one model share")
def sync_over_data_ranks(
    original: Callable,
    self: Any,
    dist_sync_fn: Callable | None = None,
    process_group: ProcessGroup | None = None,
    should_sync: bool = True,
    distributed_available: Callable | None = None,
) -> None:
    """Gather over the data ranks, unless the metric has a group of its own."""
    if process_group is None and self.process_group is None:
        process_group, should_sync = runtime.mesh().data_group, should_sync and runtime.mesh().data_size > 1
    original(self, dist_sync_fn, process_group, should_sync, distributed_available)

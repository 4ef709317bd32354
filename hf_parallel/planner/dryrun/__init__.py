"""The dry run: `parallelize` and a training step of any rank, run by one process on tensors without memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hf_parallel.planner.dryrun.run import DryRun, dry_run

__all__ = ["DryRun", "dry_run"]


def __getattr__(name: str) -> object:
    """Imported when asked for: a run that only names its process groups needs none of it."""
    if name not in __all__:
        raise AttributeError(f"module 'hf_parallel.planner.dryrun' has no attribute {name!r}")
    from hf_parallel.planner.dryrun import run

    return getattr(run, name)

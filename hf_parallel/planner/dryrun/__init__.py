"""The dry run: `parallelize` and a training step of any rank, run by one process on tensors without memory.

Its names are imported when they are asked for: a run that only names its process groups needs none of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_parallel.ask.lazy import export_lazily

if TYPE_CHECKING:
    from hf_parallel.planner.dryrun.run import DryRun, dry_run

__all__ = ["DryRun", "dry_run"]

export_lazily(__name__, dict.fromkeys(__all__, f"{__name__}.run"))

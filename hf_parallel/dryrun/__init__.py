"""The dry run: `parallelize` and a training step of any rank, run by one process on tensors without memory."""

from hf_parallel.dryrun.run import DryRun, dry_run

__all__ = ["DryRun", "dry_run"]

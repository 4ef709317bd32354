"""hf_parallel: unchanged Trainer and Accelerate scripts under every kind of parallelism."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from hf_parallel.ask.lazy import export_lazily
from hf_parallel.version import VERSION

__version__ = VERSION
__all__ = [
    "ParallelConfig",
    "SpecError",
    "activate",
    "clip_grad_norm",
    "full_state_dict",
    "full_tensor",
    "metrics",
    "notebook_launcher",
    "parallelize",
    "plan",
]

if TYPE_CHECKING:
    from hf_parallel.apply.parallelize import clip_grad_norm
    from hf_parallel.apply.weights import full_state_dict, full_tensor
    from hf_parallel.ask.config import ParallelConfig, SpecError
    from hf_parallel.hooks.activation import activate
    from hf_parallel.hooks.auto import plan
    from hf_parallel.hooks.library import parallelize
    from hf_parallel.hooks.monitoring import metrics
    from hf_parallel.hooks.notebook import notebook_launcher

_HOME = {
    "ParallelConfig": "hf_parallel.ask.config",
    "SpecError": "hf_parallel.ask.config",
    "activate": "hf_parallel.hooks.activation",
    "clip_grad_norm": "hf_parallel.apply.parallelize",
    "full_state_dict": "hf_parallel.apply.weights",
    "full_tensor": "hf_parallel.apply.weights",
    "metrics": "hf_parallel.hooks.monitoring",
    "notebook_launcher": "hf_parallel.hooks.notebook",
    "parallelize": "hf_parallel.hooks.library",
    "plan": "hf_parallel.hooks.auto",
}

# Under `python -m hf_parallel` the runner decides what is touched; argv[0] is "-m" while it is being found.
if not (sys.argv[:1] == ["-m"] and "hf_parallel" in sys.orig_argv):
    from hf_parallel.hooks.trainer.flag import install_on_import

    install_on_import()

export_lazily(__name__, _HOME)

"""Every place where another library is changed while a layout is active, and why: collected from where it is done.

Each replacement carries `@patch(target, why)`; nowhere else is anything patched, and `docs/patches.md` lists them all.
Checked on the versions in `patching.CHECKED`. On others the signature decides: a replacement relies on the parameters
that it names. A target of Transformers or Accelerate that is gone or has changed stops the start, one of the other
libraries what would use it.
"""

from __future__ import annotations

from hf_parallel.hooks import entries, monitoring, own_loops, sentence_transformers, weights  # noqa: F401
from hf_parallel.hooks.accelerate import accelerator, data, engines, processes, save_state  # noqa: F401
from hf_parallel.hooks.bitsandbytes import eight_bit, four_bit  # noqa: F401
from hf_parallel.hooks.patching import DECLARED, Patch
from hf_parallel.hooks.peft import adapters, converting, merging, settings  # noqa: F401
from hf_parallel.hooks.trainer import (  # noqa: F401
    checkpoints,
    evaluation,
    losses,
    means,
    plain_resume,
    resuming,
    token_budget,
    training,
)
from hf_parallel.hooks.transformers import (  # noqa: F401
    box_counts,
    checkpointed,
    from_pretrained,
    kernels,
    loading,
    masks,
    neftune,
    parts,
)
from hf_parallel.hooks.trl import ahead, online, reference, server_mode, trainers  # noqa: F401


def all_patches() -> list[Patch]:
    """Those of a layout."""
    return [patch for patch in DECLARED if not patch.without_layout]


def patches_without_layout() -> list[Patch]:
    """All that changes where no layout is active: plain Trainer resumes from the checkpoints of layouts."""
    return [patch for patch in DECLARED if patch.without_layout]

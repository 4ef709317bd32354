"""Every place where another library is changed while a layout is active, and why: collected from where it is done.

Each replacement carries `@patch(target, why)`; nothing else is patched. docs/reference/patches.md lists all.
Checked on the versions in `patching.CHECKED`. On others the signature decides: a replacement relies on the parameters
that it names. A target of Transformers or Accelerate that is gone or has changed stops the start, one of the other
libraries what would use it.
"""

from __future__ import annotations

from hf_parallel.hooks import (  # noqa: F401
    bitsandbytes,
    entries,
    front_ends,
    loading,
    loss_scales,
    model_parts,
    module_hooks,
    monitoring,
    own_files,
    own_loops,
    sentence_transformers,
    transformers,
)
from hf_parallel.hooks.accelerate import accelerator, data, processes, save_state, shares  # noqa: F401
from hf_parallel.hooks.patching import Patch, list_declared
from hf_parallel.hooks.peft import adapters, added, before, combining, placing, stages  # noqa: F401
from hf_parallel.hooks.trainer import (  # noqa: F401
    checkpoints,
    evaluation,
    losses,
    means,
    plain_resume,
    resuming,
    searching,
    token_budget,
    training,
)
from hf_parallel.hooks.trl import experimental, online, preferences, servers, trainers  # noqa: F401


def list_patches(without_layout: bool = False) -> list[Patch]:
    """Return the patches of a layout, or those without one: plain Trainer resumes from the checkpoints of layouts."""
    return [patch for patch in list_declared() if patch.without_layout == without_layout]

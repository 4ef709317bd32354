"""Trainer's `use_liger_kernel` on a parallel model, which Liger changes when training begins.

    rotation, norms, MLPs          as Liger puts them on, behind what the layout has made of the modules: `kernels.py`
    head and loss in one           over data ranks and in a pipeline's last stage; where logits or sequences are split,
                                   or experts balanced, the layout's own loss stays, and the report says so
    cross-entropy of whole logits  not where they are split

Liger writes rotated queries and the gradients of an MLP's halves into the products that gave them, which torch does
not notice: what selective checkpointing keeps of a layer would change under it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from hf_parallel.config import ParallelConfig
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch
from hf_parallel.kernels import place
from hf_parallel.model.experts import named_experts
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments

FUSED = "fused_linear_cross_entropy"
#: Kernels that write into what a layer's products gave; on by default, each where a model has it.
_WRITES = ("rope", "swiglu", "geglu")


def check(args: TrainingArguments, config: ParallelConfig) -> None:
    """Refuse what Liger is told to do and cannot, before anything trains."""
    told = args.liger_kernel_config or {}
    reason = _why_not_fused(config)
    if told.get(FUSED) and reason is not None:
        refuse(_spelled(FUSED, True), reason, _spelled(FUSED, False))
    if told.get("cross_entropy") and config.tp_size * config.cp_size > 1:
        refuse(_spelled("cross_entropy", True), "the layout's own loss reads split logits", "False")
    if config.activation_checkpointing == "selective" and any(told.get(name, True) for name in _WRITES):
        off = ", ".join(f'"{name}": False' for name in _WRITES)
        refuse(
            "use_liger_kernel=True",
            "writes into products that activation_checkpointing=selective keeps",
            f"activation_checkpointing=full, or liger_kernel_config={{{off}}},",
        )


def check_losses(kind: type, args: TrainingArguments) -> None:
    """Refuse losses of TRL's that read the head's weight: today's versions take Liger's layers alone.

    Args:
        kind: TRL's trainer.
    """
    config = runtime.mesh().config
    names = vars(sys.modules[kind.__module__])
    fused = args.use_liger_kernel and any(name.startswith("LigerFused") for name in names)
    if config.world_size > config.data_parallel_size and (fused or getattr(args, "use_liger_loss", False)):
        key = "use_liger_kernel" if fused else "use_liger_loss"
        refuse(f"{key}=True", "TRL's loss in one with the head reads a whole head", f"{key}=False")


def _spelled(name: str, value: bool) -> str:
    return f'liger_kernel_config={{"{name}": {value}}}'


def _why_not_fused(config: ParallelConfig) -> str | None:
    """Why head and loss cannot be one kernel, or None if they can."""
    if config.tp_size > 1:
        return f"tp_size={config.tp_size} splits the logits"
    if config.cp_size > 1:
        return f"cp_size={config.cp_size} splits the sequence"
    return "lean_loss=true does that" if config.lean_loss == "true" else None


@patch("transformers.trainer:apply_liger_kernel", "hides what a layout has made of modules, and the engine's forward")
def apply_liger_kernel(original: Callable, model: PreTrainedModel, kernel_config: dict[str, bool] | None) -> None:
    """Put Liger's kernels behind the layout, without its loss where that cannot be."""
    state = runtime.parallel_state(model)
    if state is None:
        original(model, kernel_config)
        return
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    told, reason = dict(kernel_config or {}), _why_not_fused(state.config)
    if reason is None and any(True for _ in named_experts(base)):
        reason = "its loss of experts' balance is of one process"
    if reason is not None and told.get(FUSED, True):
        told[FUSED] = False
        if state.is_first(FUSED):
            state.notes.append(f"use_liger_kernel: the layout's own loss, not Liger's: {reason}")
    place(base, functools.partial(original, model, told), "use_liger_kernel")

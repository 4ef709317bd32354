"""`pipeline_fill=kfac` under Trainer: what it cannot train."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_parallel.ask.spec import refuse
from hf_parallel.hooks import report
from hf_parallel.hooks.trainer import joint_steps

if TYPE_CHECKING:
    from transformers import Trainer


def check_trainer_for_fill(trainer: Trainer) -> None:
    """Refuse training of which the bubbles cannot take the curvature.

    Raises:
        SpecError: the trainer has a loss, a step, a precision or an optimizer of such a kind.
    """
    engine = joint_steps.find_engine_of(trainer)
    if engine is None or engine.fill is None:
        return
    args, asked, works = trainer.args, f"pipeline_fill={engine.config.pipeline_fill}", "pipeline_fill=none"
    optimizer = str(getattr(args.optim, "value", args.optim))
    reason = joint_steps.find_reason_not_announced(trainer)
    if reason is not None:
        refuse(asked, f"takes the curvature of the model's own loss, but {reason}", works)
    if args.fp16:
        refuse(asked, "a step that fp16 leaves out would spoil the curvature of several; fp16=True", "bf16=True")
    if getattr(args, "gradient_checkpointing", False) or getattr(args, "activation_checkpointing", False):
        refuse(asked, "would see each forward pass twice; gradient_checkpointing=True", "gradient_checkpointing=False")
    if optimizer in joint_steps.FUSED or optimizer.endswith(joint_steps.LAYERWISE):
        refuse(asked, f"optim={optimizer} updates weights in the backward pass", "optim=adamw_torch")
    oldest = 2 * engine.fill.interval - 1
    report.say(
        f"{asked} is another algorithm than training in one process: gradients are preconditioned by curvature that "
        f"is up to {oldest} steps old (K-FAC in pipeline bubbles, arXiv 2211.14133); {works} has the numbers of one "
        "process"
    )

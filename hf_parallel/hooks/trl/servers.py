"""Settings that say who serves a trainer: refused where nobody would ask, before anything trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_parallel.ask.keys.run import IN_TURN, ONE_STEP_BEHIND
from hf_parallel.hooks import runtime
from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

ASKED_AHEAD = f"rollouts={ONE_STEP_BEHIND}"
#: Trainers that ask their reference in the way that is known.
_WITH_REFERENCE = ("DPOTrainer", "GRPOTrainer", "RLOOTrainer")


def refuse_loop() -> None:
    """A loop without a Trainer asks nobody."""
    current = runtime.current()
    for name, default in (("rollouts", IN_TURN), ("reference", None)):
        value = default if current is None else getattr(current.config, name)
        if value != default:
            refuse(f"{name}={value}", "only TRL's trainers ask servers", f"{name}={str(default).lower()}")


def classes_of(trainer: Trainer) -> list[type]:
    """TRL's among its classes, the innermost one first; none of another library's trainer."""
    return [cls for cls in type(trainer).__mro__ if cls.__module__.startswith("trl.")]


def check(trainer: Trainer, args: TrainingArguments) -> None:
    """Refuse a Trainer that would not ask, or not what was meant."""
    kinds = {cls.__name__ for cls in classes_of(trainer)}
    _check_rollouts(type(trainer).__name__, kinds, args)
    _check_reference(type(trainer).__name__, kinds, args)


def _check_rollouts(name: str, kinds: set[str], args: TrainingArguments) -> None:
    if runtime.mesh().config.rollouts == IN_TURN:
        return
    if "GRPOTrainer" not in kinds:
        refuse(ASKED_AHEAD, f"{name} does not weigh what older weights drew", do="GRPOTrainer does")
    if not args.use_vllm:
        why = "drawing in the training's own processes takes its turn: use_vllm=False"
        refuse(ASKED_AHEAD, why, f"rollouts={IN_TURN}")
    if not args.vllm_importance_sampling_correction:
        why = "nothing would make up for the lag: vllm_importance_sampling_correction=False"
        refuse(ASKED_AHEAD, why, "vllm_importance_sampling_correction=True")


def _check_reference(name: str, kinds: set[str], args: TrainingArguments) -> None:
    address = runtime.mesh().config.reference
    if address is None:
        return
    what = f"reference={address}"
    if kinds.isdisjoint(_WITH_REFERENCE):
        refuse(what, f"{name} asks no reference model", do="`trl grpo`, `trl rloo` and `trl dpo` do")
    if getattr(args, "sync_ref_model", False):
        refuse(what, "a server's model does not follow the policy: sync_ref_model=True", "sync_ref_model=False")
    if getattr(args, "precompute_ref_log_probs", False):
        why = "log-probabilities computed before training need no second model: precompute_ref_log_probs=True"
        refuse(what, why, "reference=none")
    if args.beta == 0:
        refuse(what, "there is no reference with beta=0", "reference=none")

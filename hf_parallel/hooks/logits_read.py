"""Will the script read whole logits? Asked before `--parallel auto` chooses: a loss in chunks needs less memory.

A Trainer tells when it is made; at `from_pretrained` the script has told no more than what it imports and defines.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Trainer

#: Who may read them in a loop of the script's own.
LOOP_READER = "a loop of the script's own may read them"


def find_trainer_reader(kind: type, given: dict[str, Any], arguments: Any) -> str | None:
    """Return what reads logits in training with a Trainer of this class and these arguments; None if nothing does."""
    if does_keep_no_logits(kind):
        return None
    smooths = bool(getattr(arguments, "label_smoothing_factor", 0))
    return find_reader_before_trainer(kind, given.get("compute_loss_func") is not None, smooths)


def find_script_reader(arguments: Any) -> str | None:
    """Return what reads logits in the running script, by its names: its trainers, or a bare Accelerator."""
    from transformers import Trainer

    names = list(vars(sys.modules["__main__"]).values())
    kinds = [kind for kind in names if inspect.isclass(kind) and issubclass(kind, Trainer)]
    own = [kind for kind in kinds if kind.__module__ == "__main__"] or kinds  # it derives what it imports
    found = [find_trainer_reader(kind, {}, arguments) for kind in own]
    if own:
        return found[0] if all(found) else None
    loops = any(inspect.isclass(kind) and kind.__name__ == "Accelerator" for kind in names)
    return LOOP_READER if loops else find_trainer_reader(Trainer, {}, arguments)


def find_reader_before_trainer(kind: type, own_function: bool, smooths: bool) -> str | None:
    """Return what may read logits in training with a Trainer of this class, before there is one.

    Args:
        own_function: is it given a compute_loss_func?
        smooths: is label_smoothing_factor set?
    """
    if has_own_compute_loss(kind):
        return f"{kind.__name__} computes the loss"
    if own_function:
        return "compute_loss_func computes the loss"
    return "label_smoothing_factor reads them" if smooths else None


def has_own_compute_loss(kind: type[Trainer]) -> bool:
    """Return whether a class of trainers has a `compute_loss` of its own."""
    from transformers import Trainer

    replaced = getattr(Trainer.compute_loss, "__module__", None) != Trainer.__module__  # by a script, for all classes
    return replaced or kind.compute_loss is not Trainer.compute_loss


def does_keep_no_logits(kind: type) -> bool:
    """Return whether it is one of TRL's whose loss never has logits whole.

    Their modules give a model the fused head that they ask.
    """
    return kind.__module__.startswith("trl.") and hasattr(sys.modules.get(kind.__module__), "add_fused_lm_head")

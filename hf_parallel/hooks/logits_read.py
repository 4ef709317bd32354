"""Will the script read whole logits? Asked before `--parallel auto` chooses: a loss in chunks needs less memory.

A Trainer tells when it is made; at `from_pretrained` the script has told no more than what it imports and defines.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import Trainer


def by_trainer(kind: type, given: dict[str, Any], arguments: Any) -> str | None:
    """Who reads them in training with a Trainer of this class, given these arguments; None: nobody is known to."""
    if keeps_none(kind):
        return None
    smooths = bool(getattr(arguments, "label_smoothing_factor", 0))
    return why_read_by(kind, given.get("compute_loss_func") is not None, smooths)


def by_script(arguments: Any) -> str | None:
    """Return what reads logits in the running script, by its names: its trainers, or a bare Accelerator."""
    from transformers import Trainer

    names = list(vars(sys.modules["__main__"]).values())
    kinds = [kind for kind in names if inspect.isclass(kind) and issubclass(kind, Trainer)]
    own = [kind for kind in kinds if kind.__module__ == "__main__"] or kinds  # it derives what it imports
    found = [by_trainer(kind, {}, arguments) for kind in own]
    if own:
        return found[0] if all(found) else None
    loops = any(inspect.isclass(kind) and kind.__name__ == "Accelerator" for kind in names)
    return by_loop() if loops else by_trainer(Trainer, {}, arguments)


def by_loop() -> str:
    """Who may read them in a loop of the script's own."""
    return "a loop of the script's own may read them"


def why_read_by(kind: type, own_function: bool, smooths: bool) -> str | None:
    """Who may read logits in training with a Trainer of this class, before there is one.

    Args:
        own_function: is it given a compute_loss_func?
        smooths: is label_smoothing_factor set?
    """
    if class_overrides(kind):
        return f"{kind.__name__} computes the loss"
    if own_function:
        return "compute_loss_func computes the loss"
    return "label_smoothing_factor reads them" if smooths else None


def class_overrides(kind: type[Trainer]) -> bool:
    """Has a class of trainers a `compute_loss` of its own?"""
    from transformers import Trainer

    return kind.compute_loss is not Trainer.compute_loss


def keeps_none(kind: type) -> bool:
    """Is it one of TRL's whose loss never has them whole? Their modules give a model the fused head that they ask."""
    return kind.__module__.startswith("trl.") and hasattr(sys.modules.get(kind.__module__), "add_fused_lm_head")

"""`batch_shares` in a loop without a Trainer: a loss is weighed when its backward pass begins.

the model's loss, also scaled     nothing to do: its means run over the targets of all data ranks
a loss of the loop's own          taken for a mean over examples: times `n D / N`, for n of N examples on D ranks
both in one sum                   refused: no factor is right for both
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from hf_parallel.ask.spec import refuse
from hf_parallel.hooks import runtime
from hf_parallel.hooks.accelerate.shares import cut_of, full_share

if TYPE_CHECKING:
    from accelerate.state import GradientState


def _watched() -> runtime.LoopLosses | None:
    """Return what is known of the loop; None where losses need no weight, or a Trainer gives them."""
    current = runtime.current()
    if current is None or current.in_trainer or not current.config.shares_batches:
        return None
    return current.loop


def note_forward(loss: torch.Tensor | None) -> None:
    """A model that trains was called.

    Args:
        loss: what it returned, if that is a mean over the targets of all data ranks.
    """
    loop = _watched()
    if loop is not None:
        loop.forwards += 1
        loop.weighed += [] if loss is None else [loss]


def weigh(loss: torch.Tensor, state: GradientState) -> torch.Tensor:
    """Return the loss as its backward pass is to begin from."""
    loop = _watched()
    if loop is None:
        return loss
    weighed, loop.weighed, loop.forwards = loop.weighed, [], 0
    what = f"batch_shares={runtime.mesh().config.batch_shares}"
    of_model, of_loop = _sources(loss, weighed)
    if of_model and of_loop:
        why = "the loop adds a term of its own to the model's loss, and they have unlike weights"
        refuse(what, why, do="a loss that is computed from logits works, and so does batch_shares=even")
    if of_model:
        return loss
    if cut_of(state) is None:
        refuse(
            what, "the loop reads batches that accelerate has not shared out", do="accelerator.prepare(loader) works"
        )
    return loss * full_share(state)


def check_step() -> None:
    """Refuse an optimizer's step after a backward pass that was not seen."""
    loop = _watched()
    if loop is not None and loop.forwards:
        what = f"batch_shares={runtime.mesh().config.batch_shares}"
        refuse(what, "loss.backward() does not weigh a data rank's part", do="accelerator.backward(loss) works")


def _sources(loss: torch.Tensor, weighed: list[torch.Tensor]) -> tuple[bool, bool]:
    """Return whether gradients reach weights through one of the losses `weighed`, and whether by another way."""
    ends = {one.grad_fn for one in weighed}
    waiting, seen = [loss.grad_fn], set()
    of_model, of_loop = False, not ends
    while waiting and not (of_loop and (of_model or not ends)):
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in ends:
            of_model = True
        elif node.next_functions:
            waiting += [before for before, _ in node.next_functions]
        else:
            of_loop = True
    return of_model, of_loop

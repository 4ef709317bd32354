"""Kernels in the place of a module's forward, as Liger's and those of the Hub: behind what a layout has made of it.

Both libraries put a `forward` on the module itself, where it hides that of the module's class, and with it what the
layout does there: sums of gradients, regions, stages. Here it goes behind them:

    a norm or an activation      computes with the weights that its mixin gives it, whose gradients are summed
    an MLP                       calls its linears, which are the split ones
    experts, and other layers    stay as they are where a layout has split them: their kernels read weights themselves
    the model                    inside a pipeline's stages, or inside the model's hooks

`torch` sees none of the writes of such a kernel: see `hooks/model_parts.py` for what cannot be.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from hf_parallel.axes.tensor.layers import PartialGradient
from hf_parallel.ranks.local import has_mixin, make_class_computing, without_mixins

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Liger's MLPs: they call the linears inside them and read no weight of theirs.
_MLPS = ("SwiGLU", "GEGLU", "Phi3SwiGLU", "Qwen3MoeSwiGLU", "HunyuanV1SwiGLU", "FalconH1SwiGLU")
CALL_LINEARS = {f"Liger{kind}MLP" for kind in _MLPS}


@dataclass(frozen=True)
class _Before:
    """A module before kernels came: its class, and the forward of its own."""

    name: str
    module: nn.Module
    kind: type
    forward: Callable | None


#: The attribute of a model that no pipeline runs: the forward inside its hooks.
INNER_FORWARD = "_hf_parallel_inner_forward"


def place_kernels(model: PreTrainedModel, put: Callable[[], object], asked: str) -> None:
    """Call `put`, which gives modules of a parallel model other forwards; kernels that are not used get a note."""
    state, left_out = model._hf_parallel, set()
    shown = contextlib.nullcontext() if state.pipeline is None else state.pipeline.remote_modules.shown(model)
    with shown:
        before = [_Before(name, m, type(m), vars(m).get("forward")) for name, m in model.named_modules()]
        split = [former for former in before if has_mixin(former.kind)]
        for former in split:  # for now: a library compares a kernel's arguments with those of a module's own class
            former.module.__class__ = without_mixins(former.kind)
        try:
            put()
        finally:
            for former in split:
                former.module.__class__ = former.kind
    for former in before:
        module, forward = former.module, vars(former.module).get("forward")
        if forward is None or forward is former.forward:
            continue
        if module is model:  # with its own loss: inside the model's hooks, or the pipeline
            assert former.forward is not None  # the engine's, or what calls the model's hooks
            model.forward = former.forward
            if state.pipeline is None:
                vars(model)[INNER_FORWARD] = forward
            else:
                state.pipeline.set_forward(forward)
            continue
        kernel = getattr(forward, "__func__", forward)
        is_split = any(has_mixin(type(inner)) for inner in module.modules())
        fits = isinstance(module, PartialGradient) or _name(kernel) in CALL_LINEARS  # else it reads split weights
        if not is_split or (fits and not has_mixin(former.kind)):
            continue
        vars(module).pop("forward")
        if former.forward is not None:
            module.forward = former.forward
        if fits:
            module.__class__ = make_class_computing(kernel, former.kind)
        else:
            left_out.add(_name(forward))
    if left_out and state.note_line(asked):
        state.notes.append(f"{asked}: split layers keep their own code in place of {', '.join(sorted(left_out))}")


def _name(forward: Callable) -> str:
    """Return the name of a kernel, such as `LigerRMSNorm`, from its forward."""
    return getattr(forward, "__qualname__", type(forward).__name__).partition(".")[0]

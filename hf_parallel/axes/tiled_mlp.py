"""MLPs over pieces of the sequence (Arctic Long Sequence Training, Bekman et al., 2025, arXiv:2506.13996).

    forward     x [b, s, h] -> pieces of about h tokens -> the MLP for each -> y [b, s, h]        kept: x
    backward    for each piece the MLP once more, and its gradients                     wide: one piece

An MLP's inner activations are several times as wide as its input: of a long sequence they are the fullest moment even
where layers are checkpointed. Numbers stay, because an MLP computes each token by itself, which is seen by running the
model's own modules whole and in pieces. A module is called in pieces from outside, so that a region of tensor
parallelism gathers and scatters each piece, and the tokens of a rank stay its own.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.axis import Axis

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.axes.axis import Building
    from hf_parallel.model.anatomy import Anatomy

_TOKENS, _CUT = 7, 3  # of the sequence that is run, and where it is cut


@dataclass(frozen=True)
class TiledFacts:
    """Names of the MLPs in each layer, or the reason why there are none."""

    names: tuple[str, ...] = ()
    reason: str | None = None


class TiledMlp(Axis[TiledFacts, TiledFacts]):
    """Calls MLPs piece by piece."""

    name = key = "tiled_mlp"
    off = False

    def read(self, model: PreTrainedModel, config: ParallelConfig) -> TiledFacts:
        """Find the children of layers that act on each token by itself."""
        from hf_parallel.model.anatomy import get_text_config, list_transformer_blocks
        from hf_parallel.model.experts import iterate_experts

        if next(iter(iterate_experts(model)), None):
            return TiledFacts(reason="has experts, whose router sends a whole batch at once")
        width = getattr(get_text_config(model), "hidden_size", 0)
        blocks = list_transformer_blocks(model)
        known: dict[tuple, bool] = {}
        names: set[str] = set()
        for block in blocks:
            mlps = []
            for name, child in block.named_children():
                widths = tuple(filter(None, map(_read_widths, child.modules())))
                kind = type(child), widths  # asked about once, as layers of a model are alike
                if kind not in known:
                    known[kind] = len(widths) > 1 and does_act_per_token(child, width)
                if known[kind]:
                    mlps.append(name)
            if not mlps:
                return TiledFacts(reason=f"has no MLP in {type(block).__name__} that acts on each token by itself")
            names.update(mlps)
        return TiledFacts(tuple(sorted(names)), None if blocks else "has no layers")

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: TiledFacts) -> TiledFacts:
        """Refuse a model without such MLPs."""
        if facts.reason:
            refuse("tiled_mlp=true", f"{anatomy.name} {facts.reason}", "tiled_mlp=false")
        return facts

    def finish(self, model: nn.Module, part: TiledFacts, building: Building) -> None:
        """Call the MLPs of this rank's layers in pieces."""
        for _, layers in building.roots:
            for layer in layers:
                for name, child in layer.named_children():
                    if name in part.names:  # what `Module.compile` sets: it is called with the module's hooks inside
                        child._compiled_call_impl = functools.partial(call_in_pieces, child._call_impl)


def call_in_pieces(
    mlp: Callable[[torch.Tensor], torch.Tensor], *args: torch.Tensor, **named: torch.Tensor
) -> torch.Tensor:
    """Return the MLP of its one argument [.., s, h], computed for about h tokens at a time.

    Each piece runs again in the backward pass, and draws the random numbers of its first run.
    """
    from torch.utils.checkpoint import checkpoint

    (x,) = (*args, *named.values())  # under whatever name: `does_act_per_token` has seen that there is one
    tokens, width, length = x.numel() // x.shape[-1], x.shape[-1], x.shape[-2]
    pieces = min(length, math.ceil(tokens / width))
    if pieces <= 1:
        return mlp(x)
    run = functools.partial(checkpoint, mlp, use_reentrant=False) if torch.is_grad_enabled() else mlp
    parts = x.split(math.ceil(length / pieces), dim=-2)
    return torch.cat([run(part.contiguous()) for part in parts], dim=-2)  # GPT-2's layers take a view of their input


# ---- the proof ------------------------------------------------------------------------------------------------------


class _RankOne(nn.Module):
    """A linear of the same widths whose weights are the product of two vectors: nothing large is made for a proof."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(inputs + outputs)
        self.rows, self.columns = (torch.randn(n, generator=random) for n in (outputs, inputs))
        self.weight = self.rows  # its dtype is asked for

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.columns).sum(-1, keepdim=True) / math.sqrt(len(self.columns)) * self.rows


def does_act_per_token(module: nn.Module, width: int) -> bool:
    """Run a module of one argument whole and in two pieces, on small stand-ins of its weights; True if both agree."""
    if len(inspect.signature(module.forward).parameters) != 1:
        return False
    random = torch.Generator().manual_seed(0)
    x = torch.randn(1, _TOKENS, width, generator=random)
    owned = [(owner, name, child) for owner in module.modules() for name, child in owner._modules.items() if child]
    replaced = [(owner, name, child, widths) for owner, name, child in owned if (widths := _read_widths(child))]
    for owner, name, _, widths in replaced:
        owner._modules[name] = _RankOne(*widths)
    training = module.training
    try:
        left = {
            name: torch.randn(value.shape, generator=random)
            for name, value in (*module.named_parameters(), *module.named_buffers())
            if value.is_floating_point()
        }
        run = functools.partial(torch.func.functional_call, module.eval(), left)
        with torch.no_grad():
            whole, pieces = run((x,)), [run((piece,)) for piece in (x[:, :_CUT], x[:, _CUT:])]
    except Exception:  # whatever its own code raises on a single input: it is no MLP
        return False
    finally:
        module.train(training)
        for owner, name, child, _ in replaced:
            owner._modules[name] = child
    if not torch.is_tensor(whole) or whole.shape != x.shape:
        return False
    return torch.allclose(whole, torch.cat(pieces, dim=1), rtol=1e-4, atol=1e-5)


def _read_widths(module: nn.Module) -> tuple[int, int] | None:
    """Return the input and output width of a linear; None for any other module."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, Conv1D):
        return module.nx, module.nf
    return (module.in_features, module.out_features) if isinstance(module, nn.Linear) else None


TILED_MLP = TiledMlp()

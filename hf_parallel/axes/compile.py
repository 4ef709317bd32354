"""torch.compile of each layer by itself: equal layers share one graph, and what lies between them stays as it is.

The layer's own forward is compiled, not what FSDP2, sequence parallelism and checkpointing put around it, which run as
ever. A region of tensor parallelism communicates inside the layer: its collectives are operations of the graph
(`ranks/differentiable.py`). What no graph holds of them is refused with the plan: `TensorPart.why_not_compiled`.
Experts, whose tokens travel as a router says, run between two graphs: attention and router, and the rest.

`activation_checkpointing=selective` is how the graph of forward and backward is cut in two, and `tp_overlap=true` how
its products communicate: `graphs.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from hf_parallel.axes.axis import Axis
from hf_parallel.axes.recompute import make_selective_contexts, switch_checkpoint_off
from hf_parallel.model.calls import CACHES

if TYPE_CHECKING:
    from torch import nn

    from hf_parallel.axes.axis import Building

BACKEND = "inductor"
#: What torch.compile notes on a function, and what transformers calls the forward of a layer with its checkpoint.
_COMPILED, _CHECKPOINT = "_torchdynamo_orig_callable", "forward_with_checkpointing"


#: Where a module keeps its hooks by number, and what else it knows of each.
_HOOKS = (
    ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)


class Compile(Axis[None, None]):
    """Compiles layers once every other axis has been applied."""

    name = key = "compile"
    off = "none"

    def finish(self, model: nn.Module, part: None, building: Building) -> None:
        """Compile the layers of this rank."""
        layers, mesh = [layer for _, layers in building.roots for layer in layers], building.mesh
        settings = {}
        if mesh.config.tp_overlap:
            from hf_parallel.axes.graphs import FuseProducts, share_memory

            share_memory(mesh.group("tp"), mesh.host_group_of_training)
            settings["options"] = {"post_grad_custom_post_pass": FuseProducts()}
        compile_layers(layers, mesh.config.recompute_way_on(mesh.rank) == "selective", **settings)


def compile_layers(layers: Iterable[nn.Module], selective: bool, **settings: Any) -> None:
    """Compile the forward of each layer, in place.

    Args:
        selective: graphs keep for the backward pass what `activation_checkpointing=selective` keeps.
        settings: of torch.compile.
    """
    import torch

    from hf_parallel.axes.data import lowered
    from hf_parallel.model.experts import iterate_experts
    from hf_parallel.ranks.local import put_in_front

    settings = {"backend": BACKEND, **settings}
    if selective:
        from hf_parallel.axes.graphs import keep_products

        settings = keep_products(settings)
    for layer in layers:
        lowered.leave_layer(layer)
        for _, experts in list(iterate_experts(layer)):
            put_in_front(make_mixin_outside_graphs(selective), experts)
        if selective:
            layer.register_forward_pre_hook(switch_checkpoint_off)  # a checkpoint around the graph would run it again
        number_hooks_alike(layer)
        if hasattr(layer.forward, _COMPILED):
            continue
        # From transformers 5.23 on a layer's checkpoint is part of its forward: what is beneath it is compiled. In a
        # graph torch 2.13 takes no DTensor for a checkpoint (a mesh is among what it saves), nor a module's change.
        inside: Any = type(layer).forward
        while inside.__code__.co_name == _CHECKPOINT:
            inside = inside.__wrapped__
        if inside is type(layer).forward:
            layer.forward = torch.compile(layer.forward, **settings)
        else:
            layer.forward = _wrap_in_checkpoint(layer, torch.compile(inside.__get__(layer), **settings))


@functools.cache
def make_mixin_outside_graphs(selective: bool) -> type[nn.Module]:
    """Return a mixin of experts, at whose call a graph breaks: they run with their hooks as without a compiler.

    How many tokens travel, and how many an expert gets, is known once a router has chosen, and to no graph.

    Args:
        selective: experts keep for the backward pass what `activation_checkpointing=selective` keeps. No checkpoint
            is around the layer, whose graphs do so themselves.
    """
    import torch
    from torch.utils.checkpoint import checkpoint

    class OutsideOfGraphs(torch.nn.Module):
        """Mixin of a module that torch.compile does not look into."""

        @torch.compiler.disable
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if not (selective and self.training and torch.is_grad_enabled()):
                return super().__call__(*args, **kwargs)
            return checkpoint(
                super().__call__, *args, use_reentrant=False, context_fn=make_selective_contexts, **kwargs
            )

    return OutsideOfGraphs


def _wrap_in_checkpoint(layer: Any, compiled: Callable) -> Callable:
    """Return the compiled forward with the layer's own checkpoint around it, as transformers decides on it."""
    import torch

    @functools.wraps(layer.forward)
    def forward(*args: Any, **kwargs: Any) -> Any:
        if not (layer.gradient_checkpointing and layer.training and torch.is_grad_enabled()):
            return compiled(*args, **kwargs)
        if not getattr(layer, "_can_checkpoint_with_cache", False):
            kwargs.update(dict.fromkeys(kwargs.keys() & CACHES))
        if kwargs.get("use_cache"):
            kwargs["use_cache"] = False
        return layer._gradient_checkpointing_func(functools.partial(compiled, **kwargs), *args)

    setattr(forward, _COMPILED, layer.forward)
    return forward


def number_hooks_alike(layer: nn.Module) -> None:
    """Give this package's hooks inside a layer the numbers -1, -2, … in the place of torch's, in the same order.

    torch counts hooks over all modules of a process, and a graph holds for the numbers that it has seen: with those of
    torch each layer would have a graph of its own.
    """
    for module in layer.modules():
        if module is layer:
            continue  # its hooks run outside of the graph
        for kind in _HOOKS:
            numbers = {number: -place for place, number in enumerate(vars(module)[kind[0]], start=1)}
            for numbered in (vars(module)[name] for name in kind):
                entries = [(numbers[number], value) for number, value in numbered.items()]
                numbered.clear()
                numbered.update(entries)


COMPILE = Compile()

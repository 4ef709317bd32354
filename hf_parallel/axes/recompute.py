"""Activation checkpointing (Chen et al., 2016): run a layer's forward again in the backward rather than keep it all.

    full         each layer keeps its input
    every:N      so does every N-th layer, the others keep everything
    selective    each layer keeps its input and what is dear to compute or to send: see `is_kept` below

A script's own `gradient_checkpointing=True` switches layers on too; what the spec says of them still holds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from hf_parallel.ask.keys.layers import read_recompute_interval
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.axis import Axis
from hf_parallel.model.anatomy import find_checkpoint_settings, list_transformer_blocks
from hf_parallel.ranks import start_all_gather
from hf_parallel.ranks.mesh import check_alike
from hf_parallel.ranks.observed import ATTENTION, COLLECTIVE, Store, Within, give_back, is_unchanged, note_result

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from transformers import PreTrainedModel
    from transformers.modeling_layers import GradientCheckpointingLayer

    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.axes.axis import Building
    from hf_parallel.model.anatomy import Anatomy


@dataclass(frozen=True)
class RecomputeFacts:
    """Can its layers be checkpointed at all, and each for itself?"""

    supported: bool
    by_layer: bool
    layers: int


class Recompute(Axis[RecomputeFacts, str]):
    """Transformers' own checkpointing of layers, told which and how."""

    name = "recompute"

    def is_on(self, config: ParallelConfig) -> bool:
        return config.recompute_way != "none" or config.activation_offload

    def read(self, model: PreTrainedModel, config: ParallelConfig) -> RecomputeFacts:
        """Return whether the model's layers can be recomputed."""
        layers = list_transformer_blocks(model)
        by_layer = bool(layers) and all(hasattr(type(layer), "gradient_checkpointing") for layer in layers)
        supported = bool(getattr(model, "supports_gradient_checkpointing", False))
        return RecomputeFacts(supported, by_layer, len(layers))

    def resolve(self, config: ParallelConfig, anatomy: Anatomy, facts: RecomputeFacts) -> str:
        """Decide what is recomputed."""
        way = config.recompute_way
        asked = f"activation_checkpointing={config.activation_checkpointing}"
        check_alike(asked, config.recompute_ranks, config, ("tp", "cp"), "recompute what they send to each other")
        if config.recompute_ranks is not None and config.ep_size > 1:
            why = f"ranks of ep_size={config.ep_size} send tokens to each other again"
            refuse(asked, why, asked.partition("@")[0])
        if way == "none":
            return way
        if not facts.supported:
            refuse(asked, f"{anatomy.name} does not support it", "activation_checkpointing=none")
        if (way != "full" or config.recompute_ranks is not None) and not facts.by_layer:
            refuse(asked, f"{anatomy.name} checkpoints its layers all alike", "activation_checkpointing=full")
        if config.partition_activations and not facts.by_layer:
            why = f"{anatomy.name} checkpoints its layers all alike"
            refuse("partition_activations=true", why, "partition_activations=false")
        if read_recompute_interval(way) > facts.layers:
            refuse(
                asked, f"{anatomy.name} has {facts.layers} layers", f"activation_checkpointing=every:{facts.layers}"
            )
        return way

    def apply(self, model: PreTrainedModel, part: str, building: Building) -> None:
        """Switch it on; before transformers 5.23 by its former name."""
        if part == "none":
            return
        if building.mesh.config.recompute_way_on(building.mesh.rank) == "none":
            for layer in list_transformer_blocks(model):
                layer.register_forward_pre_hook(switch_checkpoint_off)
            return
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
        for place, layer in enumerate(list_transformer_blocks(model)):
            if part == "selective":
                layer.register_forward_pre_hook(_keep_products)  # compiled layers: `compile.py`
            elif place % (read_recompute_interval(part) or 1):
                layer.register_forward_pre_hook(switch_checkpoint_off)

    def finish(self, model: nn.Module, part: str, building: Building) -> None:
        """The layers of this rank, stage by stage."""
        flag = building.sequence_flag
        if building.mesh.config.partition_activations and (flag is None or not flag.on):
            # From here on those of the layers that are checkpointed keep a part of their input.
            for layer in (layer for _, layers in building.roots for layer in layers):
                keeping = Keeping(building.mesh.group("tp"))
                layer.register_forward_pre_hook(keeping.begin)
                layer.register_forward_hook(lambda *_, keeping=keeping: keeping.end(), always_call=True)
        if building.mesh.config.activation_offload:
            from hf_parallel.axes.activation_offload import offload_activations

            for _, layers in building.roots:
                offload_activations(layers, building.mesh.device)


def switch_checkpoint_off(layer: GradientCheckpointingLayer, args: object) -> None:
    """Switch a layer's checkpoint off, in each pass: a Trainer switches all layers on once more."""
    layer.gradient_checkpointing = False


def _keep_products(layer: GradientCheckpointingLayer, args: object) -> None:
    """Give a layer's checkpoint the policy, in each pass; the settings of the script's own function stay."""
    from torch.utils.checkpoint import checkpoint

    known = vars(layer).get("_gradient_checkpointing_func")
    settings = find_checkpoint_settings(layer) or {}
    if known is None or settings.get("context_fn") is make_selective_contexts:
        return
    own = getattr(settings.get("context_fn"), "__module__", "").startswith(__name__.partition(".")[0])  # cp keeps so
    check_selective({**settings, "context_fn": None} if own else settings)
    if getattr(known, "func", known) is not checkpoint:
        why = "the script has given layers a checkpointing function of its own"
        refuse("activation_checkpointing=selective", why, "activation_checkpointing=none")
    kept = {**settings, "use_reentrant": False, "context_fn": make_selective_contexts}
    layer._gradient_checkpointing_func = functools.partial(checkpoint, **kept)


def check_layers(way: str, settings: Mapping[str, object]) -> None:
    """Refuse a script's own choice of layers beside another one of the spec's, neither of which would hold.

    Args:
        settings: `gradient_checkpointing_kwargs`.
    """
    own = settings.get("every_n_layers", 1)
    if own not in (1, read_recompute_interval(way)):
        what = f"gradient_checkpointing_kwargs every_n_layers={own}"
        refuse(what, f"activation_checkpointing={way} names the layers", f"activation_checkpointing=every:{own} alone")


def check_selective(settings: Mapping[str, object]) -> None:
    """Refuse what a script says of torch's checkpoint that a policy of what is kept cannot go with.

    Args:
        settings: `gradient_checkpointing_kwargs`.
    """
    if settings.get("use_reentrant"):
        why = "activation_checkpointing=selective keeps outputs by a policy, which reentrant checkpoints have none of"
        refuse("gradient_checkpointing_kwargs use_reentrant=True", why, "use_reentrant=False")
    if settings.get("context_fn") is not None:
        why = "activation_checkpointing=selective has a policy of its own"
        refuse("gradient_checkpointing_kwargs context_fn", why, "activation_checkpointing=full")
    if settings.get("offload"):
        why = "not with activation_checkpointing=selective"
        refuse("gradient_checkpointing_kwargs offload=True", why, "activation_offload=true")


RECOMPUTE = Recompute()


# ---- Selective checkpointing: a layer runs again in the backward, except for what is dear to compute or to send
#     kept by the first run                     run again
#     outputs of matrix products (4 bits too)   norms, rotations, activations, residual additions, dropout
#     output and log-sum-exp of attention       attention with dropout, which draws again; batched products: eager
# scores
#     sums over ranks, rows sent to experts     gathers along the sequence, whose whole results no rank should keep
#                                               thin products, as an adapter's second: wide, and cheap for each number
#
# Of a row-parallel layer the sum over ranks is kept, this rank's part of the sequence, and not the product before it,
# nor what adapters add to that.
# torch's own contexts for this (`create_selective_checkpoint_contexts`) cannot give back what a collective writes
# into a buffer, nor give twice, as schedules need that take a backward apart.


#: A product over at most so many numbers, for outputs so many times as wide, is thin.
THIN, WIDER = 256, 8
PRODUCTS = {"mm", "addmm", "_scaled_mm", "_int_mm", "_grouped_mm", "_scaled_grouped_mm", "gemm_4bit"}
ATTENTIONS = ("scaled_dot_product", "flash_attn", "flash_attention", "efficient_attention")


def is_kept(operation: OpOverload, arguments: tuple, keywords: dict[str, object]) -> bool:
    """Return whether the output of this operation is kept."""
    name = operation.name().partition("::")[2].partition(".")[0]
    if name in ("mm", "addmm"):
        # LoRA's B is thin: beside a frozen base it would double what is kept, in fp32 even threefold.
        inner, outer = arguments[2 if name == "addmm" else 1].shape
        return not (inner <= THIN and WIDER * inner <= outer)
    if name in PRODUCTS:
        return True
    if "backward" in name or not any(part in name for part in ATTENTIONS):
        return False
    # Attention with dropout draws random numbers: given back, it would shift those of what comes after it.
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            return not (arguments[place] if place < len(arguments) else keywords.get(argument.name, 0))
    return True


class _Products(TorchDispatchMode):
    """Keeps outputs in the first run, gives them back in each further one."""

    def __init__(self, store: Store, recomputing: bool) -> None:
        super().__init__()
        self.store, self.recomputing, self.within = store, recomputing, Within(store, recomputing)
        self.kept: list[tuple[object, object]] = []
        self.used = 0

    def __enter__(self) -> object:
        self.used = 0
        self.within.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.within.__exit__(*error)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        if self.store.computing or not is_kept(func, args, kwargs):
            return func(*args, **kwargs)
        if not self.recomputing:
            output = func(*args, **kwargs)
            self.kept.append((func, note_result(output, self.store)))
            return output
        self.used += 1
        first, note = (*self.kept, ("nothing", None))[min(self.used - 1, len(self.kept))]
        if first is not func:
            raise RuntimeError(f"hf_parallel: a checkpointed layer did not run as before: {func} comes for {first}")
        return give_back(note) if is_unchanged(note) else func(*args, **kwargs)


def make_selective_contexts() -> tuple[_Products, _Products]:
    """For `context_fn` of torch's checkpoint: around the first run, and around each further one."""
    store = Store(frozenset({ATTENTION, COLLECTIVE}))
    first, again = _Products(store, False), _Products(store, True)
    again.kept = first.kept
    return first, again


# ---- Inputs of checkpointed layers, of which each tp rank keeps a part (ZeRO-R, Rajbhandari et al., 2020, section
# 6.1)
# Without sequence parallelism the residual stream is the same on all tp ranks, and each would keep all of it:
#
#     forward     input [b, s, h] of a layer -> 1/tp of its numbers                        kept: the part
#     backward    part -> all-gather -> input -> the layer again, and its gradients        dropped after the layer


@dataclass(eq=False)
class Keeping:
    """The tensors that one layer keeps. Checkpointing hides from these hooks all that is not an input."""

    group: dist.ProcessGroup
    _open: list[saved_tensors_hooks] = field(default_factory=list)

    def begin(self, layer: nn.Module, args: tuple) -> None:
        """The layer starts."""
        if not (torch.is_grad_enabled() and getattr(layer, "gradient_checkpointing", False)):
            return
        # The first alone: others may differ between ranks, as biases. Not itself, which the hooks would keep alive.
        given = (args[0].data_ptr(), args[0].shape) if args and torch.is_tensor(args[0]) else None
        hooks = saved_tensors_hooks(
            lambda tensor: Part(tensor, self.group) if (tensor.data_ptr(), tensor.shape) == given else tensor,
            lambda kept: kept.whole() if isinstance(kept, Part) else kept,
        )
        hooks.__enter__()
        self._open.append(hooks)

    def end(self) -> None:
        """It is done."""
        if self._open:
            self._open.pop().__exit__()


class Part:
    """This rank's part of a tensor that all ranks of `group` have."""

    def __init__(self, tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
        self.group, self.shape = group, tensor.shape
        row, size = tensor.detach().reshape(-1), math.ceil(tensor.numel() / group.size())
        start = min(group.rank() * size, row.numel())
        self.numbers = row.new_zeros(size)
        own = row[start : start + size]
        self.numbers[: own.numel()] = own

    def whole(self) -> torch.Tensor:
        """Return the whole tensor. Collective."""
        return start_all_gather(self.numbers, self.group).wait().view(-1)[: self.shape.numel()].view(self.shape)

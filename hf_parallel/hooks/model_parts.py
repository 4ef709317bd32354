"""Scripts that read, write or pickle a part of a weight as if it were the whole.

torch's own answers are lost in silence: rows that are cut over ranks come as a copy, so what is written to them goes
nowhere, and each rank draws the random numbers of its part alone. Each function takes the original.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from hf_parallel.apply.kernels import place_kernels
from hf_parallel.apply.mixed import is_of_layout
from hf_parallel.apply.weights import full_tensor, order_of
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.spec import refuse
from hf_parallel.checkpoint.slices import find_local_part, list_axes_and_dims, read_part
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch
from hf_parallel.model.calls import CACHES
from hf_parallel.model.experts import iterate_experts
from hf_parallel.model.known_masks import get_known_mask
from hf_parallel.ranks.mesh import get_stored

if TYPE_CHECKING:
    from transformers import PreTrainedModel, TrainingArguments
    from transformers.modeling_layers import GradientCheckpointingLayer

T = TypeVar("T")
Index: TypeAlias = torch.Tensor | int | slice | tuple | None
#: A weight, which of its rows, and these.
Place: TypeAlias = tuple[DTensor, Index, torch.Tensor]


class Rows(torch.Tensor):
    """Rows of a weight that is cut over ranks: what is written to them goes there. All ranks of it do the same."""

    place: Place

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        plain, named = tree_map(_make_plain_value, (args, kwargs or {}))  # rows in lists too: torch.stack([row, row])
        result, out = func(*plain, **named), (kwargs or {}).get("out")
        if isinstance(out, Rows):
            _write_elements(*out.place)
            return out
        if not args or not isinstance(args[0], Rows):
            return result
        name = func.__name__
        in_place = name.startswith("__i") and name not in ("__index__", "__int__", "__invert__", "__iter__")
        if name == "__setitem__" or in_place or (name.endswith("_") and not name.endswith("__")):
            _write_elements(*args[0].place)
            return args[0]
        storage = plain[0].untyped_storage().data_ptr()
        is_view = torch.is_tensor(result) and result.untyped_storage().data_ptr() == storage
        return cls.at(args[0].place, result) if is_view else result

    @classmethod
    def at(cls, place: Place, tensor: torch.Tensor) -> Rows:
        """Return a tensor as the rows at this place."""
        rows = tensor.as_subclass(cls)
        rows.place = place
        return rows


def _make_plain_value(value: T) -> T | torch.Tensor:
    if isinstance(value, Rows):
        return value.as_subclass(torch.Tensor)
    return full_tensor(value) if isinstance(value, DTensor) else value


@patch("torch.distributed.tensor:DTensor.__getitem__", "what is written to rows of a cut weight is lost")
def get_rows(original: Callable, self: DTensor, index: Index) -> object:
    """`weight.data[-1].zero_()` reaches the weight. What autograd follows stays torch's."""
    if not list_axes_and_dims(self) or not is_of_layout(self) or (self.requires_grad and torch.is_grad_enabled()):
        return original(self, index)
    rows = full_tensor(self)[tree_map(_make_plain_value, index)]
    return Rows.at((self, index, rows), rows)


@patch("torch.distributed.tensor:DTensor.__setitem__", "what is written to rows of a cut weight is lost")
def set_rows(original: Callable, self: DTensor, index: Index, value: torch.Tensor | float) -> None:
    """`weight.data[-1] = mean` reaches the weight."""
    if list_axes_and_dims(self) and is_of_layout(self):
        _write_elements(self, index, value)
    else:
        original(self, index, value)


@patch(
    "torch.distributed.tensor:DTensor.{flatten,ravel,reshape,view}", "cannot join the numbers of parts of odd sizes"
)
def join_numbers(original: Callable, self: DTensor, *shape: Any, **kwargs: Any) -> torch.Tensor:
    """Join all numbers of a weight or a gradient to one vector; what is written to it reaches the weight."""
    names_a_vector = shape in ((-1,), ((-1,),), ([-1],), (self.numel(),)) or kwargs.get("shape") in (-1, (-1,))
    is_vector = names_a_vector or original.__name__ in ("flatten", "ravel") and not shape and not kwargs
    if not is_vector or not is_of_layout(self) or (self.requires_grad and torch.is_grad_enabled()):
        return original(self, *shape, **kwargs)
    whole = full_tensor(self)
    return Rows.at((self, slice(None), whole), whole.view(-1))


@patch(
    "torch.distributed.tensor:DTensor.{normal,uniform,bernoulli,exponential,log_normal,cauchy,geometric,random}_",
    "each rank draws for its part alone",
)
def draw(original: Callable, self: DTensor, *args: object, **kwargs: object) -> object:
    """Every rank draws the whole tensor and keeps its part: the same numbers as in one process.

    Also of a replica, such as a weight that `weight_norm` computes: torch would draw with a state of its own.
    """
    if not is_of_layout(self):
        return original(self, *args, **kwargs)
    whole = torch.empty(self.shape, dtype=self.dtype, device=get_stored(self).device)
    _keep(self, original(whole, *args, **kwargs))
    return self


@patch("torch:{rand,randn}_like", "each rank draws for its part alone, and then unlike numbers for what all hold")
def draw_like(original: Callable, input: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """Draw noise for a weight or a gradient: the whole tensor on every rank, which keeps its part."""
    if not isinstance(input, DTensor) or not is_of_layout(input):
        return original(input, *args, **kwargs)
    kwargs = {"dtype": input.dtype, **kwargs, "device": get_stored(input).device}
    whole = original(torch.empty(input.shape, device="meta"), *args, **kwargs)
    part = read_part(whole, find_local_part(input, order_of(input)))
    drawn = torch.empty_like(input.detach(), dtype=whole.dtype, requires_grad=whole.requires_grad)
    with torch.no_grad():
        get_stored(drawn).copy_(part)
    return drawn


def _write_elements(tensor: DTensor, index: Index, value: torch.Tensor | float) -> None:
    whole = full_tensor(tensor)
    whole[tree_map(_make_plain_value, index)] = _make_plain_value(value)
    _keep(tensor, whole)


def _keep(tensor: DTensor, whole: torch.Tensor) -> None:
    with torch.no_grad():
        get_stored(tensor).copy_(read_part(whole, find_local_part(tensor, order_of(tensor))))


# ---- Layers that are recomputed, in transformers before 5.23: around the layer's hooks, which ran again with it
# 5.23 recomputes `forward` alone. What gathers the weights of a layer, moves its activations or says how it is
# recomputed is a hook of that layer, and has to run once, outside.


@patch(
    "transformers.modeling_layers:GradientCheckpointingLayer.__call__",
    "runs a layer's hooks again when it is recomputed, and reads before them how it is",
    before="5.23",
)
def call(original: Callable, self: GradientCheckpointingLayer, *args: object, **kwargs: object) -> object:
    """With the hooks outside, unless the layer is compiled, whose graph is recomputed as a whole."""
    if getattr(self, "_compiled_call_impl", None) is not None or not self.training:
        return original(self, *args, **kwargs)
    own, forward = vars(self).get("forward"), self.forward

    def run_again(*args: object, **kwargs: object) -> object:
        if not self.gradient_checkpointing:
            return forward(*args, **kwargs)
        if "use_cache" in kwargs:
            kwargs["use_cache"] = False
        if not self._can_checkpoint_with_cache:
            kwargs.update(dict.fromkeys(kwargs.keys() & set(CACHES)))
        return self._gradient_checkpointing_func(functools.partial(forward, **kwargs), *args)

    vars(self)["forward"] = run_again
    try:
        return nn.Module.__call__(self, *args, **kwargs)
    finally:
        if own is None:
            del vars(self)["forward"]
        else:
            vars(self)["forward"] = own


# ---- Trainer's `use_liger_kernel` on a parallel model, which Liger changes when training begins ---------------------
#     rotation, norms, MLPs          as Liger puts them on, behind what the layout has made of the modules:
# `kernels.py`
#     head and loss in one           over data ranks and in a pipeline's last stage; where logits or sequences are
# split,
#                                    or experts balanced, the layout's own loss stays, and the report says so
#     cross-entropy of whole logits  not where they are split
#
# Liger writes rotated queries and the gradients of an MLP's halves into the products that gave them, which torch does
# not notice: what selective checkpointing keeps of a layer would change under it.


FUSED = "fused_linear_cross_entropy"
#: Kernels that write into what a layer's products gave; on by default, each where a model has it.
_WRITES = ("rope", "swiglu", "geglu")
_LIGER_WORDS = 'liger_kernel_config={{"{}": {}}}'


def check_recomputation(args: TrainingArguments, config: ParallelConfig) -> None:
    """Refuse what Liger is told to do and cannot, before anything trains."""
    told = args.liger_kernel_config or {}
    reason = _find_reason_not_fused(config)
    if told.get(FUSED) and reason is not None:
        refuse(_LIGER_WORDS.format(FUSED, True), reason, _LIGER_WORDS.format(FUSED, False))
    if told.get("cross_entropy") and config.tp_size * config.cp_size > 1:
        refuse(_LIGER_WORDS.format("cross_entropy", True), "the layout's own loss reads split logits", "False")
    if config.recompute_way == "selective" and any(told.get(name, True) for name in _WRITES):
        off = ", ".join(f'"{name}": False' for name in _WRITES)
        why = "writes into products that activation_checkpointing=selective keeps"
        refuse("use_liger_kernel=True", why, f"activation_checkpointing=full, or liger_kernel_config={{{off}}},")


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


def _find_reason_not_fused(config: ParallelConfig) -> str | None:
    """Return why head and loss cannot be one kernel; None if they can."""
    if config.tp_size > 1:
        return f"tp_size={config.tp_size} splits the logits"
    if config.cp_size > 1:
        return f"cp_size={config.cp_size} splits the sequence"
    return "lean_loss=true does that" if config.lean_loss == "true" else None


@patch("transformers.trainer:apply_liger_kernel", "hides what a layout has made of modules, and the engine's forward")
def apply_liger_kernel(original: Callable, model: PreTrainedModel, kernel_config: dict[str, bool] | None) -> None:
    """Put Liger's kernels behind the layout, without its loss where that cannot be."""
    state = runtime.find_parallel_state(model)
    if state is None:
        original(model, kernel_config)
        return
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    told, reason = dict(kernel_config or {}), _find_reason_not_fused(state.config)
    if reason is None and any(True for _ in iterate_experts(base)):
        reason = "its loss of experts' balance is of one process"
    if reason is not None and told.get(FUSED, True):
        told[FUSED] = False
        if state.note_line(FUSED):
            state.notes.append(f"use_liger_kernel: the layout computes the loss in place of Liger's kernel: {reason}")
    place_kernels(base, functools.partial(original, model, told), "use_liger_kernel")


# ---- Questions that transformers asks of a mask on the device, where a pipeline knows the answer for the whole batch


@patch("transformers.masking_utils:_ignore_causal_mask_sdpa", "would wait for the device per micro-batch and stage")
def ignore_causal_mask(original: Callable, padding_mask: torch.Tensor | None, *args: object, **kwargs: object) -> bool:
    """Make a mask if the batch's hides something, also for sequences without padding; else make none.

    Sequence parallelism pads sequences at their end, where no token of a causal model sees: that hides no more.
    """
    known = get_known_mask()
    if known is None or known.hides is None or padding_mask is None:
        return original(padding_mask, *args, **kwargs)
    return False if known.hides else original(None, *args, **kwargs)


@patch(
    "transformers.masking_utils:find_packed_sequence_indices", "would wait for the device per micro-batch and stage"
)
def find_packs(original: Callable, position_ids: torch.Tensor) -> torch.Tensor | None:
    """Number packed sequences, unless the model has counted positions itself, which do not start again then.

    A part without packs is numbered too if another part of its batch has some: its mask hides what a causal one does.
    """
    known = get_known_mask()
    if known is None or (known.packs and (known.restarts is None or position_ids.shape[-1] != known.length)):
        return original(position_ids)
    if not known.restarts:
        return None
    return (position_ids.diff(dim=-1, prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)

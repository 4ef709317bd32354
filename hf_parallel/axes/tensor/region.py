"""A region of tensor parallelism: entered once by a tensor all ranks use, left once by the sum of what each computed.

style                            weight placement   forward of the layer
colwise, packed_*                Shard(0)           y_local = x W_localᵀ
rowwise                          Shard(1)           y = leave(x_local W_localᵀ) + b
enter, leave                     f, g of Megatron-LM; under sequence parallelism all-gather and reduce-scatter
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from hf_parallel.autocast import as_autocast
from hf_parallel.axes.eight_bit import Split, recipe_of, tensorwise
from hf_parallel.axes.tensor import eight_bit, gather_recompute
from hf_parallel.axes.tensor.deferred_wgrad import LateWeight, column_linear, enter_columns
from hf_parallel.axes.tensor.dropout import OwnRandomNumbers
from hf_parallel.axes.tensor.heads import PER_HEAD
from hf_parallel.axes.tensor.lowering import only_multiplied
from hf_parallel.axes.tensor.overlap import row_linear
from hf_parallel.collectives import copy_to_group, reduce_from_group, reduce_scatter_sequence
from hf_parallel.collectives.kept import COLLECTIVE, keeps

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_parallel.axes.axis import SequenceParallelFlag


#: Styles of layers that read the residual stream.
READERS = {
    "colwise",
    "colwise_shared_heads",
    "packed_qkv",
    "packed_halves",
    "falcon_qkv",
    "shared_qkv",
    "shared_groups",
}
#: Inputs beside the first that the heads of all ranks read: whole on every rank.
_READ_BESIDES = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "rel_embeddings")
#: Inputs whose gradient is whole, being added after the sum, or of this rank's heads (`heads.py`).
_NOT_READ = ("residual", *PER_HEAD)


class Region:
    """The layers between one `enter` and one `leave`: an attention, an MLP, or a single layer.

    Attentions and MLPs of their own are entered as a whole (`at_owner`): what an attention computes beside its
    linears (shapes, latents) then sees the whole sequence. Where the linears sit in the layer itself each enters by
    itself, and the same input only once.
    """

    def __init__(
        self,
        owner: PreTrainedModel,
        group: dist.ProcessGroup,
        switch: SequenceParallelFlag,
        at_owner: bool = False,
        overlap: bool = False,
    ) -> None:
        self.owner, self.group, self.switch, self.at_owner = owner, group, switch, at_owner
        self.overlap = overlap
        #: The local weights [out, in] of the layers whose gradients may come late, by layer.
        self.columns: dict[nn.Module, Callable[[], torch.Tensor]] = {}
        self._late: dict[nn.Module, LateWeight] = {}
        self.heads = (0, 0)  # of the whole model: query, key/value
        self._names = list(inspect.signature(owner.forward).parameters)
        self._first = self._names[0] if self._names else ""
        #: May its input be cast before it enters? A layer that enters by itself multiplies.
        self.lowers = not at_owner or only_multiplied(owner, self._first)
        self.scope = OwnRandomNumbers(owner, group)
        self._input: torch.Tensor | None = None
        self._entered: torch.Tensor | None = None

    @property
    def sequence_parallel(self) -> bool:
        """Do inputs come, and outputs go, as parts of the sequence?"""
        return self.switch.on

    def enter_owner(self, owner: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Forward pre-hook of the owner: its first input enters, and what a cross-attention reads besides."""
        self._begin_scope()
        named = zip_longest(self._names[: len(args)], args, fillvalue="")
        entered = tuple(self._enter_named(name, value) for name, value in named)
        return entered, {name: self._enter_named(name, value) for name, value in kwargs.items()}

    def _enter_named(self, name: str, value: Any) -> object:
        if name == self._first:
            return self._open(value)
        if name in _READ_BESIDES:
            return value if value is None else copy_to_group(value, self.group)
        tensors = value if isinstance(value, tuple) else (value,)
        if name not in _NOT_READ and any(torch.is_tensor(tensor) and tensor.requires_grad for tensor in tensors):
            # Whether ranks' gradients are parts or copies is not known; a guess would be wrong without a word.
            raise NotImplementedError(
                f"hf_parallel: how {type(self.owner).__name__} uses {name}, which has a gradient, is not known; "
                "tp_size=1 works"
            )
        return value

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor for use by all ranks; one that has entered stays as it is."""
        if self.at_owner or tensor is self._entered:
            return tensor
        if tensor is not self._input:
            self._begin_scope()
            self._input, self._entered = tensor, self._open(tensor)
        assert self._entered is not None
        return self._entered

    def column(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Enter with x […, in] and multiply by the layer's weight; a late one serves for one call."""
        # A wrapper has entered, with a tensor that FSDP2 may have replaced on its way into the layer.
        entered = x if layer.adapted else self.enter(x)
        late, recipe = self._late.pop(layer, None), recipe_of(layer)
        if recipe is not None:
            return eight_bit.linear(entered, self.columns[layer](), bias, recipe, Split("out", self.group))
        if late is None:
            return gather_recompute.linear(entered, self.columns[layer](), bias)
        return column_linear(entered, late, bias)

    def product(self, layer: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x […, in / tp] times the weight of a row-parallel layer: this rank's part of a sum."""
        recipe = recipe_of(layer)
        if recipe is None:
            return F.linear(x, weight)
        return eight_bit.linear(x, weight, None, recipe, Split("in", self.group))

    def row(self, layer: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The same, and leave."""
        recipe = recipe_of(layer)
        if recipe is not None and self.sequence_parallel:
            x = eight_bit.without_padding(x, self.switch.padding)
        if (one_scale := tensorwise(layer)) is not None and self.sequence_parallel:
            self.scope.end()
            return eight_bit.row(x, weight, one_scale, self.group)
        # A checkpoint keeps the sum, and not the product before it.
        if recipe is not None or not (self.overlap or keeps(COLLECTIVE)):
            return self.leave(self.product(layer, x, weight))
        self.scope.end()
        return row_linear(x, weight, self.group, self.sequence_parallel)

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, whole or this rank's part of the sequence."""
        self.scope.end()
        return (reduce_scatter_sequence if self.sequence_parallel else reduce_from_group)(tensor, self.group)

    def close(self, *args: object) -> None:
        """Forget the input, whose memory would else live until the next one. Also a forward hook."""
        self.scope.end()
        self._input = self._entered = None
        self._late = {}

    def _open(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = as_autocast(tensor) if self.lowers else tensor
        if self.overlap:
            weights = [weight() for weight in self.columns.values()]
            entered, late = enter_columns(tensor, weights, self.group, self.sequence_parallel)
            self._late = dict(zip(self.columns, late, strict=True))
            return entered
        if self.sequence_parallel and self._in_eight_bits:
            tensor = eight_bit.without_padding(tensor, self.switch.padding, self.group)
            recipe = eight_bit.recipe_of_all(self.owner) if self.lowers else None
            if recipe is not None:
                return eight_bit.gather(tensor, recipe, self.group)
        return (gather_recompute.gather if self.sequence_parallel else copy_to_group)(tensor, self.group)

    @functools.cached_property
    def _in_eight_bits(self) -> bool:
        """Set up with the layout, so asked once: it looks at every module inside."""
        return eight_bit.has_recipe(self.owner)

    def _begin_scope(self) -> None:
        if not self.sequence_parallel:  # else the whole layer works on parts: `sequence_parallel.py`
            self.scope.begin()

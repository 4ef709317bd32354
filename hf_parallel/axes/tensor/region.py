"""A region of tensor parallelism: entered once by a tensor all ranks use, left once by the sum of what each computed.

style                            weight placement   forward of the layer
colwise, packed_*                Shard(0)           y_local = x W_localᵀ
rowwise                          Shard(1)           y = leave(x_local W_localᵀ) + b
enter, leave                     f, g of Megatron-LM; under sequence parallelism all-gather and reduce-scatter
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import re
from collections.abc import Callable
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.pytorch_utils import Conv1D

from hf_parallel.ask.session import of_session
from hf_parallel.axes.eight_bit import Split, recipe_of, tensorwise
from hf_parallel.axes.tensor import eight_bit, gather_recompute
from hf_parallel.axes.tensor.deferred_wgrad import LateWeight, enter_columns, multiply_columns
from hf_parallel.axes.tensor.dropout import OwnRandomNumbers
from hf_parallel.axes.tensor.infer import get_linear_sizes
from hf_parallel.axes.tensor.overlap import multiply_row_overlapped
from hf_parallel.model.anatomy import read_attention_heads
from hf_parallel.model.families import HEAD_WIDTHS
from hf_parallel.ranks import (
    copy_to_group,
    copy_weight_to_group,
    reduce_from_group,
    reduce_product_from_group,
    reduce_scatter_sequence,
)
from hf_parallel.ranks.local import cast_as_autocast, get_local
from hf_parallel.ranks.observed import COLLECTIVE, does_keep

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from hf_parallel.axes.axis import SequenceParallelFlag
    from hf_parallel.axes.tensor.layer_sums import LayerSums


# ---- What a region's input is cast to before it is communicated: to what autocast lowers it to anyway ---------------
# Where all that reads an input are products, each of them casts it under autocast: cast once, before the collective,
# it has half the bytes and the forward pass the same numbers. Whether that is so is seen by running the region's
# owner on the meta device; where it is not certain, the input travels as it is.

_TOKENS, _WIDTH = 4, 8  # of the row that is run; its width does not matter to products
#: What may be asked of an input without reading a value of it or its dtype.
_SHAPE = {torch.Tensor.size, torch.Tensor.dim}
_SHAPE |= {getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim", "device")}
_DTYPE = vars(torch._C.TensorBase)["dtype"].__get__


class _Watched(torch.Tensor):
    """An input that remembers whether anything but its shape was asked for."""

    read: bool
    unread = _SHAPE

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            if func not in cls.unread:
                for value in (*args, *(kwargs or {}).values()):
                    for tensor in value if isinstance(value, list | tuple) else (value,):
                        if isinstance(tensor, _Watched):
                            tensor.read = True
            return func(*args, **(kwargs or {}))


class _WatchedFeatures(_Watched):
    """A watched input whose dtype may be asked, too."""

    unread = {*_SHAPE, _DTYPE}


class _Product(nn.Module):
    """Stands for a linear of the owner: what it multiplies counts as not read."""

    def __init__(self, linear: nn.Linear | Conv1D) -> None:
        super().__init__()
        self.width = linear.nf if isinstance(linear, Conv1D) else linear.out_features
        self.weight = nn.Parameter(torch.empty_like(linear.weight, device="meta"))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return _make_empty_tensor(*input.shape[:-1], self.width)


class _Answers(dict[tuple, tuple[list[bool | None], object]]):
    """Question, owner's class, config, linears and input -> answers and config, whose id is no other's meanwhile."""


#: Inputs beside the first, one set after the other, under which a pass over all features may get to its end.
_SETS: tuple[tuple[str, ...], ...] = (
    (),
    ("attention_mask",),
    ("bool_mask",),
    ("attention_mask", "position_ids", "alibi"),
    ("attention_mask", "key_value_states", "encoder_hidden_states"),
)


def is_only_multiplied(owner: nn.Module, name: str) -> bool:
    """Return whether this attention or MLP reads its input `name` with linears of its own alone."""
    sets = (), ("attention_mask", "key_value_states", "encoder_hidden_states")
    return all(read is False for read in _ask_once(_Watched, owner, name, sets))


def does_read_features(owner: nn.Module, name: str) -> bool | None:
    """Return whether it reads the features of that input itself, so that a part of them is not enough.

    Inputs beside it may end a pass with an error; None: they end every pass that there is.
    """
    found = _ask_once(_WatchedFeatures, owner, name, _SETS)
    return True if True in found else False if False in found else None


def _ask_once(
    kind: type[_Watched], owner: nn.Module, name: str, sets: tuple[tuple[str, ...], ...]
) -> list[bool | None]:
    """Return whether a pass reads the input, for each set of others; asked once, as layers of a model are alike."""
    linears = {key: child for key, child in owner.named_children() if isinstance(child, nn.Linear | Conv1D)}
    config = vars(owner).get("config")
    key = (kind, type(owner), id(config), tuple(linears), name)
    answers = of_session(_Answers)
    if key in answers:
        return answers[key][0]
    found: list[bool | None] = [True]
    if linears:
        # The owner's linears are replaced by stand-ins for a while, and its attention is written out.
        modules = dict(owner._modules)
        owner._modules.update({key: _Product(child) for key, child in linears.items()})
        if config is not None:
            owner.config = written_out = copy.deepcopy(config)
            written_out._attn_implementation = "eager"
        try:
            found = [_does_pass_read(owner, name, more, kind) for more in sets]
        finally:
            owner._modules.update(modules)
            if config is not None:
                owner.config = config
    answers[key] = found, config
    return found


def _does_pass_read(owner: nn.Module, name: str, more: tuple[str, ...], kind: type[_Watched]) -> bool | None:
    """Return whether a pass reads the input itself; None: it did not end. `more`: inputs that may be left out."""
    head = int(getattr(owner, "head_dim", None) or 8)
    rotary = int(getattr(owner, "rotary_dim", None) or head)  # GPT-J has an angle for each pair of these
    for angles in (head, getattr(owner, "rotary_ndims", head), head // 2, rotary // 2):
        watched = _make_empty_tensor(1, _TOKENS, _WIDTH).as_subclass(kind)
        watched.read = False
        values = {key: value.to("meta") for key, value in (*owner.named_parameters(), *owner.named_buffers())}
        with contextlib.suppress(Exception):  # whatever its code does with what it is not given
            # The other inputs that the owner needs, and those that may decide what it does.
            width = getattr(getattr(owner, "config", None), "hidden_size", None) or _WIDTH
            mask, heads = _make_empty_tensor(1, 1, _TOKENS, _TOKENS), int(getattr(owner, "num_heads", None) or 1)
            optional: dict[str, tuple[str, torch.Tensor]] = {
                "attention_mask": ("attention_mask", mask),
                "bool_mask": ("attention_mask", mask.bool()),
                "position_ids": ("position_ids", _make_empty_tensor(1, _TOKENS).long()),
                "alibi": ("alibi", _make_empty_tensor(heads, 1, _TOKENS)),
                "key_value_states": ("key_value_states", _make_empty_tensor(1, _TOKENS, width)),
                "encoder_hidden_states": ("encoder_hidden_states", _make_empty_tensor(1, _TOKENS, width)),
            }
            known: dict[str, object] = dict(optional[key] for key in more)
            known["position_embeddings"] = (_make_empty_tensor(1, _TOKENS, angles),) * 2
            known["residual"] = _make_empty_tensor(1, 1, 1)  # fits what it is added to
            parameters = list(inspect.signature(owner.forward).parameters.values())
            known[parameters[0].name] = _make_empty_tensor(1, _TOKENS, _WIDTH)
            required = {p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
            given = {p.name: known.get(p.name) for p in parameters if p.name in required | set(known)}
            result = torch.func.functional_call(owner, values, (), {**given, name: watched})
            given_back = any(part is watched for part in (result if isinstance(result, tuple) else (result,)))
            return watched.read or given_back
    return None


def _make_empty_tensor(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


# ---- An attention on some of its heads: what it counts, and what it is given per head, becomes this rank's part

_COUNTS_IN_CONFIG = ("num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads", "n_head", "n_heads")
#: Widths of all heads: `output.reshape(batch, length, self.inner_dim)`, `qkv.split((self.split_size, …))`.
_WIDTHS = ("split_size", "all_head_size", "inner_dim")
#: Names of it in classes that nothing is declared of: those of scripts.
_WIDTHS_OF_SCRIPTS = ("embed_dim", "hidden_size", "d_model", "output_dim")
#: Inputs with one entry per head.
PER_HEAD = ("alibi", "position_bias", "rel_pos", "rel_2d_pos")


def use_local_heads(model: nn.Module, owner: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divide the head counts that `owner` keeps, reads from its config, or receives as biases of all heads."""
    counts, numbers = read_attention_heads(model), {k: v for k, v in vars(owner).items() if isinstance(v, int)}
    counted = {key for key in numbers if re.search(r"(^|_)(heads?|n_head)$", key) is not None}
    if counts is None or not counted:
        return
    heads, kv_heads = counts
    size = mesh.size()
    local = {heads: heads // size, kv_heads: max(1, kv_heads // size)}
    declared: tuple[str, ...] = _WIDTHS_OF_SCRIPTS
    if type(owner).__module__.startswith("transformers."):
        declared = tuple(HEAD_WIDTHS[kind.__name__] for kind in type(owner).__mro__ if kind.__name__ in HEAD_WIDTHS)
    split = {get_linear_sizes(module)[1] for module in owner.modules() if isinstance(module, nn.Linear | Conv1D)}
    for key, value in numbers.items():
        if key in counted and value in local:
            setattr(owner, key, local[value])
        elif key in _WIDTHS or (key in declared and value in split):
            setattr(owner, key, value // size)
    # Whatever an attention reads its number of heads for, it means its own.
    config = getattr(owner, "config", None)
    own = {key: local[count] for key in _COUNTS_IN_CONFIG if (count := getattr(config, key, None)) in local}
    if own:
        owner.config = LocalConfig(config, **own)
    if set(PER_HEAD) & set(inspect.signature(type(owner).forward).parameters):
        hook = functools.partial(_slice_heads, heads, mesh.get_group())
        owner.register_forward_pre_hook(hook, with_kwargs=True)


class LocalConfig:
    """A view of a config with other head counts; everything else is the config itself, now and later."""

    def __init__(self, config: PretrainedConfig, **counts: int) -> None:
        self.__dict__.update(_config=config, **counts)

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # while being copied
            raise AttributeError(name)
        return getattr(self._config, name)


def _slice_heads(heads: int, group: dist.ProcessGroup, owner: nn.Module, args: tuple, kwargs: dict) -> object:
    """Cut masks and biases [b, heads, q, k], or BLOOM's [b * heads, q, k], to this rank's heads. A pre-hook."""

    def sliced(value: object, name: str = "") -> object:
        if not torch.is_tensor(value):
            return value
        if value.dim() == 4 and value.shape[1] == heads:
            return copy_weight_to_group(value, group).chunk(group.size(), dim=1)[group.rank()]
        if name == "position_bias" and value.dim() == 3 and value.shape[0] == heads:
            return value.chunk(group.size())[group.rank()]
        if name == "alibi" and value.dim() == 3:
            by_head = value.unflatten(0, (-1, heads)).chunk(group.size(), dim=1)[group.rank()]
            return by_head.flatten(0, 1)
        return value

    return tuple(map(sliced, args)), {key: sliced(value, key) for key, value in kwargs.items()}


#: Styles of layers that read the residual stream.
READERS = {
    "colwise",
    "colwise_shared_heads",
    "packed_qkv",
    "packed_halves",
    "falcon_qkv",
    "shared_qkv",
    "shared_groups",
    "whole_colwise",
    "whole_packed_halves",
    "whole_packed_qkv",
    "whole_falcon_qkv",
    "whole_colwise_shared_heads",
}
#: Inputs beside the first that the heads of all ranks read: whole on every rank.
READ_BESIDES = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "rel_embeddings")
#: Inputs whose gradient needs no sum over ranks: it is whole already, or belongs to this rank's heads.
_NOT_READ = ("residual", *PER_HEAD)


def get_local_weight(module: nn.Module) -> torch.Tensor:
    """Return this rank's part of a weight as [out, in]. A Conv1D stores [in, out]."""
    weight = get_local(module.weight)
    return weight.t() if isinstance(module, Conv1D) else weight


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
        self.lowers = not at_owner or is_only_multiplied(owner, self._first)
        self.scope = OwnRandomNumbers(owner, group)
        self.sums: LayerSums | None = None  # of the layer around it
        self._input: torch.Tensor | None = None
        self._entered: torch.Tensor | None = None

    @property
    def sequence_parallel(self) -> bool:
        """Return whether inputs come, and outputs go, as parts of the sequence."""
        return self.switch.on

    def enter_owner(self, owner: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Enter with the owner's first input, and with what a cross-attention reads besides. A forward pre-hook."""
        if not self.sequence_parallel:  # else the whole layer works on parts: `sequence_parallel.py`
            self.scope.begin()
        entered: list[object] = []
        for name, value in (*zip_longest(self._names[: len(args)], args, fillvalue=""), *kwargs.items()):
            tensors = value if isinstance(value, tuple) else (value,)
            if name == self._first:
                entered.append(self._open(value))
            elif name in READ_BESIDES:
                entered.append(value if value is None else self._open_beside(name, value))
            elif name in _NOT_READ or not any(torch.is_tensor(t) and t.requires_grad for t in tensors):
                entered.append(value)
            else:  # whether ranks' gradients are parts or copies is not known; a guess would be wrong without a word
                raise NotImplementedError(
                    f"hf_parallel: how {type(self.owner).__name__} uses {name}, which has a gradient, is not known; "
                    "tp_size=1 works"
                )
        return tuple(entered[: len(args)]), dict(zip(kwargs, entered[len(args) :], strict=True))

    def enter(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor for use by all ranks; one that has entered stays as it is."""
        if self.at_owner or tensor is self._entered:
            return tensor
        if torch.compiler.is_compiling():  # which finds equal operations itself
            return self._open(tensor)
        if tensor is not self._input:
            if not self.sequence_parallel:
                self.scope.begin()
            self._input, self._entered = tensor, self._open(tensor)
        assert self._entered is not None
        return self._entered

    def copy_weight(self, module: nn.Module, name: str) -> torch.Tensor:
        """Return a small weight that all ranks hold, for use on a part of the work: ranks add up its gradient."""
        if self.sums is None or torch.compiler.is_compiling():
            return copy_weight_to_group(cast(torch.Tensor, module._parameters[name]), self.group)
        return self.sums.copy(module, name)

    def column(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Enter with x […, in] and multiply by the layer's weight; a late one serves for one call."""
        # A wrapper has entered, with a tensor that FSDP2 may have replaced on its way into the layer.
        entered = x if layer.adapted else self.enter(x)
        if torch.compiler.is_compiling():  # a graph takes a weight as its input where it finds it in the module
            return F.linear(entered, get_local_weight(layer), bias)
        late, recipe = self._late.pop(layer, None), recipe_of(layer)
        if recipe is not None:
            return eight_bit.multiply_entered(entered, self.columns[layer](), bias, recipe, Split("out", self.group))
        if late is None:
            return gather_recompute.multiply_gathered(entered, self.columns[layer](), bias)
        return multiply_columns(entered, late, bias)

    def product(self, layer: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply x […, in / tp] by the weight of a row-parallel layer: this rank's part of a sum."""
        recipe = recipe_of(layer)
        if recipe is None:
            return F.linear(x, weight)
        return eight_bit.multiply_entered(x, weight, None, recipe, Split("in", self.group))

    def row(self, layer: nn.Module, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Compute a row layer and leave the region."""
        if torch.compiler.is_compiling():
            return self.leave(F.linear(x, weight))
        recipe = recipe_of(layer)
        if recipe is not None and self.sequence_parallel:
            x = eight_bit.without_padding(x, self.switch.padding)
        if (one_scale := tensorwise(layer)) is not None and self.sequence_parallel:
            self.scope.end()
            return eight_bit.RowOfCodes.apply(cast_as_autocast(x), weight, one_scale, self.group)
        # A checkpoint keeps the sum, and not the product before it.
        if recipe is not None or not (self.overlap or does_keep(COLLECTIVE)):
            product = self.product(layer, x, weight)
            if recipe is not None or self.sequence_parallel:
                return self.leave(product)
            self.scope.end()
            return reduce_product_from_group(product, self.group)
        self.scope.end()
        return multiply_row_overlapped(x, weight, self.group, self.sequence_parallel)

    def leave(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks; return the whole sequence or this rank's part of it."""
        self.scope.end()
        return (reduce_scatter_sequence if self.sequence_parallel else reduce_from_group)(tensor, self.group)

    def close(self, *args: object) -> None:
        """Forget the input, whose memory would else live until the next one. Also a forward hook."""
        if torch.compiler.is_compiling():
            return
        self.scope.end()
        self._input = self._entered = None
        self._late = {}

    def _open(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = cast_as_autocast(tensor) if self.lowers else tensor
        compiling = torch.compiler.is_compiling()  # 8 bits in a graph are refused with tp
        if self.overlap and not compiling:
            weights = [weight() for weight in self.columns.values()]
            entered, late = enter_columns(tensor, weights, self.group, self.sequence_parallel)
            self._late = dict(zip(self.columns, late, strict=True))
            return entered
        if self.sequence_parallel and not compiling and self._in_eight_bits:
            tensor = eight_bit.without_padding(tensor, self.switch.padding, self.group)
            linears = [module for module in self.owner.modules() if isinstance(module, nn.Linear | Conv1D)]
            recipes = [tensorwise(linear) for linear in linears] if self.lowers else []
            # All of them multiply codes; others, such as adapters, read values.
            if recipes and (recipe := recipes[0]) is not None and None not in recipes:
                return eight_bit.gather_as_codes(tensor, recipe, self.group)
        return (gather_recompute.gather_for_linear if self.sequence_parallel else copy_to_group)(tensor, self.group)

    def _open_beside(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return copy_to_group(tensor, self.group)

    @functools.cached_property
    def _in_eight_bits(self) -> bool:
        """Set up with the layout, so asked once: it looks at every module inside."""
        return any(recipe_of(module) is not None for module in self.owner.modules())

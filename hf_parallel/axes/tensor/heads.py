"""An attention on some of its heads: what it counts, and what it is given per head, becomes this rank's part."""

from __future__ import annotations

import functools
import inspect
import re
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers.pytorch_utils import Conv1D

from hf_parallel.axes.tensor.infer import linear_sizes
from hf_parallel.collectives import copy_weight_to_group
from hf_parallel.model.anatomy import attention_heads
from hf_parallel.model.families import HEAD_WIDTHS

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_COUNTS_IN_CONFIG = ("num_attention_heads", "num_key_value_heads", "num_heads", "num_kv_heads", "n_head", "n_heads")
#: Widths of all heads: `output.reshape(batch, length, self.inner_dim)`, `qkv.split((self.split_size, …))`.
_WIDTHS = ("split_size", "all_head_size", "inner_dim")
#: Names of it in classes that nothing is declared of: those of scripts.
_WIDTHS_OF_SCRIPTS = ("embed_dim", "hidden_size", "d_model", "output_dim")
#: Inputs with one entry per head.
PER_HEAD = ("alibi", "position_bias", "rel_pos", "rel_2d_pos")


def use_local_heads(model: nn.Module, owner: nn.Module, mesh: DeviceMesh) -> None:
    """Divide the head counts that `owner` keeps, reads from its config, or receives as biases of all heads."""
    counts = attention_heads(model)
    if counts is None or not any(_is_head_count(key, value) for key, value in vars(owner).items()):
        return
    heads, kv_heads = counts
    size = mesh.size()
    local = {heads: heads // size, kv_heads: max(1, kv_heads // size)}
    declared = _declared_widths(type(owner))
    split = {linear_sizes(module)[1] for module in owner.modules() if isinstance(module, nn.Linear | Conv1D)}
    for key, value in list(vars(owner).items()):
        if _is_head_count(key, value) and value in local:
            setattr(owner, key, local[value])
        elif isinstance(value, int) and (key in _WIDTHS or (key in declared and value in split)):
            setattr(owner, key, value // size)
    _use_local_config(owner, local)
    if set(PER_HEAD) & set(inspect.signature(type(owner).forward).parameters):
        hook = functools.partial(_slice_heads, heads, mesh.get_group())
        owner.register_forward_pre_hook(hook, with_kwargs=True)


def _is_head_count(key: str, value: object) -> bool:
    return isinstance(value, int) and re.search(r"(^|_)(heads?|n_head)$", key) is not None


class LocalConfig:
    """A view of a config with other head counts; everything else is the config itself, now and later."""

    def __init__(self, config: PretrainedConfig, **counts: int) -> None:
        self.__dict__.update(_config=config, **counts)

    def __getattr__(self, name: str) -> Any:
        if name == "_config":  # while being copied
            raise AttributeError(name)
        return getattr(self._config, name)


def _declared_widths(kind: type) -> tuple[str, ...]:
    if not kind.__module__.startswith("transformers."):
        return _WIDTHS_OF_SCRIPTS
    return tuple(HEAD_WIDTHS[base.__name__] for base in kind.__mro__ if base.__name__ in HEAD_WIDTHS)


def _use_local_config(owner: PreTrainedModel, local: dict[int, int]) -> None:
    """Whatever an attention reads its number of heads for, it means its own."""
    config = getattr(owner, "config", None)
    counts = {key: local[value] for key in _COUNTS_IN_CONFIG if (value := getattr(config, key, None)) in local}
    if counts:
        owner.config = LocalConfig(config, **counts)


def _slice_heads(heads: int, group: dist.ProcessGroup, owner: nn.Module, args: tuple, kwargs: dict) -> object:
    """Pre-hook: masks and biases of all heads, [b, heads, q, k] or BLOOM's [b * heads, q, k], to this rank's heads."""

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

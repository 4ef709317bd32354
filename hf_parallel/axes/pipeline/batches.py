"""Batches cut by rows, what is counted in them, and gradients kept apart."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers.utils import ModelOutput

from hf_parallel.ask.keys.pipeline import BUCKET
from hf_parallel.model.calls import has_cache
from hf_parallel.ranks.mesh import get_stored

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hf_parallel.model.calls import Batch
    from hf_parallel.ranks.differentiable import Context


#: Key of a mask [rows, length] of packs in rows: which tokens count, where attention goes by positions alone. The same
#: stands beside it as `attention_mask`, for scripts that count tokens; no layer sees either. Without packs the
#: batch's own `attention_mask` tells which tokens are no padding; without one all count.
COUNTED = "hf_parallel_counted_tokens"


def drop_mask_of_packs(batch: Batch) -> Batch:
    """Return what a model takes of a batch of packs: no mask, which would stand for their positions."""
    return {key: value for key, value in batch.items() if key != "attention_mask"} if COUNTED in batch else batch


@contextlib.contextmanager
def collect_fresh_gradients(
    parameters: list[nn.Parameter],
) -> Iterator[list[tuple[nn.Parameter, torch.Tensor | None]]]:
    """Collect the gradients of what runs inside, apart from those already accumulated."""
    before = [parameter.grad for parameter in parameters]
    fresh: list[tuple[nn.Parameter, torch.Tensor | None]] = []
    for parameter in parameters:
        parameter.grad = None
    yield fresh
    for parameter, gradient in zip(parameters, before, strict=True):
        fresh.append((parameter, parameter.grad))
        parameter.grad = gradient


def cut_into_buckets(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Cut a list where `BUCKET` bytes are reached."""
    found: list[list[torch.Tensor]] = []
    size = BUCKET
    for tensor in tensors:
        if size >= BUCKET:
            found.append([])
            size = 0
        found[-1].append(tensor)
        size += get_stored(tensor.detach()).nbytes
    return found


def split_rows(batch: Batch, parts: int) -> list[Batch]:
    """Cut every tensor that has one entry per row into `parts` along dim 0; share everything else."""
    return [batch] if parts == 1 else split_examples(batch, parts, 1, count_rows(batch))


def split_examples(batch: Batch, parts: int, rows_each: int, rows: int) -> list[Batch]:
    """Cut a batch into `parts`, keeping together the rows of an example; share what has no entry per example.

    Tensors are cut along dim 0, and so are lists, such as the texts of the examples.

    Args:
        rows_each: rows of an example, which are not neighbours: [chosen 0, chosen 1, …, rejected 0, rejected 1, …].
        rows: of the batch.
    """
    cut: dict[str, list] = {}
    for key, value in batch.items():
        blocks = count_blocks(value, rows_each, rows)
        if not blocks:
            continue
        if isinstance(value, list):
            places = torch.arange(len(value)).unflatten(0, (blocks, -1))
            cut[key] = [[value[i] for i in part.flatten().tolist()] for part in places.tensor_split(parts, dim=1)]
        else:
            pieces = value.unflatten(0, (blocks, -1)).tensor_split(parts, dim=1)
            cut[key] = [piece.flatten(0, 1) for piece in pieces]
    return [{key: cut[key][i] if key in cut else value for key, value in batch.items()} for i in range(parts)]


def count_blocks(value: object, rows_each: int, rows: int) -> int:
    """Return how many entries of a batch each example has in `value`, which lie in as many blocks; 0: none.

    Args:
        rows_each: rows of an example.
        rows: of the batch.
    """
    if not isinstance(value, list) and not (torch.is_tensor(value) and value.dim()):
        return 0
    return rows_each if len(value) == rows else 1 if len(value) * rows_each == rows else 0


#: What holds a row per row of the batch; trainers that generate keep prompts and completions apart.
_ROWS = ("input_ids", "inputs_embeds", "logits", "completion_ids")
_NO_TOKENS = (
    "hf_parallel: a pipelined model needs input_ids or inputs_embeds in the batch, which has {}: pp_size=1 works"
)


def count_rows(batch: Batch) -> int:
    named = next((batch[key] for key in _ROWS if batch.get(key) is not None), None)
    if named is None:
        raise ValueError(_NO_TOKENS.format(list(batch)))
    return named.shape[0]


def tokens_of(batch: Batch) -> torch.Tensor:
    for key in ("input_ids", "inputs_embeds"):
        if torch.is_tensor(batch.get(key)):
            return batch[key]
    raise ValueError(_NO_TOKENS.format(list(batch)))


def count_causal_targets(batch: Batch) -> torch.Tensor:
    """Count the tokens that the causal loss averages over: labels are shifted by one, -100 does not count."""
    labels = batch["shift_labels"] if batch.get("shift_labels") is not None else batch["labels"][..., 1:]
    return (labels != -100).sum()


# ---- What a pipelined forward returns: values that every rank of the pipeline has, as autograd nodes where they
# train


Result = TypeVar("Result")
Gradients = list[torch.Tensor | None]


_KEEPS_NO = "hf_parallel: a pipelined training step keeps no {}; call the model without labels to get logits"


@dataclass
class PipelineLoss(ModelOutput):
    """Output of a scheduled step: the loss alone, as logits of past micro-batches are freed on the way."""

    loss: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None

    is_balanced = True  # the auxiliary loss is that of all stages

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(_KEEPS_NO.format(name))

    def __getitem__(self, k: Any) -> Any:
        try:
            return super().__getitem__(k)
        except (IndexError, KeyError) as error:  # such as logits, by their place
            raise type(error)(_KEEPS_NO.format(f"output {k!r}")) from None


def refuse_partial_outputs(config: PretrainedConfig, batch: Batch, balances: bool) -> None:
    """Refuse outputs of which each stage would have only a part.

    Args:
        balances: are router logits counted stage by stage?

    Raises:
        NotImplementedError: the call or the model's config asks for it.
    """
    routers = () if balances else ("output_router_logits",)
    for key in ("output_hidden_states", "output_attentions", *routers):
        if getattr(config, key, False) if batch.get(key) is None else batch[key]:
            raise NotImplementedError(f"hf_parallel: {key}=True needs all layers on one rank; pp_size=1 works")
    if has_cache(batch):
        refuse_cache()
    if batch.get("return_dict") is False:
        raise NotImplementedError("hf_parallel: a pipelined model returns named outputs; drop return_dict=False")


def refuse_cache() -> NoReturn:
    """Refuse a key/value cache that a script hands to a model, or asks of it."""
    raise NotImplementedError("hf_parallel: a pipelined model keeps no key/value cache; use_cache=False works")


class DetachedNode(torch.autograd.Function):
    """Values computed elsewhere; backward hands their gradients to `finish`, once, and returns none.

    The anchor is any tensor with a gradient, because the values have none.
    """

    @staticmethod
    def forward(
        ctx: Context, anchor: torch.Tensor, finish: Callable[[Gradients], None], *values: torch.Tensor
    ) -> tuple:
        ctx.finish = finish
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(value for value in values if not value.is_floating_point()))
        return tuple(value.clone() for value in values)

    @staticmethod
    def backward(ctx: Context, *gradients: torch.Tensor | None) -> tuple:
        if ctx.finish is None:
            raise NotImplementedError(
                "hf_parallel: a second backward pass through what a pipelined model has computed: its stages go back "
                "once; one backward pass of the sum of the losses works, and so does pp_size=1"
            )
        finish, ctx.finish = ctx.finish, None
        finish(list(gradients))
        return (None, None, *(None for _ in gradients))


def find_leaves(results: Iterable[object]) -> tuple[list[torch.Tensor], bool]:
    """List the tensors that a backward pass gives gradients to by itself, and say whether it goes through stages."""
    nodes: list[Any] = [value.grad_fn for value in results if torch.is_tensor(value)]
    seen, leaves, passes = set(), list[torch.Tensor](), False
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, DetachedNode._backward_cls):
            passes = True
            continue
        leaves += [node.variable] if hasattr(node, "variable") else []
        nodes += [before for before, _ in node.next_functions]
    return leaves, passes


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor, which is sent by itself."""

    index: int
    shape: torch.Size
    dtype: torch.dtype


def share_result(
    result: Result, group: dist.ProcessGroup, control: dist.ProcessGroup, source: int, device: torch.device
) -> tuple[Callable[[list[torch.Tensor]], Result], list[torch.Tensor]]:
    """Send what the last stage computed to all stages.

    Args:
        result: nested containers of tensors and small objects on the last stage; ignored elsewhere.
        control: the same ranks, for what is no tensor.
        source: which rank of the group holds the last stage.

    Returns:
        A function that rebuilds the result from a list of tensors, and those tensors: on the last stage the ones that
        carry a graph, elsewhere their received values.
    """
    last, tensors = group.rank() == source, list[torch.Tensor]()

    def take(leaf: object) -> object:
        if not torch.is_tensor(leaf):
            return leaf
        # Logits that are cut over tp ranks, or not made yet: those of the last stage make them whole together.
        tensors.append(leaf.full_tensor() if hasattr(leaf, "full_tensor") else leaf)
        return _Slot(len(tensors) - 1, tensors[-1].shape, tensors[-1].dtype)

    note: list[object] = [tree_map(take, result) if last else None]
    dist.broadcast_object_list(note, group=control, group_src=source)
    if not last:
        slots = sorted((s for s in tree_leaves(note[0]) if isinstance(s, _Slot)), key=lambda slot: slot.index)
        tensors = [torch.empty(slot.shape, dtype=slot.dtype, device=device) for slot in slots]
    for tensor in tensors:
        dist.broadcast(tensor.detach().contiguous() if last else tensor, group=group, group_src=source)
    return lambda values: tree_map(
        lambda leaf: values[leaf.index] if isinstance(leaf, _Slot) else leaf, note[0]
    ), tensors

"""The vocabulary over tp ranks: embedding, head and cross-entropy on 1/tp of it (Shoeybi et al., 2019, section 3).

Rank r holds rows r * ceil(V / tp) …, so any vocabulary can be cut; the last ranks may hold fewer. The head returns a
DTensor that is cut along the vocabulary: the loss works on the parts, and whole logits come into being only when the
script reads them from the model's output.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hf_parallel.axes.axis import SequenceParallelFlag
from hf_parallel.axes.tensor.layers import ColumnParallel, TensorParallelLayer, get_local, put_mixin_on
from hf_parallel.axes.tensor.region import Region
from hf_parallel.axes.tensor.tensor_parallel import shard_parameter
from hf_parallel.model.calls import compute_targets_of, count_items
from hf_parallel.ranks import all_reduce, copy_to_group, reduce_product_from_group
from hf_parallel.ranks.differentiable import Context, once_differentiable
from hf_parallel.ranks.local import get_autocast_dtype, make_class, whole_when_read

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel


# ---- Log-probabilities of tokens from hidden states, over a vocabulary that is cut over tp: no logits, no whole head
# Each rank multiplies by its rows of the head, a chunk of tokens at a time, and keeps a few numbers per token; two
# small all-reduces make them those of the whole vocabulary. The backward multiplies again. As memory goes this is the
# cross-entropy of `vocab_parallel.py` without the logits (chunked over tokens as by Wijmans et al., 2024).

CHUNK = 1024  # tokens whose logits over this rank's rows exist at a time


@dataclass(frozen=True)
class Scaling:
    """logits = softcap · tanh(scale · product / softcap) / temperature, or scale · product / temperature."""

    temperature: float = 1.0
    softcap: float | None = None
    scale: float = 1.0

    def logits(self, product: torch.Tensor) -> torch.Tensor:
        """fp32, from the head's products."""
        z = product.float() * self.scale
        return (z if self.softcap is None else self.softcap * torch.tanh(z / self.softcap)) / self.temperature

    def backward(self, gradient: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the products from the gradient of the logits."""
        if self.softcap is not None:
            capped = torch.tanh(product.float() * self.scale / self.softcap)
            gradient = gradient * (1 - capped.square())
        return gradient * (self.scale / self.temperature)


@dataclass
class TokenScores:
    """Per token, shape [tokens]: fp32, and bool for `is_top1`. Gradients flow to the first two."""

    log_probs: torch.Tensor
    entropy: torch.Tensor
    log_sum_sq_probs: torch.Tensor
    mean_logits: torch.Tensor
    is_top1: torch.Tensor


def compute_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    group: dist.ProcessGroup,
    first: int,
    vocabulary: int,
    scaling: Scaling,
) -> TokenScores:
    """Return scores of `targets` [tokens] under softmax(head(hidden)).

    Args:
        hidden: [tokens, hidden], equal on all ranks of `group`.
        weight: this rank's rows of the head, from row `first` on.
        bias: of the same rows.
    """
    return TokenScores(
        *_LogProbs.apply(copy_to_group(hidden, group), weight, bias, targets, group, first, vocabulary, scaling)
    )


class _LogProbs(torch.autograd.Function):
    """The gradient of `hidden` is this rank's part of it."""

    @staticmethod
    def forward(
        ctx: Context,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        group: dist.ProcessGroup,
        first: int,
        vocabulary: int,
        scaling: Scaling,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.dtype = get_autocast_dtype(hidden.device) or hidden.dtype
        lowered = weight.to(ctx.dtype)
        parts = [
            _summarise_logits(scaling.logits(_multiply_head(x, lowered, bias, ctx.dtype)), target - first)
            for x, target in zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
        ]
        maxima, sums = (torch.cat(part, dim=1) for part in zip(*parts, strict=True))
        largest, before = all_reduce(maxima, group, dist.ReduceOp.MAX)
        factor = torch.exp(maxima[0] - largest)
        sums[:2] *= factor
        sums[2] *= factor.square()
        total, weighted, squares, logits, at_target = all_reduce(sums, group)
        log_total = largest + total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, bias, targets - first, log_total, entropy)
        ctx.scaling = scaling
        results = (
            at_target - log_total,
            entropy,
            squares.log() - 2 * total.log(),
            logits / vocabulary,
            (at_target >= largest) & (at_target > before),
        )
        ctx.mark_non_differentiable(*results[2:])
        return results

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context, of_log_probs: torch.Tensor | None, of_entropy: torch.Tensor | None, *_: object
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, targets, log_total, entropy = ctx.saved_tensors
        wanted = ctx.needs_input_grad[:3]
        tensors = (hidden, weight, bias)
        into, lowered = make_zeros_for(tensors, wanted), weight.to(ctx.dtype)
        for chunk in iterate_chunks(len(hidden), CHUNK):
            x = hidden[chunk].to(ctx.dtype)
            product = _multiply_head(x, lowered, bias, ctx.dtype)
            logs = ctx.scaling.logits(product) - log_total[chunk, None]
            probabilities, gradient = logs.exp(), torch.zeros_like(logs)
            if of_log_probs is not None:
                gradient -= of_log_probs[chunk, None] * probabilities
                inside, column = find_inside_columns(targets[chunk], logs)
                gradient.scatter_add_(1, column, (of_log_probs[chunk] * inside)[:, None])
            if of_entropy is not None:
                gradient -= of_entropy[chunk, None] * probabilities * (logs + entropy[chunk, None])
            gradient = ctx.scaling.backward(gradient, product).to(ctx.dtype)
            add_gradients(into, chunk, x, lowered, gradient)
        gradients = [None if g is None else g.to(t.dtype) for g, t in zip(into, tensors, strict=True)]
        return (*gradients, None, None, None, None, None)


def _multiply_head(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    with torch.autocast(x.device.type, enabled=False):
        product = x.to(dtype) @ weight.to(dtype).t()
        return product if bias is None else product + bias.to(dtype)


def iterate_chunks(tokens: int, size: int) -> Iterator[slice]:
    """Yield slices of so many tokens, one behind the other."""
    return (slice(start, start + size) for start in range(0, tokens, size))


def make_zeros_for(tensors: Iterable[torch.Tensor | None], wanted: Iterable[bool]) -> list[torch.Tensor | None]:
    """Return fp32 sums for gradients of hidden states, weight and bias, where they are wanted."""
    both = zip(tensors, wanted, strict=True)
    return [torch.zeros_like(t, dtype=torch.float32) if t is not None and w else None for t, w in both]


def add_gradients(
    into: list[torch.Tensor | None], chunk: slice, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor
) -> None:
    """Add the gradients of a chunk of tokens, from the gradient of its products x Wᵀ + b."""
    of_hidden, of_weight, of_bias = into
    if of_hidden is not None:
        of_hidden[chunk] = gradient @ weight
    if of_weight is not None:
        of_weight += gradient.t() @ x
    if of_bias is not None:
        of_bias += gradient.sum(0, dtype=torch.float32)


def find_inside_columns(targets: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which targets are among these columns, and a column for each."""
    inside = (targets >= 0) & (targets < logits.shape[1])
    return inside, targets.clamp(0, logits.shape[1] - 1)[:, None]


def _summarise_logits(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Summarise logits [tokens, columns]: [largest, largest before the target], [Σe, Σe·z, Σe², Σz, target's z]."""
    columns = torch.arange(logits.shape[1], device=logits.device)
    earlier = logits.masked_fill(columns >= targets[:, None], -torch.inf)
    largest, before = logits.amax(1), earlier.amax(1)
    e = torch.exp(logits - largest[:, None])
    inside, column = find_inside_columns(targets, logits)
    at_target = torch.where(inside, logits.gather(1, column)[:, 0], 0.0)
    sums = (e.sum(1), (e * logits).sum(1), e.square().sum(1), logits.sum(1), at_target)
    return torch.stack([largest, before]), torch.stack(sums)


# ---- Cross-entropy of logits that are cut along the vocabulary, a chunk of tokens at a time -------------------------
# Kept from the forward to the backward are the logits themselves, and two numbers per token; beside them the backward
# makes the gradient, in their dtype. What is computed in fp32 exists for a chunk only.


class SplitCrossEntropy(torch.autograd.Function):
    """Sum of -log softmax(logits)[target] over the targets; the logits […, columns] are those from `first` on."""

    @staticmethod
    def forward(
        ctx: Context,
        logits: torch.Tensor,
        target: torch.Tensor,
        first: int,
        group: dist.ProcessGroup,
        ignore_index: int,
    ) -> torch.Tensor:
        rows, columns, counts = logits.flatten(0, -2), target.flatten() - first, target.flatten() != ignore_index
        largest = all_reduce(rows.amax(-1).float(), group, dist.ReduceOp.MAX)
        parts = zip(rows.split(CHUNK), columns.split(CHUNK), largest.split(CHUNK), strict=True)
        total, at_target = all_reduce(torch.cat([_compute_sums(*part) for part in parts], dim=1), group)
        ctx.save_for_backward(logits, columns, largest + total.log(), counts)
        return ((total.log() - at_target) * counts).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        logits, columns, log_total, counts = ctx.saved_tensors
        rows, weights = logits.flatten(0, -2), torch.where(counts, gradient, 0.0)  # infinite for a mean over no target
        of_logits = torch.empty_like(logits, memory_format=torch.contiguous_format)
        of_rows = of_logits.view(rows.shape)
        for chunk in iterate_chunks(len(rows), CHUNK):
            softmax = torch.sub(rows[chunk], log_total[chunk, None]).exp_()
            inside, column = find_inside_columns(columns[chunk], rows)
            softmax.scatter_add_(1, column, -inside.to(softmax.dtype)[:, None])
            of_rows[chunk] = softmax.mul_(weights[chunk, None])
        return of_logits, None, None, None, None


def _compute_sums(logits: torch.Tensor, columns: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """Return [sum of exponentials, logit of the target], both beside the largest logit, of each token."""
    x = torch.sub(logits, largest[:, None])  # in fp32, as the second is
    inside, column = find_inside_columns(columns, logits)
    at_target = torch.where(inside, x.gather(1, column)[:, 0], 0.0)
    return torch.stack([x.exp_().sum(1), at_target])


def apply_vocab_parallel(
    model: PreTrainedModel,
    mesh: DeviceMesh,
    styles: dict[str, str],
    device: torch.device,
    own_loss: bool,
    overlap: bool = False,
) -> None:
    """Split embedding and head, in place; with `own_loss` the model's causal loss works on parts of the logits."""
    for name, style in styles.items():
        if style not in ("embedding_rowwise", "colwise_gather_output"):
            continue
        module = model.get_submodule(name)
        # Sequences are whole on both sides.
        region = Region(module, mesh.get_group(), SequenceParallelFlag(False), overlap=overlap)
        shard_parameter(module, "weight", mesh, 0, device)
        if style == "colwise_gather_output":
            shard_parameter(module, "bias", mesh, 0, device)
            head = put_mixin_on(module, VocabParallelHead, region)
            head.mesh = mesh
            if own_loss:
                _keep_parts_within_calls(model, head)
        elif type(module) is nn.Embedding:
            put_mixin_on(module, VocabParallel, region)
        else:  # a subclass keeps what it adds (such as scaling) and finds the lookup in the parts behind it
            split: Any = module
            kind: type = type(module)
            split.__class__ = make_class(kind.__name__, kind.__module__, kind, VocabParallel, nn.Embedding)
            split.region = region
    if own_loss and "colwise_gather_output" in styles.values():
        model.loss_function = functools.partial(compute_causal_loss, model.loss_function)


def _keep_parts_within_calls(model: PreTrainedModel, head: VocabParallelHead) -> None:
    """Let the head return parts while the model runs: what calls the head by itself has a loss of its own."""

    def within(is_within: bool, *_: object) -> None:
        head.whole = not is_within

    model.register_forward_pre_hook(functools.partial(within, True))
    model.register_forward_hook(functools.partial(within, False), always_call=True)


class VocabParallel(TensorParallelLayer):
    """ids […] -> […, hidden]: each rank looks up the rows it holds, the others count as zero."""

    num_embeddings: int
    padding_idx: int | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.adapted:  # with the rows that `locate` gave, and the padding
            return F.embedding(input, get_local(self.weight), self.padding_idx)
        rows, inside, padding = self.locate(input)
        output = F.embedding(rows, get_local(self.weight), padding)
        return reduce_product_from_group(output * inside.unsqueeze(-1), self.region.group)

    def locate(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int | None]:
        """Return the rows here of these ids, which of the ids are here, and the row here that gets no gradient."""
        check_range(ids, self.num_embeddings, "index out of range in self")
        # Not of the weight's shape: a wrapper asks before data ranks have gathered it.
        group = self.region.group
        first = compute_first_row(self.num_embeddings, group)
        held = min(-(-self.num_embeddings // group.size()), self.num_embeddings - first)
        inside = (ids >= first) & (ids < first + held)
        padding = None if self.padding_idx is None else self.padding_idx - first
        if padding is not None and not 0 <= padding < held:
            padding = None  # it lives on another rank
        return (ids - first).clamp(0, held - 1), inside, padding


class VocabParallelHead(ColumnParallel):
    """x […, hidden] -> logits […, V] as a DTensor cut along V, or whole where `whole` is set."""

    out_features: int
    mesh: DeviceMesh
    whole: bool = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        logits = super().forward(input)
        return logits if self.adapted else self.leave(logits)

    def leave(self, logits: torch.Tensor) -> torch.Tensor:
        self.region.close()
        shape = torch.Size((*logits.shape[:-1], self.out_features))
        stride = torch.empty(shape, device="meta").stride()
        cut = DTensor.from_local(
            logits, self.mesh, [Shard(len(shape) - 1)], run_check=False, shape=shape, stride=stride
        )
        return gather_logits(cut) if self.whole else cut


class _Whole(torch.autograd.Function):
    """A whole DTensor as a tensor. `to_local` returns a view of an autograd function, which nobody may change."""

    @staticmethod
    def forward(ctx: Any, whole: DTensor) -> torch.Tensor:
        ctx.spec = whole._spec
        return whole._local_tensor

    @staticmethod
    def backward(ctx: Context, gradient: torch.Tensor) -> DTensor:
        return DTensor(gradient.contiguous(), ctx.spec, requires_grad=False)


def gather_logits(cut: Any) -> torch.Tensor:
    """Return logits whole, of which ranks hold parts. A script may change them in place: `logits /= temperature`."""
    if torch.compiler.is_compiling():
        return cut.full_tensor()
    return _Whole.apply(cut.redistribute(placements=[Replicate()] * cut.device_mesh.ndim))


def compute_causal_loss(
    whole_loss: Callable[..., torch.Tensor],
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: object,
) -> torch.Tensor:
    """Compute transformers' causal loss of shifted labels: sum / `num_items_in_batch`, or the mean without it."""
    if not isinstance(logits, DTensor):
        return whole_loss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    group = logits.device_mesh.get_group()
    target = compute_targets_of(labels, shift_labels, ignore_index).to(logits.device)
    first = compute_first_row(logits.shape[-1], group)
    check_range(target, logits.shape[-1], "target out of bounds", ignore_index)
    loss = SplitCrossEntropy.apply(logits.to_local(), target, first, group, ignore_index)
    return loss / count_items(target, num_items_in_batch, ignore_index)


def compute_first_row(vocabulary: int, group: dist.ProcessGroup) -> int:
    """Return the first row of this rank: all ranks before it hold ceil(V / n)."""
    return min(vocabulary, group.rank() * -(-vocabulary // group.size()))


def check_range(ids: torch.Tensor, size: int, problem: str, ignored: int = 0) -> None:
    """Stop at ids that no rank holds, as one process does; a GPU asserts it in its own time.

    Raises:
        IndexError: on a CPU, an id is neither in [0, size) nor `ignored`.
    """
    fits = (((ids >= 0) & (ids < size)) | (ids == ignored)).all()
    try:
        torch._assert_async(fits, problem)
    except RuntimeError:
        low, high = (int(bound) for bound in ids.masked_fill(ids == ignored, 0).aminmax())
        raise IndexError(f"{problem}: from {low} to {high}, of {size} in the vocabulary") from None


def make_logits_whole(kind: type, model: nn.Module, args: tuple, output: object) -> None:
    """Let logits of this kind, which knows its `full_tensor`, be whole once they are read. A forward hook."""
    if isinstance(output, dict) and isinstance(dict.get(output, "logits"), kind):
        whole_when_read(output, "logits", gather_logits if kind is DTensor else operator.methodcaller("full_tensor"))

"""Head and cross-entropy in one, a chunk of tokens at a time: no logits beyond a chunk's, forward or backward.

The forward computes the gradients too, which the backward scales (Hsu et al., 2024, arXiv:2410.10989):

    for each chunk x of tokens      z = x Wᵀ     loss += log Σ exp z - z[target]
                                    g = softmax z - onehot      dx = g W      dW += gᵀ x

    plain      logits, their fp32 copy, probabilities, gradients: tokens x vocabulary each
    here       a few of chunk x vocabulary; dW, which the plain way makes too, is summed in fp32

Over a vocabulary that tp ranks share each has its columns of a chunk; two small all-reduces make its sums whole.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from hf_parallel.ask.session import of_session
from hf_parallel.axes.chunked_loss import compute_fewest_tokens, count_tokens_of_chunk
from hf_parallel.axes.tensor.layers import get_local_weight
from hf_parallel.axes.tensor.vocab_parallel import (
    Scaling,
    VocabParallelHead,
    add_gradients,
    check_range,
    compute_first_row,
    find_inside_columns,
    gather_logits,
    iterate_chunks,
    make_logits_whole,
    make_zeros_for,
)
from hf_parallel.model.calls import are_logits_unread, bind_arguments_of, compute_targets_of, count_items
from hf_parallel.ranks import all_reduce, copy_to_group
from hf_parallel.ranks.differentiable import Context, once_differentiable
from hf_parallel.ranks.local import cast_as_autocast, get_autocast_dtype, get_local
from hf_parallel.ranks.steps import call_after_steps

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# ---- Logits that come into being only if someone reads them; until then, what they would be made of -----------------
# A causal model scales or caps its logits and hands them to its loss: as long as it does no more, this stands for
# them. Whatever else is done makes them, exactly as the model's own head does.


@dataclass(frozen=True)
class Source:
    """The source of which logits are made. `done`: what the model has done with them, in order."""

    head: nn.Module
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    plain: Callable[[], torch.Tensor]
    done: tuple[tuple[str, float], ...] = ()
    repeat: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()

    @property
    def scaling(self) -> Scaling | None:
        """Return the steps as one formula: a factor, or a factor, tanh and a factor; None if they are neither."""
        caps = [place for place, (kind, _) in enumerate(self.done) if kind == "tanh"]
        if len(caps) > 1:
            return None
        factors = [factor for _, factor in self.done]
        before = math.prod(factors[: caps[0]] if caps else factors, start=1.0)
        if not caps:
            return Scaling(scale=before)
        cap = math.prod(factors[caps[0] + 1 :], start=1.0)
        return Scaling(softcap=cap, scale=before * cap)


class LazyLogits(torch.Tensor):
    """Has the shape of logits, and no memory."""

    source: Source
    made: torch.Tensor | None
    beside: torch.Tensor | None = None  # the model's loss, if it is given beside these

    @staticmethod
    def of(source: Source, shape: torch.Size, dtype: torch.dtype) -> LazyLogits:
        """Make logits of this shape, from this source."""
        lazy = torch.Tensor._make_wrapper_subclass(
            LazyLogits, shape, dtype=dtype, device=source.hidden.device, requires_grad=source.hidden.requires_grad
        )
        lazy.source, lazy.made = source, None
        if source.hidden.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                lazy.register_hook(_reject_function)
        return lazy

    def get_source(self) -> Source:
        """Return the source.

        Raises:
            NotImplementedError: these logits are outputs of an autograd function.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if self.grad_fn is not None:
                _reject_function()
        return self.source

    def plain(self) -> torch.Tensor:
        """Make logits as the model's own head does: a vocabulary that is cut over ranks stays so."""
        if self.made is None:
            source = self.get_source()
            with torch.enable_grad():  # as in the forward pass: the loss may read after a metric under `no_grad` has
                logits = source.plain()
                for function in source.repeat:
                    logits = function(logits)
            if logits.requires_grad and self.beside is not None:
                logits.register_hook(functools.partial(_run_hooks_of_output, self.beside))
            self.made = logits
        return self.made

    def full_tensor(self) -> torch.Tensor:
        """Return whole logits. Where ranks hold parts of the vocabulary, all of them ask alike."""
        logits = self.plain()
        return gather_logits(logits) if isinstance(logits, DTensor) else logits

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return repr(self.full_tensor())

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = kwargs or {}
        if func == _REQUIRES_GRAD:  # FSDP2 would put hooks on logits that do
            return False
        if func in _OF_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        pending = _apply_pending(func, args, kwargs)
        return cls.__torch_dispatch__(func, types, args, kwargs) if pending is None else pending

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        args, kwargs = tree_map_only(LazyLogits, LazyLogits.full_tensor, (args, kwargs or {}))
        return func(*args, **kwargs)


def _run_hooks_of_output(loss: torch.Tensor, _: torch.Tensor) -> None:
    """Begin the backward pass of a model as its outputs do: a script that reads logits may leave its loss alone.

    FSDP2 and what gathers and rounds beside it have hooks on outputs; logits that were made later have none.
    """
    for hook in list((loss._backward_hooks or {}).values()):
        hook(torch.zeros_like(loss))


def _keep_loss_beside(module: nn.Module, args: tuple, output: object) -> None:
    """Let logits that are not made yet know the loss that the model returns with them."""
    given = output.values() if isinstance(output, dict) else output if isinstance(output, tuple) else ()
    tensors = [value for value in given if torch.is_tensor(value)]
    for value in tensors:
        if isinstance(value, LazyLogits) and not isinstance(tensors[0], LazyLogits) and tensors[0].requires_grad:
            value.beside = tensors[0]


def _reject_function(*_: object) -> NoReturn:
    """Raise the error of an autograd function of the script's own: torch hands it these logits without asking."""
    raise NotImplementedError(
        "hf_parallel: lean_loss: an autograd function of the script's own is applied to logits before the model's "
        "loss, which would leave its backward pass out; lean_loss=false works"
    )


_TENSOR = torch.Tensor
_REQUIRES_GRAD = _TENSOR.requires_grad.__get__  # type: ignore[attr-defined]
#: What can be asked without logits.
_OF_SHAPE = {
    *(getattr(_TENSOR, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout")),
    *(getattr(_TENSOR, name).__get__ for name in ("is_leaf", "is_cuda", "is_sparse", "is_meta", "_base")),
    *(getattr(_TENSOR, name) for name in ("size", "dim", "numel", "nelement", "element_size", "__len__", "__hash__")),
    *(_TENSOR.is_floating_point, torch.is_floating_point, _TENSOR.is_complex, torch.is_complex),
}


def _apply_pending(func: Callable, args: tuple, kwargs: dict[str, object]) -> LazyLogits | None:
    """Return the result, still not made, of a step that the loss can do by itself; None for any other step."""
    name, lazy = getattr(func, "__name__", ""), args[0] if args else None
    if not isinstance(lazy, LazyLogits) or lazy.made is not None or kwargs:
        return None
    step: tuple[tuple[str, float], ...] | None = None
    dtype, rest = lazy.dtype, args[1:]
    factor = float(rest[0]) if len(rest) == 1 and isinstance(rest[0], numbers.Real) else None
    if name in ("mul", "__mul__", "__rmul__", "multiply") and factor is not None:
        step = (("mul", factor),)
    elif name in ("div", "__truediv__", "true_divide", "divide") and factor:
        step = (("mul", 1 / factor),)
    elif name == "tanh":
        step = (("tanh", 1.0),)
    elif name in ("float", "contiguous") and not rest:
        step, dtype = (), torch.float32 if name == "float" else dtype
    if step is None:
        return None
    source = lazy.get_source()
    repeat = (*source.repeat, lambda logits: func(logits, *rest))
    return LazyLogits.of(replace(source, done=source.done + step, repeat=repeat), lazy.shape, dtype)


@dataclass
class _Wanted:
    """Is the model's own loss computed now, in a loop that may read logits later? `any_number`: for few tokens too."""

    any_number: bool
    loss: bool = False


@dataclass
class _HeadForward:
    """The forward of a model's head. A copy of the head alone, as adapters make, has its own."""

    wanted: _Wanted
    model: PreTrainedModel
    head: nn.Linear

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """Run the head; what it is by then, tp and FSDP2 have decided."""
        head, dtype = self.head, get_autocast_dtype(input.device) or input.dtype
        lean, able = False, torch.is_grad_enabled() and not torch.compiler.is_compiling()
        able = able and not getattr(head, "adapted", False)
        hooked = head._backward_hooks or head._backward_pre_hooks  # want a gradient that is never whole here
        if able and not hooked and _is_plain_product(head):
            # From how many tokens on chunks need less memory than whole logits of this dtype.
            split = isinstance(head, VocabParallelHead)
            fewest = compute_fewest_tokens(head.in_features, head.weight.requires_grad, dtype.itemsize, split)
            pays = self.wanted.any_number or input.shape[:-1].numel() >= fewest
            lean = self.wanted.loss or (are_logits_unread() and pays)
        if not lean:
            return type(head).forward(head, input)
        plain = functools.partial(_multiply_later, self.model, head, input, of_session(_Steps).taken)
        source = Source(head, input, head.weight, head.bias, plain)
        return LazyLogits.of(source, torch.Size((*input.shape[:-1], head.out_features)), dtype)

    def __deepcopy__(self, memo: dict[int, object]) -> functools.partial[torch.Tensor] | None:
        head = memo.get(id(self.head))
        return functools.partial(type(head).forward, head) if isinstance(head, nn.Module) else None


@dataclass
class _Steps:
    """The number of steps of all optimizers, once one model is lean."""

    taken: int = 0


def _count_lean_step(*_: object) -> None:
    of_session(_Steps).taken += 1


def attach(model: PreTrainedModel, any_number: bool, in_loops: bool) -> None:
    """Stand behind the forward of the head, before it is cut; in loops also behind that of the model."""
    call_after_steps(_count_lean_step)
    head, wanted = model.get_output_embeddings(), _Wanted(any_number)
    head.forward = _HeadForward(wanted, model, head)
    if not in_loops:
        return
    forward = model.forward
    names = list(inspect.signature(forward).parameters)

    @functools.wraps(forward)
    def with_loss(*args: object, **kwargs: object) -> object:
        # Whoever trains with labels is about to compute the model's own loss.
        batch = bind_arguments_of(names, args, kwargs, model)
        former = wanted.loss
        wanted.loss = batch.get("labels") is not None or batch.get("shift_labels") is not None
        try:
            return forward(**batch)
        finally:
            wanted.loss = former

    model.forward = with_loss


def finish(model: PreTrainedModel) -> None:
    """Stand before the model's loss, and after FSDP2's hooks, which read what a model returns."""
    model.loss_function = functools.partial(compute_lean_loss, model.loss_function)
    model.register_forward_hook(_keep_loss_beside)
    model.register_forward_hook(functools.partial(make_logits_whole, LazyLogits))


def find_reason_for_whole_logits(model: PreTrainedModel, held: bool) -> str | None:
    """Return why the head that the model has by now gives whole logits; None if it need not.

    Args:
        held: is it on this rank, or does something stand for it?
    """
    head = model.get_output_embeddings()
    if hasattr(head, "base_layer"):
        return "the head has adapters"
    if hasattr(head, "modules_to_save"):
        return "a copy of the head is trained"
    if held and not isinstance(vars(head).get("forward"), _HeadForward):
        return "the head has been replaced"
    if held and (head._backward_hooks or head._backward_pre_hooks):
        return "hooks of the head read their gradient"
    if held and not _is_plain_product(head):
        return "tp leaves a rank without a row of the head, or it does more than multiply"
    return None


def _is_plain_product(head: nn.Module) -> bool:
    """Return whether a head is a linear layer and no more, split or not. A rank without a row has no largest logit."""
    if type(head).forward is nn.Linear.forward:
        return True
    if not isinstance(head, VocabParallelHead):
        return False
    columns = head.region.columns.get(head)  # an adapter of the weight itself answers in its place
    if columns is not None and getattr(columns, "func", None) is not get_local_weight:
        return False
    ranks = head.region.group.size()
    return (ranks - 1) * -(-head.out_features // ranks) < head.out_features


def _multiply_later(model: nn.Module, head: nn.Module, input: torch.Tensor, step: int) -> torch.Tensor:
    """Multiply by the head's own weights, which data ranks may have to gather again."""
    if of_session(_Steps).taken != step:
        raise RuntimeError(
            "hf_parallel: logits are made when they are read, and an optimizer has changed the head since; read them "
            "before its step, or set lean_loss=false"
        )
    unit = next((one for one in (head, model) if isinstance(one, FSDPModule)), None)
    former = head._parameters["weight"]
    if unit is not None:
        unit.unshard()
    if unit is None or head._parameters["weight"] is former:
        return type(head).forward(head, input)
    try:
        with torch.no_grad():  # its backward is over
            return type(head).forward(head, input)
    finally:
        unit.reshard()


def compute_lean_loss(
    own: Callable[..., torch.Tensor],
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: object,
) -> torch.Tensor:
    """Compute transformers' causal loss, without logits where they are lazy."""
    if not isinstance(logits, LazyLogits):
        return own(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    scaling = logits.get_source().scaling if logits.made is None and logits.shape[-1] == vocab_size else None
    if scaling is None:
        return own(logits.plain(), labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
    target = compute_targets_of(labels, shift_labels, ignore_index).to(logits.device).reshape(-1)
    items = count_items(target, num_items_in_batch, ignore_index)
    check_range(target, vocab_size, "target out of bounds", ignore_index)
    return _compute_loss_of_source(logits.source, target, scaling, ignore_index, items)


def _compute_loss_of_source(
    source: Source, target: torch.Tensor, scaling: Scaling, ignore_index: int, items: torch.Tensor | int
) -> torch.Tensor:
    rows, group, first = source.hidden.flatten(0, -2), None, 0
    if isinstance(source.head, VocabParallelHead):
        group = source.head.region.group
        rows, first = copy_to_group(cast_as_autocast(rows), group), compute_first_row(source.head.out_features, group)
    counts = target != ignore_index
    weight, bias = get_local(source.weight), get_local(source.bias)
    return _Chunked.apply(rows, weight, bias, target - first, counts, scaling, items, group)


class _Chunked(torch.autograd.Function):
    """hidden [tokens, h], weight [V, h], bias [V], target and which of them count [tokens] -> the loss.

    Of a vocabulary over the ranks of `group` the weight and the targets are this rank's rows, counted from its first.
    """

    @staticmethod
    def forward(
        ctx: Context,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        counts: torch.Tensor,
        scaling: Scaling,
        items: torch.Tensor | int,
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        dtype = get_autocast_dtype(hidden.device) or hidden.dtype
        tensors, wanted = (hidden, weight, bias), ctx.needs_input_grad[:3]
        into = make_zeros_for(tensors, wanted)
        # fp16 has no room for gradients of a mean over many tokens: there they are divided at the end.
        some = items + (items == 0)  # without a target the loss is nan and the gradient zero, as in one process
        ctx.divide, divisor = (some, 1) if dtype == torch.float16 else (1, some)
        with torch.autocast(hidden.device.type, enabled=False):
            lowered, lowered_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
            loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
            for chunk in iterate_chunks(len(hidden), count_tokens_of_chunk(hidden.shape[1], wanted[1])):
                x = hidden[chunk].to(dtype)
                of = target[chunk], counts[chunk], scaling, divisor, group
                part, gradient = _compute_loss_of_chunk(x, lowered, lowered_bias, *of)
                loss += part
                if any(wanted):
                    add_gradients(into, chunk, x, lowered, gradient)
                del gradient  # before the next chunk's is there
        ctx.save_for_backward(*into)
        ctx.dtypes = [None if t is None else t.dtype for t in tensors]
        return loss / items

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        factor = gradient / ctx.divide
        # Each in its own dtype at once: another copy in fp32 would be as large as the head.
        scaled = [
            None if g is None else torch.mul(g, factor, out=torch.empty_like(g, dtype=dtype))
            for g, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None, None)


def _compute_loss_of_chunk(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    counts: torch.Tensor,
    scaling: Scaling,
    divisor: torch.Tensor | int,
    group: dist.ProcessGroup | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of a chunk of tokens, and its gradient with respect to the head's product, over the divisor."""
    product = F.linear(x, weight, bias)
    if scaling == Scaling():
        product = product.float()  # the 16 bits are free from here on
        loss, gradient, total = _compute_loss_of_logits(product, target, counts, group)
        factor = (counts / divisor / total)[:, None]
        return loss, torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=x.dtype))
    loss, gradient, total = _compute_loss_of_logits(scaling.logits(product), target, counts, group)
    return loss, scaling.backward(gradient.mul_((counts / divisor / total)[:, None]), product).to(x.dtype)


def _compute_loss_of_logits(
    z: torch.Tensor, target: torch.Tensor, counts: torch.Tensor, group: dist.ProcessGroup | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the loss of tokens' logits; in their place its gradient times the third result, one number per token.

    Who writes the gradient in 16 bits divides by it on the way: each pass over logits costs.
    """
    inside, column = find_inside_columns(target, z)
    largest = z.amax(1)
    largest = largest if group is None else all_reduce(largest, group, dist.ReduceOp.MAX)
    at_target = torch.where(inside, z.sub_(largest[:, None]).gather(1, column)[:, 0], 0.0)
    sums = torch.stack([z.exp_().sum(1), at_target])
    total, at_target = sums if group is None else all_reduce(sums, group)
    loss = ((total.log() - at_target) * counts).sum()
    z.scatter_add_(1, column, -(inside * total)[:, None])
    return loss, z, total

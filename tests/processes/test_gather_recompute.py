"""Gathering a region's input again in the backward, against keeping it: the same gradients, fewer bytes."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from hf_parallel.axes.tensor import gather_recompute
from hf_parallel.ranks import gather_sequence
from tests.counting import CountCollectives

BATCH, LENGTH, HIDDEN = 2, 6, 8
WIDTHS = (8, 4, 4)  # of queries, keys, values on one rank


@dataclass
class Case:
    """How a region of three linears is run; each case must give the gradients of the plain region."""

    rows: bool = False  # [tokens, h] instead of [b, s, h]
    autocast: str = ""  # "forward", or "both" to call backward inside too
    frozen: tuple[int, ...] = ()  # linears whose weights are not trained
    input_gradient: bool = True
    wrap: Callable[..., Any] | None = None  # a checkpoint around the region
    wrap_linears: Callable[..., Any] | None = None  # a checkpoint inside it
    micro_batches: int = 1
    passes: int = 1  # backward passes through one graph
    gathers: int = 1  # in the backward, per micro-batch


def reentrant(function, *args):
    """Run the function again in the backward, as a graph of its own."""
    return checkpoint(function, *args, use_reentrant=True)


def recomputing(function, *args):
    """Run the function again in the backward, for its saved tensors only."""
    return checkpoint(function, *args, use_reentrant=False)


CASES = {
    "plain": Case(),
    "rows": Case(rows=True),
    "autocast": Case(autocast="forward"),
    "backward in autocast": Case(autocast="both"),
    "one frozen": Case(frozen=(0,)),
    "all frozen": Case(frozen=(0, 1, 2), gathers=0),
    "input without gradient": Case(input_gradient=False),
    "reentrant checkpoint": Case(wrap=reentrant, gathers=2),
    "checkpoint": Case(wrap=recomputing, gathers=2),
    "checkpoint in autocast": Case(wrap=recomputing, autocast="forward", gathers=2),
    "checkpoint inside": Case(wrap_linears=recomputing),
    "accumulation": Case(micro_batches=3),
    "two passes": Case(passes=2, gathers=2),
}


def gather_plainly(part, group):
    """What `gather_recompute.gather` computes, with nothing to remember."""
    return gather_sequence(part, group) if part.dim() == 3 else gather_sequence(part[None], group)[0]


def leaves(case: Case) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """This rank's part of the input, its weights and its biases."""
    generator = torch.Generator().manual_seed(dist.get_rank())

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    part = draw(LENGTH, HIDDEN) if case.rows else draw(BATCH, LENGTH, HIDDEN)
    weights = [draw(width, HIDDEN).requires_grad_(i not in case.frozen) for i, width in enumerate(WIDTHS)]
    return part.requires_grad_(case.input_gradient), weights, [draw(width).requires_grad_() for width in WIDTHS[:2]]


def train(case: Case, gather: Callable, linear: Callable) -> tuple[list[torch.Tensor | None], dict[str, int]]:
    """Gradients of part, weights and biases, and the collectives of the backward passes."""
    part, weights, biases = leaves(case)

    def linears(whole):
        return torch.cat([linear(whole, w, b) for w, b in zip(weights, [*biases, None], strict=True)], dim=-1)

    def region(part):
        whole = gather(part * 2, dist.group.WORLD)
        return case.wrap_linears(linears, whole) if case.wrap_linears else linears(whole)

    counted = CountCollectives()
    for _ in range(case.micro_batches):
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(case.autocast)):
            output = case.wrap(region, part) if case.wrap else region(part)
        with counted, torch.autocast("cpu", torch.bfloat16, enabled=case.autocast == "both"):
            for i in range(case.passes):
                output.float().square().sum().backward(retain_graph=i + 1 < case.passes)
    return [leaf.grad for leaf in (part, *weights, *biases)], dict(counted.counts)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_a_kept_input(distributed, name):
    """On every rank, and with one all-gather in the backward however many linears read the input."""
    case = CASES[name]
    expected = distributed(train, 2, case, gather_plainly, F.linear)
    for (own, counts), (plain, _) in zip(
        distributed(train, 2, case, gather_recompute.gather_for_linear, gather_recompute.multiply_gathered),
        expected,
        strict=True,
    ):
        assert counts.get("gather", 0) == case.gathers * case.micro_batches
        for mine, theirs in zip(own, plain, strict=True):
            if theirs is None:
                assert mine is None
            else:
                assert mine.dtype == theirs.dtype
                torch.testing.assert_close(mine, theirs)


def saved_elements(gather: Callable, linear: Callable, autocast: bool) -> tuple[int, bool]:
    """Elements kept for the backward beside weights and what comes before; is the gathered tensor gone?"""
    part, weights, _ = leaves(Case())
    saved = {}

    def keep(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    part = part * 2
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            whole = gather(part, dist.group.WORLD)
            outputs = [linear(whole, weight, None) for weight in weights]
        alive = weakref.ref(whole)
        del whole
    known = {tensor.untyped_storage().data_ptr() for tensor in weights}
    assert all(output.grad_fn is not None for output in outputs)
    return sum(tensor.numel() for pointer, tensor in saved.items() if pointer not in known), alive() is None


@pytest.mark.parametrize("autocast", [False, True])
def test_only_the_part_is_kept(distributed, autocast):
    """One copy of the part for all linears, lowered once under autocast; plainly it is the whole, for each a copy."""
    whole = BATCH * LENGTH * HIDDEN * 2
    assert (
        distributed(
            saved_elements, 2, gather_recompute.gather_for_linear, gather_recompute.multiply_gathered, autocast
        )
        == [(whole // 2, True)] * 2
    )
    kept, _ = distributed(saved_elements, 2, gather_plainly, F.linear, autocast)[0]
    assert kept >= whole


def origins_after_forward(wrap: Callable | None) -> list[bool]:
    """Does anything still know what the input was gathered from, once the region is left?"""
    part, weights, _ = leaves(Case())
    origins = []

    def region(part):
        whole: Any = gather_recompute.gather_for_linear(part * 2, dist.group.WORLD)
        origins.append(weakref.ref(whole._gathered_from))
        return sum(gather_recompute.multiply_gathered(whole, weight, None).sum() for weight in weights)

    output = wrap(region, part) if wrap else region(part)
    assert output.requires_grad
    return [origin() is None for origin in origins]


@pytest.mark.parametrize("wrap", [None, recomputing])
def test_nothing_lives_from_forward_to_backward(distributed, wrap):
    """A handle that reached the backward with the part would undo activation checkpointing."""
    assert distributed(origins_after_forward, 2, wrap) == [[True]] * 2


def changed_in_place(linear: Callable) -> list[torch.Tensor]:
    part, (weight, *_), _ = leaves(Case())
    whole = gather_recompute.gather_for_linear(part * 2, dist.group.WORLD)
    whole += 1
    linear(whole, weight, None).square().sum().backward()
    return [part.grad, weight.grad]


def test_an_input_changed_in_place_is_kept(distributed):
    """What would be gathered again is not what the linear read."""
    expected = distributed(changed_in_place, 2, F.linear)
    assert_equal(distributed(changed_in_place, 2, gather_recompute.multiply_gathered), expected)


def without_gradients() -> bool:
    part, (weight, *_), _ = leaves(Case())
    with torch.no_grad():
        whole = gather_recompute.gather_for_linear(part, dist.group.WORLD)
        return (
            hasattr(whole, "_gathered_from") or gather_recompute.multiply_gathered(whole, weight, None).requires_grad
        )


def test_nothing_is_remembered_without_gradients(distributed):
    assert distributed(without_gradients, 2) == [False, False]


class Projections(nn.Module):
    """Three column-parallel weights as DTensors, as `tensor_parallel.py` stores them."""

    def __init__(self, mesh, linear):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        whole = [torch.randn(8, HIDDEN, generator=generator) for _ in range(3)]
        self.weights = nn.ParameterList(distribute_tensor(w, mesh, [Shard(0)], src_data_rank=None) for w in whole)
        self.group, self.linear = mesh.get_group(), linear

    def forward(self, part):
        whole = gather_recompute.gather_for_linear(part, self.group)
        outputs = [self.linear(whole, weight.to_local(), None) for weight in self.weights]
        return part * sum(output.mean() for output in outputs)


def train_sharded(linear: Callable) -> list[torch.Tensor]:
    """Two layers under tp=2, dp_shard=2, whose unsharded weights are freed after forward and gathered in backward."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    layers = nn.Sequential(*(Projections(mesh["tp"], linear) for _ in range(2)))
    for layer in [*layers, layers]:
        fully_shard(layer, mesh=mesh["dp"], reshard_after_forward=True)
    part = torch.randn(BATCH, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        loss = layers(part.requires_grad_()).sum()
        assert all(isinstance(p, DTensor) and p.device_mesh.ndim == 2 for p in layers.parameters())  # freed
        loss.backward()
    gradients: list[DTensor] = [parameter.grad for parameter in layers.parameters()]
    return [part.grad, *(gradient.to_local() for gradient in gradients)]


def test_weights_freed_and_gathered_by_fsdp(distributed):
    """The saved weight follows FSDP2, which frees and refills the memory behind it."""
    assert_equal(
        distributed(train_sharded, 4, gather_recompute.multiply_gathered), distributed(train_sharded, 4, F.linear)
    )


def assert_equal(results: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> None:
    for own, plain in zip(results, expected, strict=True):
        for mine, theirs in zip(own, plain, strict=True):
            torch.testing.assert_close(mine, theirs)

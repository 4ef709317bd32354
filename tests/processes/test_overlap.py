"""Overlapped regions against plain ones: the same numbers and bytes, and a proof that something is overlapped.

Most cases draw small whole numbers: all sums are then exact in any order, and every comparison is bitwise. With random
numbers the products of halves and the rings' sums over more than two ranks may be rounded in another order.
"""

import gc
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from hf_parallel.axes.tensor import deferred_wgrad as late_gradients
from hf_parallel.axes.tensor import gather_recompute, overlap
from hf_parallel.axes.tensor.deferred_wgrad import enter_columns, multiply_columns
from hf_parallel.axes.tensor.overlap import multiply_row_overlapped
from hf_parallel.ranks import copy_to_group, reduce_from_group, reduce_scatter_sequence
from hf_parallel.ranks.differentiable import Started
from tests.counting import CountCollectives
from tests.distributed import run

HIDDEN, INNER = 6, 8
# Before and at the sequence, which counts tokens per rank: pairs, odd, single ones, [tokens, hidden], four dims.
SHAPES = [(2, 4), (3, 5), (2, 1), (1, 2), (3,), (1,), (2, 2, 3)]


def local(tensor: Any) -> torch.Tensor:
    """This rank's shard of a weight or of its gradient."""
    return tensor.to_local()


def whole_numbers(*shape: int) -> torch.Tensor:
    return torch.randint(1, 3, shape) * (2.0 * torch.randint(0, 2, shape) - 1)


class Block(nn.Module):
    """up and gate read one input, down leaves the region; the weights are DTensors as in `tensor_parallel.py`."""

    def __init__(self, draw=whole_numbers, dtype=torch.float32, mesh=None):
        super().__init__()
        mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
        self.group, self.sequence_parallel, self.overlapped = mesh.get_group(), True, True
        torch.manual_seed(1)
        shapes = {"up": (INNER, HIDDEN), "gate": (INNER, HIDDEN), "bias": (INNER,), "down": (HIDDEN, INNER)}
        for name, shape in shapes.items():
            whole = draw(*shape).to(dtype)
            shard = distribute_tensor(whole, mesh, [Shard(int(name == "down"))], src_data_rank=None)
            self.register_parameter(name, nn.Parameter(shard))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.by_halves(x) if self.overlapped else self.plain(x)

    def by_halves(self, x: torch.Tensor) -> torch.Tensor:
        weights = [local(self.up), local(self.gate)]
        entered, (up, gate) = enter_columns(x, weights, self.group, self.sequence_parallel)
        inner = multiply_columns(entered, up, local(self.bias)) * multiply_columns(entered, gate)
        return multiply_row_overlapped(inner, local(self.down), self.group, self.sequence_parallel)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        entered = (gather_recompute.gather_for_linear if self.sequence_parallel else copy_to_group)(x, self.group)
        up = gather_recompute.multiply_gathered(entered, local(self.up), local(self.bias))
        inner = up * gather_recompute.multiply_gathered(entered, local(self.gate), None)
        leave = reduce_scatter_sequence if self.sequence_parallel else reduce_from_group
        return leave(F.linear(inner, local(self.down)), self.group)


def drawn(block: Block, draw: Any, *shape: int) -> torch.Tensor:
    """Different values on the ranks where each holds its own part, the same where all hold the whole."""
    torch.manual_seed(2 + (dist.get_rank() if block.sequence_parallel else 0))
    return draw(*shape)


def outcome(
    block: Block, x: torch.Tensor, passes: int = 1, forward: Any = None, frozen: bool = False
) -> dict[str, torch.Tensor | None]:
    """Output and all gradients after some backward passes; with `frozen` x needs no gradient."""
    block.zero_grad()
    x = x.detach().clone().requires_grad_(not frozen)
    for _ in range(passes):
        output = (forward or block)(x)
        output.backward(drawn(block, whole_numbers, *output.shape).to(output.dtype))
    gradients = {name: local(p.grad) for name, p in block.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "x": x.grad, **gradients}


def both(block: Block, x: torch.Tensor, **how: Any) -> tuple[dict, dict]:
    """The outcomes of the plain and of the overlapped path."""
    block.overlapped = False
    expected = outcome(block, x, **how)
    block.overlapped = True
    return expected, outcome(block, x, **how)


def check_bitwise(block: Block, x: torch.Tensor, names: str = "output x up gate bias down", **how: Any) -> None:
    expected, actual = both(block, x, **how)
    assert {name for name, value in actual.items() if value is not None} == set(names.split())
    for name in names.split():
        torch.testing.assert_close(actual[name], expected[name], rtol=0, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def all_shapes() -> None:
    block = Block()
    for sequence_parallel in (True, False):
        block.sequence_parallel = sequence_parallel
        for shape in SHAPES:
            check_bitwise(block, drawn(block, whole_numbers, *shape, HIDDEN))


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_shape_gives_the_plain_numbers(ranks):
    """Bitwise: a token or an element in the wrong place shows, and nothing else can."""
    run(all_shapes, ranks)


def random_numbers(dtype: torch.dtype) -> dict[str, tuple[bool, float]]:
    """By name: is the overlapped path bitwise the plain one, and how far is it off in units of rounding?"""
    block, found = Block(torch.randn, dtype), {}
    for sequence_parallel in (True, False):
        block.sequence_parallel = sequence_parallel
        expected, actual = both(block, drawn(block, torch.randn, 3, 10, HIDDEN).to(dtype))
        for name, value in expected.items():
            unit = torch.finfo(dtype).eps * value.abs().max()
            off = ((actual[name] - value).abs().max() / unit).item()
            found[f"{name} {sequence_parallel}"] = (torch.equal(actual[name], value), off)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 4])
def test_random_numbers_differ_by_rounding_only(ranks, dtype):
    """Each is a sum of at most 8 products per rank over at most 4 ranks: a few roundings of the largest element."""
    for found in run(random_numbers, ranks, dtype):
        assert all(off <= 4 for _, off in found.values()), found
        # Weight gradients are products of the whole, here of two tensors that are bitwise the plain ones.
        assert found["down True"][0], found
        assert found["down False"][0], found


def modes() -> None:
    block = Block()
    x = drawn(block, whole_numbers, 2, 3, HIDDEN)
    for sequence_parallel in (True, False):
        block.sequence_parallel = sequence_parallel
        x = drawn(block, whole_numbers, 2, 3, HIDDEN)
        check_bitwise(block, x, passes=3)
        for reentrant in (True, False):
            check_bitwise(block, x, forward=lambda x, r=reentrant: checkpoint(block, x, use_reentrant=r))
        check_bitwise(block, x, names="output up gate bias down", frozen=True)
        with torch.no_grad():
            assert torch.equal(block.by_halves(x), block.plain(x))


def test_accumulation_checkpointing_and_inputs_without_gradient():
    run(modes, 2)


def frozen_weights() -> None:
    for frozen in ("up", "down", "up gate bias", "up gate bias down"):
        block = Block()
        for name in frozen.split():
            getattr(block, name).requires_grad_(False)
        left = [name for name in ("up", "gate", "bias", "down") if name not in frozen.split()]
        for sequence_parallel in (True, False):
            block.sequence_parallel = sequence_parallel
            check_bitwise(block, drawn(block, whole_numbers, 2, 3, HIDDEN), " ".join(["output", "x", *left]))


def test_frozen_weights():
    run(frozen_weights, 2)


def under_autocast() -> dict[str, torch.dtype]:
    block = Block()
    x = drawn(block, whole_numbers, 2, 3, HIDDEN)

    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return block(x)

    expected, actual = both(block, x, forward=forward)
    for name, value in expected.items():
        # Whole numbers again, but bf16 holds them up to 256 only; on two ranks rounding has one order.
        assert torch.equal(actual[name], value), name
    return {name: value.dtype for name, value in actual.items()}


def test_autocast():
    """Products in bf16, gradients of weights in fp32."""
    dtypes = run(under_autocast, 2)[0]
    assert dtypes.pop("output") == torch.bfloat16
    assert set(dtypes.values()) == {torch.float32}


def under_fsdp() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    block = Block(mesh=mesh["tp"])
    fully_shard(block, mesh=mesh["dp"], reshard_after_forward=True)
    for reentrant in (None, True, False):
        x = drawn(block, whole_numbers, 2, 3, HIDDEN)
        how = {} if reentrant is None else {"forward": lambda x, r=reentrant: checkpoint(block, x, use_reentrant=r)}
        check_bitwise(block, x, passes=2, **how)


def test_fsdp_weights():
    """Freed after the forward pass and gathered again; their gradients are reduced after the late ones are there."""
    run(under_fsdp, 4)


def input_gradients_first() -> None:
    block = Block()
    x = drawn(block, whole_numbers, 2, 3, HIDDEN)
    expected = outcome(block, x)

    def looks_at_input(x: torch.Tensor) -> torch.Tensor:
        output = block(x)
        torch.autograd.grad(output.sum(), x, retain_graph=True)
        return output

    actual = outcome(block, x, forward=looks_at_input)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_a_pass_for_the_input_alone_leaves_nothing_behind():
    """It puts weight gradients aside that nobody takes; the next pass must not add them."""
    run(input_gradients_first, 2)


class Events(CountCollectives):
    """Products, collectives and waits in order, and the elements that collectives move."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        before = self.counts.copy()
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for kind in self.counts - before:
            self.order.append(kind)
            tensors = [leaf for leaf in tree_leaves((args, result)) if torch.is_tensor(leaf)]
            self.elements += max(tensor.numel() for tensor in tensors)  # the whole, where ranks have parts
        if func.namespace == "aten" and func._opname in ("mm", "addmm", "bmm"):
            self.order.append("product")
        return result

    def record_waits(self) -> None:
        def wait(started: Started) -> torch.Tensor:
            self.order.append("wait")
            started.work.wait()
            return started.result

        Started.wait = wait  # type: ignore[method-assign]


def events(sequence_parallel: bool) -> tuple[Any, ...]:
    """Events of the plain path, of the overlapped forward and backward pass, and elements of plain and overlapped."""
    block = Block()
    block.sequence_parallel = sequence_parallel
    x = drawn(block, whole_numbers, 1, 4, HIDDEN).requires_grad_()
    with Events() as plain:
        block.plain(x).sum().backward()
    with Events() as forward:
        forward.record_waits()
        output = block.by_halves(x)
    with Events() as backward:
        backward.record_waits()
        output.sum().backward()
    return plain.order, forward.order, backward.order, plain.elements, forward.elements + backward.elements


def test_order_with_sequence_parallelism():
    """Each half's collective starts before the other half's product, and is waited for after it."""
    plain, forward, backward, elements, overlapped = run(events, 2, True)[0]
    up_and_gate = ["product"] * 2
    assert forward == ["gather", "wait", *up_and_gate, "product", "scatter", "product", "scatter", "wait", "wait"]
    down = ["gather", "gather", "wait", "product", "wait", "product", "product"]
    gather_again, its_wait = "gather", "wait"  # gather_recompute.py
    assert backward == [*down, gather_again, *up_and_gate, "scatter", its_wait, *up_and_gate, "wait"]
    assert (plain.count("gather"), plain.count("scatter")) == (3, 2)  # one more each: the row's come in halves
    assert overlapped == elements


def test_order_with_whole_sequences():
    plain, forward, backward, elements, overlapped = run(events, 2, False)[0]
    up_and_gate = ["product"] * 2
    assert forward == [*up_and_gate, "product", "reduce", "product", "reduce", "wait", "wait"]
    assert backward == ["product", "product", *up_and_gate, "reduce", *up_and_gate, "wait"]
    assert plain.count("reduce") == 2
    assert overlapped == elements


def split_backward() -> list[tuple[list[str], list[str]]]:
    """Events of the two backward passes of a zero-bubble schedule, with and without sequence parallelism."""
    block, found = Block(), []
    for block.sequence_parallel in (True, False):
        x = drawn(block, whole_numbers, 2, 4, HIDDEN).requires_grad_()
        expected = outcome(block, x)
        block.zero_grad()
        output = block(x)
        gradient = drawn(block, whole_numbers, *output.shape)
        with Events() as inputs:
            (grad_x,), groups = stage_backward_input([output], [gradient], [x], block.parameters())
        with Events() as weights:
            stage_backward_weight(block.parameters(), groups)
        actual = {"x": grad_x, **{name: local(parameter.grad) for name, parameter in block.named_parameters()}}
        assert all(torch.equal(value, expected[name]) for name, value in actual.items())
        found.append((inputs.order, weights.order))
    return found


@pytest.mark.skipif(torch.__version__ < "2.13", reason="refused with it before torch 2.13")
def test_split_backward_multiplies_once():
    """Each pass computes what it is asked for; the weights' pass gathers the row's gradient once more."""
    by_parts, whole = run(split_backward, 2)[0]
    assert by_parts[0] == ["gather", "gather", *["product"] * 4, "scatter"]
    assert sorted(by_parts[1]) == [*["gather"] * 3, *["product"] * 3]
    assert whole == (["product"] * 3 + ["reduce"], ["product"] * 3)


def moved_by_checkpoints() -> list[int]:
    """Elements moved by a plain and by an overlapped checkpoint that stops recomputing as early as it can."""
    block, moved = Block(), []
    x = drawn(block, whole_numbers, 1, 4, HIDDEN).requires_grad_()
    for overlapped in (False, True):
        block.overlapped = overlapped
        with Events() as counted:
            checkpoint(block, x, use_reentrant=False).sum().backward()
        moved.append(counted.elements)
    return moved


def test_checkpoints_repeat_no_more_than_before():
    """Recomputing ends at the last product; the collective behind it is not repeated."""
    plain, overlapped = run(moved_by_checkpoints, 2)[0]
    assert overlapped == plain


def kept_elements() -> list[int]:
    """Elements that the graphs of the plain and of the overlapped path keep for the backward."""
    block, counts = Block(), []
    x = drawn(block, whole_numbers, 2, 4, HIDDEN).requires_grad_()
    for overlapped in (False, True):
        block.overlapped = overlapped
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            kept[tensor.data_ptr()] = tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = block(x)
        counts.append(sum(kept.values()))
        output.sum().backward()
    return counts


def test_keeps_no_more_than_before():
    """Of the gathered input its part, as in gather_recompute.py."""
    plain, overlapped = run(kept_elements, 2)[0]
    assert overlapped == plain


def freed() -> bool:
    """Are activations freed without the garbage collector when a graph is dropped, used or unused?"""
    gc.disable()
    block = Block()
    x = drawn(block, whole_numbers, 1, 4, HIDDEN).requires_grad_()
    for use in (lambda y: None, lambda y: y.sum().backward(), lambda y: torch.autograd.grad(y.sum(), x)):
        entered, (up, _) = enter_columns(x, [local(block.up), local(block.gate)], block.group, True)
        alive = [weakref.ref(entered.untyped_storage()), weakref.ref(up.gradient)]
        use(multiply_row_overlapped(multiply_columns(entered, up), local(block.down), block.group, True))
        assert all(reference() is not None for reference in alive)
        del entered, up, _
        assert all(reference() is None for reference in alive)
    return True


def test_nothing_outlives_the_graph():
    assert all(run(freed, 2))


def wait_for(path: Any) -> None:
    until = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < until, "rank 0 waited for a collective before it computed on"
        time.sleep(0.01)


def late_peer(folder: Any, sequence_parallel: bool) -> None:
    """Rank 1 joins each collective only when rank 0 has computed what is to overlap it."""
    block, rank = Block(), dist.get_rank()
    block.sequence_parallel = sequence_parallel
    second_product, weight_gradients = folder / "second", folder / "weights"
    leave = "start_reduce_scatter" if sequence_parallel else "start_all_reduce"
    start, started = getattr(overlap, leave), []

    def start_half(tensor: torch.Tensor, group: Any, *own: torch.Tensor) -> Started:
        started.append(tensor)
        if rank == 0 and len(started) == 2:
            second_product.touch()
        if rank == 1 and len(started) == 1:
            wait_for(second_product)
        return start(tensor, group, *own)

    def start_gradient(tensor: torch.Tensor, group: Any) -> Started:
        if rank == 1:
            wait_for(weight_gradients)
        return start(tensor, group)

    def compute(late: Any, computed: Any = late_gradients.LateGradient.compute) -> None:
        computed(late)
        if rank == 0:
            weight_gradients.touch()

    setattr(overlap, leave, start_half)
    setattr(late_gradients, leave, start_gradient)
    late_gradients.LateGradient.compute = compute  # type: ignore[method-assign]
    check_bitwise(block, drawn(block, whole_numbers, 2, 4, HIDDEN))
    assert len(started) == 2


@pytest.mark.clock
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_computes_while_a_peer_is_late(tmp_path, sequence_parallel):
    """Without overlap this would not end: rank 1 waits for what rank 0 computes during the collective."""
    run(late_peer, 2, tmp_path, sequence_parallel)


def changed_in_place() -> None:
    """Outputs of the overlapped layers, changed as the model may change those of a linear and of a collective."""
    block = Block()
    for block.sequence_parallel in (True, False):
        for shape in ((2, 3), (3,)):
            x = drawn(block, whole_numbers, *shape, HIDDEN).requires_grad_()
            weights = [local(block.up), local(block.gate)]
            entered, (up, gate) = enter_columns(x, weights, block.group, block.sequence_parallel)
            inner = multiply_columns(entered, up, local(block.bias)).mul_(2) + multiply_columns(entered, gate).mul_(2)
            output = multiply_row_overlapped(inner, local(block.down), block.group, block.sequence_parallel)
            output += x
            output.sum().backward()


def test_outputs_may_be_changed_in_place():
    """Falcon and BLOOM add their residual to the output of a region."""
    run(changed_in_place, 2)


def uncuttable() -> str:
    block = Block()
    x = torch.ones(1, 3, INNER // 2)
    with pytest.raises(ValueError, match="3 tokens .* 2 "):
        multiply_row_overlapped(x, local(block.down), block.group, True)
    y = multiply_row_overlapped(x.requires_grad_(), local(block.down), block.group, False)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
        grad.sum().backward()
    return ""


def test_refusals():
    """An odd sequence, and a second derivative, are errors and not wrong numbers."""
    run(uncuttable, 2)

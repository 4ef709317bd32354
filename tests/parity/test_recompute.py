"""Layers that run again, or keep on the host: the numbers of one process, and no product and no sum a second time."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_parallel import parallelize
from hf_parallel.axes import activation_offload
from tests import activations, loops, models
from tests.distributed import run
from tests.training import check_alone

WAYS = (
    "selective",
    "every:2",
    "selective,activation_offload=true",
    "none,activation_offload=true",
    "full,activation_offload=true",
)
SPECS = (
    "tp=2",
    "pp=2",
    "dp_shard=2",
    "tp=2,pp=2",
    "cp=2",
    "pp=2,pipeline_schedule=zbv_zero_bubble",
    "dp_shard=2,ep=2",
)


def trained(spec: str | None, model: str) -> list[float]:
    """Losses of steps that move the weights, of rows of 33 tokens, on this rank."""
    activation_offload.SMALL = 64  # bytes: nothing here is large
    built = models.build(model).train()
    if spec:
        parallelize(built, spec)
    return loops.losses(built, loops.rows(3, 4, 33))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spec", SPECS)
def test_numbers_of_one_process(spec, way):
    model = "deepseek_moe" if "ep=" in spec else "llama"
    check_alone(trained, f"{spec},activation_checkpointing={way}", model)


class Calls(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.name().partition(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def of_backward(spec: str, way: str) -> Counter[str]:
    """What the backward pass calls, on one rank."""
    model = models.build("llama").train()
    parallelize(model, f"{spec},activation_checkpointing={way},lean_loss=false")
    model.gradient_checkpointing_enable() if way != "none" else None  # as a Trainer does once more
    tokens = torch.arange(66).view(2, 33)
    loss = model(input_ids=tokens, labels=tokens).loss
    with Calls() as calls:
        loss.backward()
    return calls.names


def _products(calls: dict) -> int:
    """Of all ranks' parts at once, too."""
    return calls["aten::mm"] + calls.get("aten::bmm", 0)


@pytest.mark.parametrize(("spec", "world"), [("dp_shard=1", 1), ("tp=2", 2)])
def test_no_product_and_no_sum_runs_again(spec, world):
    plain, selective, full = (run(of_backward, world, spec, way)[0] for way in ("none", "selective", "full"))
    attention = next(name for name in full if "scaled_dot_product" in name and "backward" not in name)
    halves = 2 * 4 * (world - 1)  # products of a row-parallel layer's gradient, which comes in halves
    assert _products(selective) == _products(plain) + halves < _products(full)
    assert not {attention} & {*selective, *plain}
    sums = [kind.get("c10d::_reduce_scatter_base_", 0) for kind in (plain, selective, full)]
    assert world == 1 or sums[0] == sums[1] < sums[2], sums
    assert selective["aten::silu"] == full["aten::silu"] == 4  # layers


def test_every_second_layer_runs_again():
    """In the order of the whole model, also where a Trainer has switched all of them on."""
    silu = {way: run(of_backward, 1, "dp_shard=1", way)[0]["aten::silu"] for way in ("every:2", "every:3")}
    assert silu == {"every:2": 2, "every:3": 2}


@pytest.mark.parametrize("way", ["none", "selective", "full", "every:2"])
@pytest.mark.parametrize("tp", [1, 2])
def test_kept_bytes_are_those_of_the_planner(tp, way):
    """bf16, of two layers together; docs/activation_memory.md has the table."""
    expected = activations.planned(tp, way)
    for measured in run(activations.kept_by_layers, tp, f"tp={tp}", way):
        assert measured == pytest.approx(expected, rel=0.05)

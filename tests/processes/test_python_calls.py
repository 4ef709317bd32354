"""Calls of Python in a step, which small layers on a GPU wait for: beside programs by hand of the libraries below."""

import sys
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hf_parallel import parallelize
from tests import models
from tests.distributed import run

#: Layers of the two models whose difference is counted.
FEW, MORE = 2, 4
STEPS = 5  # what ranks compare in the first four is over


def shard_by_hand(model, **settings):
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)), **settings)


def split_by_hand(model):
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    plan = {**dict.fromkeys(columns, ColwiseParallel()), "self_attn.o_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, init_device_mesh("cpu", (2,)), {**plan, "mlp.down_proj": RowwiseParallel()})


#: A layout, the same by hand, and the most calls beside it: ours of tp work on local tensors, DTensors' on DTensors.
PAIRS: dict[str, tuple[Callable, float]] = {
    "dp_shard=2": (shard_by_hand, 1.1),
    "dp_shard=2,zero_stage=2": (lambda model: shard_by_hand(model, reshard_after_forward=False), 1.1),
    "tp=2,sequence_parallel=false": (split_by_hand, 0.15),
}


def count_calls(layers: int, spec: str | None, by_hand: Callable | None = None) -> tuple[int, dict[str, int]]:
    """How many calls a step of SGD makes, and which of our functions went through modules by `named_modules`."""
    model = models.build("llama", num_hidden_layers=layers).train()
    if by_hand is None:
        parallelize(model, spec)
    else:
        by_hand(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, foreach=by_hand is not split_by_hand)
    ids = torch.arange(64).view(2, 32) % models.VOCABULARY
    calls, walks = Counter[str](), Counter[str]()

    def note(frame, event, _):
        if event == "call":
            name, asker = frame.f_code.co_name, frame.f_back
            calls[name] += 1
            while name == "named_modules" and asker.f_code.co_filename == frame.f_code.co_filename:
                asker = asker.f_back
            if name == "named_modules" and asker.f_globals["__name__"].startswith("hf_parallel."):
                walks[asker.f_code.co_name] += 1

    for number in range(STEPS):
        sys.setprofile(note if number == STEPS - 1 else None)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        sys.setprofile(None)
        optimizer.zero_grad()
    return sum(calls.values()), dict(walks)


def calls_of_a_layer(*how) -> float:
    few, more = (run(count_calls, 2, layers, *how)[0][0] for layers in (FEW, MORE))
    return (more - few) / (MORE - FEW)


@pytest.mark.parametrize("spec", PAIRS)
def test_a_layer_makes_as_few_calls_as_by_hand(spec):
    by_hand, most = PAIRS[spec]
    ours, theirs = calls_of_a_layer(spec), calls_of_a_layer(None, by_hand)
    assert ours <= most * theirs, (ours, theirs)


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2"])
def test_modules_are_not_walked_in_each_step(spec):
    """`named_modules` calls itself for each module and the modules around it."""
    for _, walks in run(count_calls, 2, MORE, spec):
        assert walks == {}

"""Room for so many tokens per expert: the same are dropped as in one plain process; their share is logged."""

import functools
import math
from typing import Any

import pytest
import torch

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.plans.resolve import read_model, resolve
from tests import models
from tests.distributed import run, run_alone_once
from tests.training import axes, none

FACTOR = 0.75
ROWS, LENGTH, STEPS = 4, 33, 2


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 515, (ROWS, LENGTH), generator=torch.Generator().manual_seed(40 + step))


def dropping(count: int, found: list[tuple[int, int]], module: Any, args: tuple) -> tuple:
    """Token by token, in plain Python."""
    hidden, index, weights = args
    room, taken, kept = math.ceil(FACTOR * index.numel() / count), [0] * count, torch.ones_like(weights)
    for token, experts in enumerate(index.tolist()):
        for place, expert in enumerate(experts):
            kept[token, place] = float(taken[expert] < room)
            taken[expert] += 1
    found.append((int((kept == 0).sum()), kept.numel()))
    return hidden, index, weights * kept


def trained(name: str, spec: str | None) -> dict[str, Any]:
    """Losses, norms and weights of two steps, and the share that was dropped."""
    import hf_parallel
    from hf_parallel.axes.experts.balance import LOAD
    from hf_parallel.model.experts import iterate_experts, read_expert_facts

    model, ranks, place, found = models.build(name), 1, 0, list[tuple[int, int]]()
    model.train()
    if spec is None:
        for _, module in iterate_experts(model):
            module.register_forward_pre_hook(functools.partial(dropping, read_expert_facts(module).count, found))
    else:
        hf_parallel.parallelize(model, f"{spec},expert_capacity_factor={FACTOR}")
        mesh = model._hf_parallel.mesh
        ranks, place = mesh.data_size, mesh.data_rank
    optimizer, logs = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(STEPS):
        own = batch(step).chunk(ranks)[place]
        loss = model(input_ids=own, labels=own).loss
        loss.backward()
        logs.append((loss.item(), float(hf_parallel.clip_grad_norm(model, 1e9))))
        optimizer.step()
        optimizer.zero_grad()
    whole = hf_parallel.full_state_dict(model) if spec else model.state_dict()
    share = (
        sum(n for n, _ in found) / sum(n for _, n in found) if found else getattr(model, LOAD).read()["expert_dropped"]
    )
    return {"logs": logs, "weights": {k: v.clone() for k, v in whole.items()}, "dropped": share}


@pytest.mark.parametrize(
    ("name", "spec"),
    [
        ("mixtral", "dp_shard=4,ep=2"),
        ("deepseek_moe", "dp_shard=2,ep=2"),
        ("mixtral", "tp=2,dp_shard=2,ep=4,sequence_parallel=false"),
        ("mixtral", "dp_replicate=2,dp_shard=2"),
        ("deepseek_moe", "tp=2,sequence_parallel=false"),
    ],
)
def test_same_tokens_are_dropped(name, spec):
    """fp32 sums in another order: relative 1e-5 of losses and norms, 1e-6 of weights."""
    alone, ranks = run_alone_once(trained, name, None), run(trained, axes(spec)["world"], name, spec)
    found = []
    for step, (loss, norm) in enumerate(alone["logs"]):
        ours = sum(rank["logs"][step][0] for rank in ranks) / len(ranks)
        theirs = ranks[0]["logs"][step][1]
        found += [f"step {step}: {a} {b}" for a, b in ((ours, loss), (theirs, norm)) if abs(a - b) > 1e-5 * b]
    weights = ranks[0]["weights"]
    found += [key for key, value in alone["weights"].items() if (weights[key] - value).abs().max() > 1e-6]
    none(found)
    assert alone["dropped"] > 0.05
    assert all(rank["dropped"] == pytest.approx(alone["dropped"], abs=1e-6) for rank in ranks)


@pytest.mark.parametrize("spec", ["tp=2", "cp=2,ep=2", "pp=2,dp_shard=2,ep=2"])
def test_as_many_are_dropped(spec):
    """Where ranks hold parts of rows, or run parts of batches, others are dropped, of the same room."""
    alone = run_alone_once(trained, "mixtral", None)
    for rank in run(trained, axes(spec)["world"], "mixtral", spec):
        assert rank["dropped"] == pytest.approx(alone["dropped"], rel=0.2)
        assert [loss for loss, _ in rank["logs"]] == pytest.approx([loss for loss, _ in alone["logs"]], rel=0.05)


@pytest.mark.parametrize(
    ("name", "spec", "said"),
    [
        ("llama", "expert_capacity_factor=1", "_factor=1: LlamaForCausalLM has no experts .* leave it out"),
        ("mixtral", "expert_capacity_factor=0", "expert_capacity_factor=0: leaves no room for a token; .*=1.25 works"),
    ],
)
def test_refused(name, spec, said):
    with pytest.raises(ValueError, match=said):
        resolve(config := ParallelConfig.parse(f"dp_shard=2,{spec}"), read_model(models.build(name), config))

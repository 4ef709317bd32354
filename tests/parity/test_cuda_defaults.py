"""What CUDA takes by default, forced on the CPU, in a stranger's loop without Trainer and Accelerator, on all layouts.

There foreach is the default of optimizers, norms and clipping; loops ask for fused. Lists of a parallel model's
tensors hold DTensors of several meshes beside plain ones, and under a pipeline those of one stage.
"""

import copy
import io
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import hf_parallel
from tests import models
from tests.distributed import run, run_alone
from tests.loops import rows
from tests.training import axes, check_numbers

SPECS = (
    "tp=2",
    "pp=2",
    "cp=2",
    "dp_shard=2",
    "dp_replicate=2",
    "dp_shard=2,ep=2",
    "tp=2,pp=2",
    "dp_shard=2,tp=2",
    "dp_shard=2,pp=2",
    "dp_shard=2,ep=2,pp=2",
)
STEPS = 3
KINDS = ("foreach", "fused")


def trained(spec: str | None) -> dict[str, list[float]]:
    """Losses and norms of loops that clip, store and read states; the loss of averaged weights."""
    if spec:
        hf_parallel.activate(spec)
    return {kind: _loop(spec, kind) for kind in KINDS}


def _loop(spec: str | None, kind: str) -> list[float]:
    model = models.build("deepseek_moe" if spec and "ep=" in spec else "llama", num_hidden_layers=2)
    if spec:
        hf_parallel.parallelize(model, spec)
    by_torch = kind == "foreach"
    average: Any = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5)) if by_torch else copy.deepcopy(model)
    optimizer = _optimizer(model.train(), kind)
    seen = []
    for step, batch in enumerate(rows(STEPS, 4, 33)):
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        # The largest number is clamped, then the norm is scaled.
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05, foreach=True)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, error_if_nonfinite=True, foreach=True)
        seen += [loss.item(), float(norm)]
        optimizer.step()
        optimizer.zero_grad()
        if by_torch:
            average.update_parameters(model)
        else:
            _update(average, model)
        if step == 1:
            optimizer = _stored_and_read(optimizer, _optimizer(model, kind))
    with torch.no_grad():
        seen.append(average.eval()(input_ids=batch, labels=batch).loss.item())
    return seen


@torch.no_grad()
def _update(average, model):
    for mean, now in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(now, 0.5)


def _optimizer(model, kind):
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, **{kind: True})


def _stored_and_read(former, new):
    """As a script does with a file of each rank."""
    file = io.BytesIO()
    torch.save(former.state_dict(), file)
    file.seek(0)
    new.load_state_dict(torch.load(file, weights_only=False))
    return new


@pytest.fixture(scope="module")
def expected():
    return {name: run_alone(_of_one, name) for name in ("llama", "deepseek_moe")}


def _of_one(name: str) -> dict[str, list[float]]:
    build = models.build
    models.build = lambda _, **changes: build(name, **changes)
    return trained(None)


@pytest.mark.parametrize("spec", SPECS)
def test_a_strangers_loop(expected, spec):
    """All ranks have the same rows, so the mean over data ranks is that of one."""
    theirs = expected["deepseek_moe" if "ep=" in spec else "llama"]
    ranks = run(trained, axes(spec)["world"], spec, init=False)
    for kind in KINDS:  # fp32 sums in another order, through three steps that change the loss by 1e-1
        check_numbers([found[kind] for found in ranks], theirs[kind], 2e-5)

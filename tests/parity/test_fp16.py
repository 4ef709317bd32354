"""fp16 with a scaled loss, where gradients of an unscaled one would vanish. accelerate has none on CPUs: loops."""

import os
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn

from hf_parallel import parallelize
from hf_parallel.hooks import loss_scales
from hf_parallel.hooks.loss_scales import MeshGradScaler
from hf_parallel.ranks.mesh import get_stored
from tests import models
from tests.distributed import run, run_alone_once
from tests.training import FP16, activate, axes, check_numbers

FAINT = 1e-6  # of the usual loss: gradients of logits are then around fp16's smallest numbers


def steps(spec: str | None, scale: float, own: bool = False) -> tuple[list[float], float]:
    """Three steps under autocast; the losses and the last scale. `own`: with a scaler that a loop makes itself."""
    model = models.build("llama").train()
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    if spec:
        parallelize(model, spec)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale) if own else MeshGradScaler("cpu", init_scale=scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / FAINT)
    tokens = torch.randint(0, models.VOCABULARY, (8, 16), generator=torch.Generator().manual_seed(5))
    losses = []
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(input_ids=tokens, labels=tokens, num_items_in_batch=120 / FAINT).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item() / FAINT)
    return losses, scaler.get_scale()


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "pp=2", "tp=2,pp=2", "pp=2,dp_shard=2"])
def test_faint_losses_train(spec, own):
    expected = run_alone_once(steps, None, 2.0**18)[0]
    assert expected[2] < expected[0] - 0.05
    losses, scales = zip(*run(steps, axes(spec)["world"], spec, 2.0**18, own), strict=True)
    check_numbers(losses, expected, FP16)
    assert set(scales) == {2.0**18}


def test_a_model_of_one_rank_does_not_hide_one_of_several(monkeypatch):
    """All ranks are asked for overflows, although the process has kept a model that it alone has trained."""
    states = [SimpleNamespace(mesh=SimpleNamespace(config=SimpleNamespace(world_size=n), device=n)) for n in (1, 2)]
    asked = []
    monkeypatch.setattr(loss_scales, "list_parallel_models", lambda: states)
    monkeypatch.setattr(loss_scales, "state_of", lambda model: model)
    monkeypatch.setattr(loss_scales, "_find_on_all_ranks", lambda found, device: asked.append(device))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))])
    loss_scales.unscale_grads(lambda *args: {}, torch.amp.GradScaler("cpu"), optimizer)
    assert asked == [2]


@pytest.mark.parametrize("spec", ["pp=2", "tp=2,pp=2"])
def test_all_ranks_skip_a_step_that_overflows(spec):
    for losses, scale in run(steps, axes(spec)["world"], spec, 2.0**60):
        assert losses[0] == losses[1] == losses[2]
        assert scale == 2.0**57


def overflowing(spec: str | None, fused: bool = False) -> tuple[list[float], list[float]]:
    """Losses and scales of five steps; in the second, one number of one rank's gradients is infinite."""
    model = models.build("llama").train()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    rank, size, share = 0, 1, slice(None)
    if spec:
        mesh = parallelize(model, spec)._hf_parallel.mesh
        scaler = MeshGradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        rank, size = dist.get_rank(), mesh.data_size
        share = slice(mesh.data_rank * 8 // size, (mesh.data_rank + 1) * 8 // size)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if fused:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-2, fused=True)
    tokens = torch.randint(0, models.VOCABULARY, (8, 17), generator=torch.Generator().manual_seed(5))[share]
    losses, scales = [], []
    for step in range(5):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = model(input_ids=tokens, labels=tokens, num_items_in_batch=128).loss * size
        scaler.scale(loss).backward()
        if step == 1 and rank == (dist.get_world_size() - 1 if spec else 0):
            gradient = dict(model.named_parameters())["model.layers.3.mlp.down_proj.weight"].grad
            getattr(gradient, "_local_tensor", gradient)[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        total = loss.detach() / size**2
        if size > 1:
            dist.all_reduce(total, group=mesh.sharing_mesh.get_group())
        losses.append(total.item() * size)
        scales.append(scaler.get_scale())
    return losses, scales


OVERFLOWS = [(spec, False) for spec in ("dp_shard=2", "tp=2", "pp=2", "tp=2,dp_shard=2", "pp=2,dp_shard=2")]
OVERFLOWS += [("tp=2", True), ("pp=2", True)]


@pytest.mark.parametrize(("spec", "fused"), OVERFLOWS)
def test_one_rank_overflows_and_all_skip(spec, fused):
    """The scale is that of one process, in each step: it is halved, and grows again after two good steps."""
    expected, scales = run_alone_once(overflowing, None, fused)
    assert scales == [2.0**10, 2.0**9, 2.0**9, 2.0**10, 2.0**10]
    losses, ours = zip(*run(overflowing, axes(spec)["world"], spec, fused), strict=True)
    assert all(each == scales for each in ours)
    check_numbers(losses, expected, FP16)


def test_fused_optimizers_skip_together():
    """They look for overflows by themselves, at this rank's gradients."""

    def step():
        torch.manual_seed(0)
        model, scaler = parallelize(nn.Linear(5, 4), "dp_shard=2"), MeshGradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        former = model.weight.detach().full_tensor().clone()
        for overflows in (True, False):
            scaler.scale(model(torch.ones(2, 5)).sum()).backward()
            if overflows and dist.get_rank() == 1:
                model.weight.grad.to_local().fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            assert torch.equal(model.weight.full_tensor(), former) == overflows
            assert scaler.get_scale() == 4.0
        return model.weight.full_tensor()

    first, second = run(step, 2)
    assert torch.equal(first, second)


def prepared_scaler(fold: bool) -> dict:
    """What `prepare` makes of the scaler of an Accelerator that was made before the layout."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=7, enabled=fold)
    activate("dp_shard=2")
    model = accelerator.prepare(models.build("llama"))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    same = optimizer.scaler is accelerator.scaler
    return {**accelerator.scaler.state_dict(), "kind": type(accelerator.scaler).__name__, "same": same}


def test_prepare_shares_the_scale():
    for found in run(prepared_scaler, 2, True, init=False):
        assert (found["kind"], found["scale"], found["growth_interval"]) == ("MeshGradScaler", 16.0, 7)
        assert found["same"]
    assert {found["kind"] for found in run(prepared_scaler, 2, False, init=False)} == {"GradScaler"}


def step_by_hand(spec: str | None) -> list[float]:
    """A loop with torch's own scaler, whose first step overflows in the embedding alone; losses, norms and scales."""
    activate(spec)
    accelerator = Accelerator(cpu=True)
    model = models.build("llama").train()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler, found = torch.amp.GradScaler("cpu", init_scale=1024.0), []
    tokens = torch.randint(0, models.VOCABULARY, (4, 33), generator=torch.Generator().manual_seed(5))
    for number in range(3):
        loss = model(input_ids=tokens, labels=tokens).loss
        scaler.scale(loss).backward()
        gradient = dict(model.named_parameters()).get("model.embed_tokens.weight", torch.empty(0)).grad
        if number == 0 and gradient is not None and os.environ.get("RANK", "0") == "0":
            with torch.no_grad():
                get_stored(gradient)[0, 0] = float("inf")
        if number > 0:
            scaler.unscale_(optimizer)
            found.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found += [loss.item(), scaler.get_scale()]
    accelerator.end_training()
    return found


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "pp=2", "tp=2,dp_shard=2"])
def test_a_scaler_that_the_loop_makes(spec):
    """Ranks of no overflow skip the step, too."""
    alone = run_alone_once(step_by_hand, None)
    assert alone[1] == 512.0
    check_numbers(run(step_by_hand, axes(spec)["world"], spec, init=False), alone)

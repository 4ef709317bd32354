"""Dropout under tensor parallelism: other masks where ranks hold other values, the same where they hold the same."""

import pytest
import torch

from hf_parallel import parallelize
from tests import models
from tests.distributed import run

DROPPING = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5, "attn_implementation": "eager"}


def masks(spec: str) -> dict[str, list]:
    """Where the dropouts of GPT-2 dropped in one step, and the random number after it."""
    model = parallelize(models.build("gpt2", **DROPPING), spec).train()
    backbone, seen = model.transformer, {}
    watched = {
        "embedding": backbone.drop,
        "attention": backbone.h[0].attn.attn_dropout,
        "residual": backbone.h[0].mlp.dropout,
        "next layer": backbone.h[1].mlp.dropout,
    }
    for name, module in watched.items():
        module.register_forward_hook(lambda _, __, output, name=name: seen.__setitem__(name, (output == 0).tolist()))
    torch.manual_seed(3)
    tokens = torch.arange(32).view(2, 16)
    model(input_ids=tokens, labels=tokens).loss.backward()
    return {**seen, "after": torch.rand(4).tolist()}


@pytest.mark.parametrize(
    ("spec", "differ"),
    [("tp=2", {"attention", "residual", "next layer"}), ("tp=2,sequence_parallel=false", {"attention"})],
)
def test_masks_differ_where_ranks_hold_other_values(spec, differ):
    first, second = run(masks, 2, spec)
    for name in first:
        assert (first[name] != second[name]) == (name in differ), name
    assert first["residual"] != first["next layer"]


def gradients(spec: str, checkpointing: bool) -> list[float]:
    """Sums of GPT-2's gradients after two steps with dropout."""
    model = parallelize(models.build("gpt2", **DROPPING), spec).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    torch.manual_seed(3)
    tokens = torch.arange(32).view(2, 16)
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
    local = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in model.parameters()]
    return [gradient.double().abs().sum().item() for gradient in local]


@pytest.mark.parametrize("spec", ["tp=2", "tp=2,sequence_parallel=false"])
def test_recomputed_layers_drop_what_they_dropped(spec):
    """Other masks in the recomputation would change gradients by far more than rounding."""
    for whole, recomputed in zip(run(gradients, 2, spec, False), run(gradients, 2, spec, True), strict=True):
        assert recomputed == pytest.approx(whole, rel=1e-5)


def replicas(spec: str) -> tuple[float, list[float]]:
    model = parallelize(models.build("gpt2", **DROPPING), spec).train()
    tokens = torch.arange(30).view(2, 15)
    torch.manual_seed(3)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    norms = [p.grad for name, p in model.named_parameters() if "ln_" in name]
    return loss.item(), [norm.double().sum().item() for norm in norms]


@pytest.mark.parametrize("spec", ["tp=2", "tp=2,sequence_parallel=false"])
def test_replicated_weights_stay_equal(spec):
    first, second = run(replicas, 2, spec)
    assert first == second

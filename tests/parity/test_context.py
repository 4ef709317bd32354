"""Sequences over cp ranks: loss, gradient norm, gradients and weights of one process, whoever holds which tokens."""

import pytest

from tests.context import all_steps, differences
from tests.distributed import run, run_alone
from tests.training import Script, axes, none


def check(*cases: tuple) -> None:
    """All cases have one number of ranks, and share their processes."""
    alone = run_alone(all_steps, list(cases), False)
    ranks = run(all_steps, axes(cases[0][2])["world"], list(cases), True)
    none(differences(list(cases), ranks, alone))


VARIANTS = {2: ("ring", "ulysses", "allgather"), 4: ("ring", "ulysses", "allgather", "hybrid:2")}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "gemma3", "gpt2", "bert"])
def test_variants(name, size):
    """33 tokens of padded rows and of packs; two key/value heads on four ranks."""
    kinds = ("classes", "classes") if name == "bert" else ("padded", "packed")
    cases = [
        (name, kind, f"cp={size},context_parallel={variant}", True, {})
        for variant, kind in zip(VARIANTS[size], kinds * 2, strict=False)
    ]
    check(*cases)


@pytest.mark.parametrize(
    "spec",
    ["cp=2,tp=2", "cp=2,pp=2", "cp=2,tp=2,sequence_parallel=false", "cp=2,pp=2,pipeline_schedule=zbv_zero_bubble"],
)
def test_with_other_axes(spec):
    """Heads are split by tp first; what travels between stages is a cp rank's part."""
    check(*[("llama", kind, f"{spec},context_parallel=ring", True, {}) for kind in ("plain", "packed")])


@pytest.mark.parametrize("spec", ["cp=2,dp_shard=2", "cp=2,pp=2,tp=2"])
def test_a_trainer_script(runs, spec):
    """Evaluation, prediction and saving too; rows of unequal length, some without a label at a boundary."""
    runs.check(Script(uneven_lengths=True), spec)


@pytest.mark.parametrize("spec", ["cp=2,dp_shard=2", "cp=2,pp=2"])
def test_a_scripts_own_loss(runs, spec):
    """It reads logits of all tokens in their order, while it gives the labels to the model besides."""
    runs.check(Script(overrides=True), spec)


def test_a_loss_that_couples_tokens():
    check(*[("llama", "plain", f"cp=2,context_parallel={v}", False, {}) for v in ("ring", "ulysses")])


@pytest.mark.parametrize("spec", ["cp=2", "cp=2,pp=2"])
def test_recomputed_layers(spec):
    """A pack at a boundary between ranks, once more in the backward pass."""
    check(("llama", "packed", f"{spec},context_parallel=ring", True, {"checkpointed": True}))


def test_what_blocks_cannot_do():
    """Scores with a soft cap, on Ulysses; odd numbers of heads, layers and tokens, in a ring."""
    check(
        ("gemma2", "packed", "cp=2", True, {}),
        ("llama", "padded", "cp=2", True, {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}),
    )

"""The auxiliary loss of experts under `pp`: that of all layers, rows and micro-batches, with the gradient of each."""

import pytest

from tests.adapters import lora
from tests.context import all_steps, differences
from tests.distributed import run, run_alone
from tests.training import Script, axes, none


@pytest.mark.parametrize(
    ("spec", "changes"),
    [
        ("pp=4", {}),
        ("tp=2,pp=2", {"length": 15}),
        ("pp=2,dp_shard=2,ep=2", {"uneven_lengths": True}),
        ("pp=2,pipeline_schedule=zbv_zero_bubble", {"arguments": (("gradient_checkpointing", True),)}),
        ("pp=2,dp_shard=2", {"overrides": True, "arguments": (("max_grad_norm", 0.1),)}),
    ],
)
def test_a_trainer_script(runs, spec, changes):
    """Data ranks bring unlike numbers of rows; evaluation has the loss too, a loss of the script's own has none."""
    runs.check(Script(model="mixtral_balanced", **changes).with_accumulation(2), spec)


@pytest.mark.parametrize("spec", ["pp=2,dp_shard=2", "pp=2,dp_shard=2,ep=2"])
def test_a_ragged_batch(runs, spec):
    """Three rows of eight: the one that fills a data rank's four counts no more than the rank that has none."""
    runs.check(Script(model="mixtral_balanced", rows=11), spec)


@pytest.mark.parametrize("spec", ["pp=2,cp=2,ep=2", "pp=2,tp=2"])
def test_parts_of_sequences(spec):
    """33 tokens, of which padding does not count; a stage without experts."""
    sparse = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    cases = [
        ("mixtral_balanced", "padded", spec, True, {}),
        ("mixtral_balanced", "packed", spec, True, {}),
        ("qwen3_moe", "padded", f"{spec},pipeline_split=[1,3]", True, sparse),
    ]
    alone = run_alone(all_steps, cases, False)
    none(differences(cases, run(all_steps, axes(spec)["world"], cases, True), alone))


def test_adapters(runs):
    """The last stage has none: gradients come through what routers chose on others alone, and through the loss."""
    adapted = lora(("o_proj",), target_parameters=("mlp.gate.weight",), layers_to_transform=(0, 1))
    runs.check(Script(model="mixtral_balanced", lora=adapted).with_accumulation(2), "pp=2,dp_shard=2")

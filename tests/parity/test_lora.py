"""LoRA scripts, unchanged: adapters put on a base that is sharded already train and are saved as in one process.

The runs are those of test_trainer.py: loss, gradient norm, set of gradients, evaluation, prediction, adapter folder.
"""

import pytest

from tests.training import Script, layouts

pytest.importorskip("peft")

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ENDS = ("embed_tokens", "lm_head")
SPECS = (
    "dp_shard=2",
    "dp_replicate=2",
    "tp=2",
    "pp=2",
    "dp_replicate=2,dp_shard=2",
    "tp=2,dp_shard=2",
    "pp=2,dp_shard=2",
    "tp=2,pp=2",
)
CHECKPOINTED = (("gradient_checkpointing", True),)


def lora(targets, **settings):
    """The script with adapters whose B does not start at zero: both halves then have gradients in the first step."""
    chosen = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "target_modules": targets, **settings}
    return tuple(chosen.items())


@pytest.mark.parametrize("model", ["llama", "qwen3"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("spec", layouts("LoRA", *SPECS))
def test_all_linear_layers(runs, model, accumulation, spec):
    script = Script(model=model, lora=lora("all-linear")).with_accumulation(accumulation)
    runs.check(script, spec)


@pytest.mark.parametrize("model", ["llama", "qwen3"])
@pytest.mark.parametrize("spec", layouts("LoRA", *SPECS))
def test_embedding_and_head_with_checkpointing(runs, model, spec):
    runs.check(Script(model=model, lora=lora(ATTENTION + MLP + ENDS), arguments=CHECKPOINTED), spec)

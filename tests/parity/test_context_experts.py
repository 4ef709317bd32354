"""Mixtures of experts over cp ranks, whose tokens travel to experts on other ranks, and what balances them."""

import pytest

from tests.adapters import lora
from tests.context import all_steps, differences
from tests.distributed import run, run_alone
from tests.resuming import STEPS, STOP, log_differences, trained
from tests.training import Script, axes, none


def check(spec: str, *cases: tuple[str, str, bool]) -> None:
    """Two steps of each (model, kind of batch, the model's own loss?), in one set of processes."""
    made = [(model, kind, spec, own, {}) for model, kind, own in cases]
    alone = run_alone(all_steps, made, False)
    none(differences(made, run(all_steps, axes(spec)["world"], made, True), alone))


@pytest.mark.support("experts, odd rows")
@pytest.mark.parametrize(
    "spec",
    [
        "cp=2,ep=2",
        "cp=2,tp=2,ep=4",
        "cp=2",
        "cp=2,tp=2",
        "cp=2,pp=2,ep=2",
        "cp=2,tp=2,ep=4,sequence_parallel=false",
        "cp=4,ep=4,context_parallel=ring",
        "dp_replicate=2,cp=2,ep=2",
    ],
)
def test_odd_rows(spec):
    """Padded rows and packs of 33 tokens; a loss of the script's own."""
    check(spec, ("mixtral", "padded", True), ("qwen3_moe", "packed", True), ("qwen3_moe", "plain", False))


@pytest.mark.support("experts, Trainer")
@pytest.mark.parametrize(("model", "overrides"), [("mixtral", True), ("qwen3_moe", False)])
@pytest.mark.parametrize(
    "spec",
    [
        "cp=2,dp_shard=2,ep=4",
        "cp=2,dp_shard=2,ep=2",
        "cp=2,tp=2,ep=4",
        "dp_replicate=2,cp=2,ep=2",
        "cp=2,dp_shard=2,tp=2,ep=4",
        "cp=2,dp_shard=2,pp=2,ep=4",
    ],
)
def test_a_trainer_script(runs, model, overrides, spec):
    """Data ranks bring unlike numbers of rows of unlike length; the norm that clips counts each expert once.

    A loss of the script's own makes passes through a pipeline, as many on all ranks whose tokens meet at experts.
    """
    script = Script(model=model, overrides=overrides, uneven_lengths=True, arguments=(("max_grad_norm", 0.1),))
    runs.check(script.with_accumulation(2), spec)


@pytest.mark.parametrize("spec", ["cp=2", "cp=2,tp=2,ep=4", "dp_shard=2"])
def test_balance(spec):
    """The auxiliary loss of whole rows, without their padding; every parameter has its gradient."""
    check(spec, ("mixtral_balanced", "padded", True), ("mixtral_balanced", "packed", True))


@pytest.mark.support("experts, balance")
@pytest.mark.parametrize("spec", ["cp=2,dp_shard=2", "cp=2,dp_shard=2,ep=4"])
def test_balance_over_all_rows(runs, spec):
    """Over the rows of all data ranks, each in parts on cp ranks, in each micro-batch."""
    runs.check(Script(model="mixtral_balanced", uneven_lengths=True).with_accumulation(2), spec)


ADAPTED = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight")


@pytest.mark.support("experts, LoRA")
@pytest.mark.parametrize("spec", ["cp=2,ep=2", "cp=2", "cp=2,dp_shard=2,ep=4", "cp=2,tp=2,ep=4"])
def test_adapters(runs, spec):
    """Of experts and routers, beside those of attention."""
    script = Script(model="qwen3_moe", lora=lora(("o_proj",), target_parameters=ADAPTED))
    runs.check(script.with_accumulation(2), spec)


def test_goes_on_over_other_ranks(runs, tmp_path):
    """Optimizer states of experts too. 2e-5: two more AdamW steps, as where other layouts resume each other."""
    folder = runs.initial("mixtral")
    former = trained("dp_shard=2,ep=2", {"folder": folder, "out": str(tmp_path / "former")})[0]
    job = {"folder": folder, "out": str(tmp_path / "later"), "resume": f"{former.folder}/checkpoint-{STOP}"}
    none(log_differences(trained("cp=2,ep=2", job)[0], former, range(STOP + 1, STEPS + 1), 2e-5))

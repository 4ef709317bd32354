"""`use_liger_kernel=True` under layouts: numbers of one process without it."""

import inspect
import types
from functools import partial
from unittest import mock

import pytest
from transformers import AutoModelForCausalLM

from tests import liger, models, training
from tests.distributed import run, run_alone
from tests.loops import losses, rows
from tests.training import Script, Tolerance, axes, check_numbers, differences, none, pairs

LIGER = Script(model="qwen3", arguments=(("use_liger_kernel", True),))
#: With its own loss, in one with the head.
FUSED = ("dp_shard=2", "dp_replicate=2", "dp_shard=2,pp=2", "pp=2")
OTHER = ("tp=2", "tp=2,sequence_parallel=false", "tp=2,pp=2", "dp_shard=2,tp=2", "cp=2", "tp=4")


def with_stand_ins(spec: str, script: Script, initial: str, out: str) -> tuple[object, set[str]]:
    """One rank's training, and which kernels it called."""
    with liger.stand_ins():
        return training.train_rank(spec, script, initial, out), set(liger.used)


@pytest.mark.parametrize("spec", [*FUSED, *OTHER])
def test_numbers_of_one_process_without_it(runs, spec):
    """Weight gradients of norms are sums over parts of the sequence; queries and keys have norms of their own."""
    call = partial(with_stand_ins, f"{spec},lean_loss=false", LIGER, runs.initial(LIGER.model), runs._folder())
    ranks = run(call, axes(spec)["world"], init=False)
    reference = runs.reference(Script(model=LIGER.model))
    none(differences([outcome for outcome, _ in ranks], reference, Tolerance()))
    assert set().union(*(used for _, used in ranks)) == {"norm", "mlp", "rope"} | ({"lce"} if spec in FUSED else set())


CHECKPOINTED = (("gradient_checkpointing", True), ("bf16", True))
MORE = {
    "checkpointing": (Script(model="llama", arguments=(*LIGER.arguments, *CHECKPOINTED)), training.BF16),
    "mixture": (Script(model="mixtral", arguments=LIGER.arguments), Tolerance()),
    "adapters": (
        Script(model="llama", lora=(("r", 4), ("target_modules", ("q_proj", "down_proj"))), arguments=LIGER.arguments),
        Tolerance(),
    ),
}
LAYOUTS = {"checkpointing": "tp=2 pp=2", "mixture": "tp=2 dp_shard=2,ep=2", "adapters": "tp=2"}


@pytest.mark.parametrize(
    ("what", "spec"),
    pairs(LAYOUTS),
)
def test_beside_other_settings(runs, what, spec):
    """Kernels of whole experts are left out where these are split; adapters call a split layer's kernel as well."""
    script, tolerance = MORE[what]
    call = partial(with_stand_ins, spec, script, runs.initial(script.model), runs._folder())
    ranks = run(call, axes(spec)["world"], init=False)
    plain = {name: value for name, value in script.arguments if name != "use_liger_kernel"}
    reference = runs.reference(Script(**{**vars(script), "arguments": tuple(plain.items())}))
    none(differences([outcome for outcome, _ in ranks], reference, tolerance))
    assert {"norm", "rope"} <= set().union(*(used for _, used in ranks))


# ---- Liger itself -------------------------------------------------------------------------------------------------


def trained(spec: str | None, folder: str) -> tuple[list[float], list[str]]:
    """Losses of two steps of two rows of 5 tokens, with Liger's own kernels in a layout, and the notes of this."""
    import hf_parallel

    model = models.build("qwen3").train()
    if spec is None:
        return losses(model, rows(2, 2, 5)), []
    with liger.installed():
        import transformers.trainer

        hf_parallel.activate(spec)
        hf_parallel.parallelize(model, spec)
        transformers.trainer.apply_liger_kernel(model, None)
        return losses(model, rows(2, 2, 5)), model._hf_parallel.notes


@pytest.mark.skipif(not liger.available, reason="liger-kernel and triton are not installed")
@pytest.mark.parametrize("spec", ["tp=2", "dp_shard=2", "pp=2"])
def test_its_own_kernels(spec, tmp_path):
    """All rows on every rank: the mean over data ranks is that of one."""
    expected, _ = run_alone(trained, None, str(tmp_path))
    found, notes = zip(*run(trained, 2, spec, str(tmp_path), init=False, timeout=240), strict=True)
    check_numbers(found, expected)
    for said in notes:
        assert any("the layout's own loss" in note for note in said) == ("tp" in spec)


# ---- kernels of the Hub -------------------------------------------------------------------------------------------


def kernelize(model, mode=None):
    """As that of `kernels`: it compares arguments with those of the module's class, and puts a bound forward on it."""
    for module in model.modules():
        name = getattr(type(module), "kernel_layer_name", type(module).__name__)
        kernel = {"RMSNorm": liger.LigerRMSNorm, "Qwen3RMSNorm": liger.LigerRMSNorm}.get(name)
        kernel = liger.LigerSwiGLUMLP if name in ("MLP", "Qwen3MLP") else kernel
        if kernel is not None:
            own, given = (list(inspect.signature(kind.forward).parameters) for kind in (type(module), kernel))
            assert len(own) == len(given), f"{own}, not {given}"
            module.forward = types.MethodType(kernel.forward, module)
    model._use_kernels = True


def kernelized(spec: str | None, folder: str) -> tuple[list[float], set[str]]:
    """Losses of a model of `use_kernels=True`, whose mode changes between steps, and the kernels that were called."""
    import hf_parallel

    if spec is None:
        return losses(AutoModelForCausalLM.from_pretrained(folder).train(), rows(3, 2, 33)), set()
    hf_parallel.activate(spec)
    hub = "transformers.integrations.hub_kernels.register_kernel_mapping_transformers"
    with (
        mock.patch("transformers.modeling_utils.is_kernels_available", return_value=True),
        mock.patch("transformers.modeling_utils.kernelize", kernelize),
        mock.patch(hub),
    ):
        model = AutoModelForCausalLM.from_pretrained(folder, use_kernels=True).train()
        model.eval()
        return losses(model.train(), rows(3, 2, 33)), set(liger.used)


@pytest.mark.parametrize("spec", ["tp=2", "pp=2"])
def test_use_kernels(runs, spec):
    """Norms and MLPs; the mode of the model changes, and with it the kernels are put on once more."""
    folder = runs.initial("qwen3")
    expected, _ = run_alone(kernelized, None, folder)
    found, used = zip(*run(kernelized, 2, spec, folder, init=False), strict=True)
    check_numbers(found, expected)
    assert all(kernels == {"norm", "mlp"} for kernels in used)

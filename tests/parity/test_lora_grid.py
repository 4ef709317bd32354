"""LoRA on everything a decoder has: models x layouts x accumulation x ways of checkpointing, as in one process."""

from functools import partial

import pytest

from tests.adapters import ATTENTION, ENDS, MLP, SPECS, lora
from tests.distributed import run, run_alone
from tests.training import (
    DATA_PARALLEL,
    Script,
    Tolerance,
    activate,
    axes,
    differences,
    load_model,
    none,
    over,
    weights,
)

pytest.importorskip("peft")

EVERYTHING = ATTENTION + MLP + ENDS
#: The script's argument, or ours in the spec.
CHECKPOINTING = {
    "kept": ((), ""),
    "script": ((("gradient_checkpointing", True),), ""),
    "spec": ((), ",activation_checkpointing=full"),
}


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("model", ["llama", "qwen3"])
@over("LoRA", *SPECS)
def test_everything_adapted(runs, spec, model, accumulation, checkpointing):
    """Recomputed or kept, the numbers are those of one process that keeps its activations."""
    arguments, key = CHECKPOINTING[checkpointing]
    plain = Script(model=model, lora=lora(EVERYTHING)).with_accumulation(accumulation)
    script = Script(**{**vars(plain), "arguments": arguments})
    tolerance = Tolerance() if "tp=" in spec or "pp=" in spec else DATA_PARALLEL
    none(differences(runs.parallel(script, spec + key), runs.reference(plain), tolerance))


def start(spec, initial, folder):
    """Save the adapters that a seed gives, before any step: peft's own start, and one without zeros."""
    activate(spec)
    for start in (True, False):
        model = load_model(Script(lora=lora(EVERYTHING, init_lora_weights=start)), initial, 0)
        model.save_pretrained(f"{folder}/{start}")


@pytest.fixture(scope="module")
def starts(runs, tmp_path_factory):
    """Folders of what one process starts from, by model."""
    folders = {model: str(tmp_path_factory.mktemp(model)) for model in ("llama", "qwen3")}
    for model, folder in folders.items():
        run_alone(start, None, runs.initial(model), folder)
    return folders


@pytest.mark.parametrize("model", ["llama", "qwen3"])
@pytest.mark.parametrize("spec", SPECS)
def test_same_seed_same_adapters(runs, starts, tmp_path, spec, model):
    """To the bit, on every layout."""
    run(partial(start, spec, runs.initial(model), str(tmp_path)), axes(spec)["world"], init=False)
    for kind in ("True", "False"):
        ours, theirs = weights(f"{tmp_path}/{kind}"), weights(f"{starts[model]}/{kind}")
        assert ours.keys() == theirs.keys()
        assert [name for name in theirs if not ours[name].equal(theirs[name])] == []

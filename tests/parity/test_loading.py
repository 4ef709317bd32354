"""Checkpoints that transformers converts while loading: the right slices, whatever the layout cuts."""

import pytest
import torch

from tests import converted
from tests.distributed import run, run_alone
from tests.training import axes, none, spec_id, weight_differences, weights

MODELS = tuple(converted.CONFIGS)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Folder and whole tensors of each model, as one plain process saves and loads it."""
    root = tmp_path_factory.mktemp("checkpoints")
    made = {}

    def make(name: str) -> tuple[str, dict[str, torch.Tensor]]:
        if name not in made:
            made[name] = str(root / name), run_alone(save_and_load, name, str(root / name))
        return made[name]

    return make


def save_and_load(name: str, folder: str) -> dict[str, torch.Tensor]:
    """Save as on the Hub; returns the tensors that plain transformers loads from there."""
    converted.build(name).save_pretrained(folder)
    model = converted.auto_class(name).from_pretrained(folder)
    tied = set(model.all_tied_weights_keys)
    return {key: tensor for key, tensor in model.state_dict().items() if key not in tied}


def gathered(spec: str, name: str, folder: str, out: str) -> dict[str, torch.Tensor]:
    """Load under a layout, save, spoil the weights, read them back; rank 0 returns what both ways gave."""
    from hf_parallel import hooks
    from hf_parallel.checkpoint import full_state_dict, load_weights

    hooks.activate(spec, source="test")
    model = converted.auto_class(name).from_pretrained(folder)
    mesh = hooks.runtime.mesh()
    first = full_state_dict(model, mesh)
    model.save_pretrained(out, max_shard_size="50KB")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_weights(model, out)
    return {"loaded": first, "read back": full_state_dict(model, mesh)}


def unequal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> list[str]:
    """Names of tensors that differ in a bit, or that only one side has."""
    return [
        key
        for key in sorted(ours.keys() | theirs.keys())
        if key not in ours or key not in theirs or not torch.equal(ours[key], theirs[key])
    ]


@pytest.mark.parametrize("name", MODELS)
def test_the_checkpoint_is_not_as_the_model(name, checkpoints):
    """Else the other tests would not test a conversion."""
    folder, whole = checkpoints(name)
    assert set(weights(folder)) != set(whole)


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2", "dp_shard=4"], ids=spec_id)
@pytest.mark.parametrize("name", MODELS)
def test_converted_checkpoints(name, spec, checkpoints, tmp_path):
    folder, whole = checkpoints(name)
    ranks = run(gathered, axes(spec)["world"], spec, name, folder, str(tmp_path), init=False)
    assert unequal(ranks[0]["loaded"], whole) == []
    assert unequal(ranks[0]["read back"], whole) == []
    none(weight_differences(str(tmp_path), folder, 0.0))

"""Checkpoints that transformers converts while loading: the right slices, whatever the layout cuts."""

import shutil
from collections.abc import Callable

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests import converted
from tests.distributed import run, run_alone
from tests.training import activate, axes, none, weight_differences, weights

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
    return dict(model.state_dict())


def cut_everything(model: torch.nn.Module, mesh, pack=None) -> torch.nn.Module:
    """In place of `parallelize`: every parameter cut by tp along one of its dimensions, packed if it can be, and by
    FSDP2. More than any model does, so that all that a model may do is among it."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    from hf_parallel.model.anatomy import make_packed_order

    for number, (key, parameter) in enumerate(list(model.named_parameters())):
        owner, _, name = key.rpartition(".")
        module, dim = model.get_submodule(owner), number % max(parameter.ndim, 1)
        if parameter.ndim and parameter.shape[dim] % 4 == 0:
            order = make_packed_order([parameter.shape[dim] // 2] * 2, 2, dim)
            module.stored_orders = {**getattr(module, "stored_orders", {}), name: order}
        if parameter.ndim:
            shard = distribute_tensor(parameter.detach(), mesh["tp"], [Shard(dim)], src_data_rank=None)
            module._parameters[name] = torch.nn.Parameter(shard)
    return fully_shard(model, mesh=mesh["dp_shard"])


def gathered(spec: str, name: str, folder: str, out: str, cut: Callable | None = None) -> dict[str, dict]:
    """Load under a layout, save, spoil the weights, read them back; rank 0 returns what both ways gave."""
    from hf_parallel.checkpoint import gather_state_dict, load_weights, save_pretrained_model
    from hf_parallel.hooks import loading, runtime

    activate(spec)
    loading.parallelize_model = cut or loading.parallelize_model
    model = converted.auto_class(name).from_pretrained(folder)
    mesh = runtime.mesh()
    first = gather_state_dict(model, mesh)
    save_pretrained_model(model, mesh, out, max_shard_size="50KB")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    load_weights(model, out)
    return {"loaded": first, "read back": gather_state_dict(model, mesh)}


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


def check(name: str, spec: str, checkpoint: tuple[str, dict], out: str, cut: Callable | None = None) -> None:
    """What a layout loads, saves and reads back is bit for bit what one process does."""
    folder, whole = checkpoint
    ranks = run(gathered, axes(spec)["world"], spec, name, folder, out, cut, init=False)
    assert unequal(ranks[0]["loaded"], whole) == []
    assert unequal(ranks[0]["read back"], whole) == []
    none(weight_differences(out, folder, 0.0))


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2", "dp_shard=4"])
@pytest.mark.parametrize("name", MODELS)
def test_converted_checkpoints(name, spec, checkpoints, tmp_path):
    check(name, spec, checkpoints(name), str(tmp_path))


@pytest.mark.parametrize(("name", "spec"), [("mixtral", "pp=2"), ("qwen3_moe", "pp=2"), ("llava", "dp_shard=2,tp=2")])
def test_converted_checkpoints_of_models_that_are_split(name, spec, checkpoints, tmp_path):
    check(name, spec, checkpoints(name), str(tmp_path))


@pytest.mark.parametrize("spec", ["tp=2", "dp_shard=2,tp=2"])
@pytest.mark.parametrize("name", MODELS)
def test_every_way_to_cut(name, spec, checkpoints, tmp_path):
    check(name, spec, checkpoints(name), str(tmp_path), cut_everything)


def with_a_head(folder: str, out: str, source: str | None, head: torch.Tensor | None = None) -> str:
    """Copy the checkpoint of a tied model, with a head beside the embedding or, without `source`, in its place."""
    tensors = load_file(f"{folder}/model.safetensors")
    embedding = tensors.pop("model.embed_tokens.weight")
    tensors["lm_head.weight"] = embedding.clone() if head is None else head
    if source is not None:
        tensors[source] = embedding
    shutil.copytree(folder, out)
    save_file(tensors, f"{out}/model.safetensors", metadata={"format": "pt"})
    return out


def answers(spec: str, folders: list[str]) -> list[str]:
    """What loading each of the folders says."""
    from hf_parallel.ask.config import SpecError

    activate(spec)
    said = []
    for folder in folders:
        try:
            AutoModelForCausalLM.from_pretrained(folder)
            said.append("loaded")
        except SpecError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("spec", ["dp_shard=2", "pp=2", "tp=2"])
def test_a_tied_weight_that_the_checkpoint_has_twice(spec, runs, tmp_path):
    """Equal values are one weight; of different ones transformers makes two, which a layout refuses; so a head alone
    where the first stage would find nothing to embed with."""
    folder, embedding = runs.initial("qwen3"), "model.embed_tokens.weight"
    other = load_file(f"{folder}/model.safetensors")[embedding].flip(0).contiguous()
    equal = with_a_head(folder, str(tmp_path / "equal"), embedding)
    different = with_a_head(folder, str(tmp_path / "different"), embedding, other)
    alone = with_a_head(folder, str(tmp_path / "alone"), None)
    for said in run(answers, 2, spec, [equal, different, alone], init=False):
        assert said[0] == "loaded"
        assert f"lm_head.weight of the checkpoint: is not its {embedding}" in said[1]
        assert "tie_word_embeddings=False works" in said[1]
        if spec == "pp=2":
            assert f"has the tied lm_head.weight but not {embedding}" in said[2]
            assert "pp_size=1 works" in said[2]
        else:
            assert said[2] == "loaded"

"""Doctor's plan is what `parallelize` does: parameters, stages, shapes and refusals."""

import re

import pytest

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ranks.mesh import compute_coordinates
from tests import models
from tests.distributed import RankFailure, run
from tests.unit.test_doctor import claims, on_meta


def parallel(name, spec):
    """On a rank: local shapes by name, how many parameters it stores, and whether it splits the sequence."""
    from hf_parallel import parallelize
    from hf_parallel.apply.parallelize import gather_parameters_per_rank, state_of

    model = parallelize(models.build(name), spec)
    parameters = model.named_parameters(remove_duplicate=False)
    shapes = {key: tuple(getattr(p, "to_local", lambda p=p: p)().shape) for key, p in parameters}
    return {
        "shapes": shapes,
        "counts": gather_parameters_per_rank(model),
        "sequence_parallel": state_of(model).sequence_parallel,
    }


@pytest.mark.parametrize(
    ("name", "spec", "world"),
    [
        ("llama", "tp=2", 2),
        ("llama", "tp=4", 4),
        ("odd", "tp=4", 4),
        ("gpt2", "tp=2", 2),
        ("phi3", "tp=4", 4),
        ("falcon", "tp=4", 4),
        ("deepseek_v3", "tp=2", 2),
        ("granite_swa", "tp=2", 2),
        ("odd", "tp=4,tp_mesh=2x2", 4),
        ("gpt2", "tp=4,tp_mesh=2x2", 4),
        ("t5", "tp=2", 2),
        ("bert", "tp=2", 2),
        ("vit", "tp=2", 2),
        ("llava", "tp=2", 2),
    ],
)
def test_shapes_are_those_of_parallelize(name, spec, world):
    report, real = claims(name, spec, world), run(parallel, world, name, spec)[0]
    assert report.problems == []
    whole = {key: tuple(p.shape) for key, p in on_meta(name).named_parameters(remove_duplicate=False)}
    claimed = {}
    for split in report.splits:
        for module in split.modules:
            shown = next(key for key in (f"{module}.weight", module, f"{module}.bias") if key in whole)
            assert whole[shown] == split.whole
            claimed[shown] = split.per_rank
            claimed.update({f"{module}.{key}": whole[f"{module}.{key}"] for key in split.stays_whole})
    left = {key for key in real["shapes"] if key not in claimed}
    assert all(key.endswith(".bias") for key in left), left
    assert claimed == {key: real["shapes"][key] for key in claimed}
    assert report.parameters_per_rank == real["counts"]
    assert (report.facts["sequence parallelism"] == "on") is real["sequence_parallel"]


@pytest.mark.parametrize(
    ("name", "spec", "world"),
    [
        ("llama", "tp=2,pp=2,dp_shard=2", 8),
        ("odd", "pp=2,dp_shard=3", 6),
        ("odd", "tp=2,dp_shard=2", 4),
        ("opt_350m", "tp=2,pp=2", 4),
        ("qwen3", "pp=2,dp_replicate=2,pipeline_split=[3,1]", 4),
        ("llama", "pp=2,pipeline_schedule=interleaved_1f1b,dp_shard=2", 4),
        ("qwen3", "pp=2,tp=2,pipeline_schedule=zbv_zero_bubble", 4),
        ("mamba", "dp_shard=2", 2),
        ("odd", "tp=4,tp_mesh=2x2,dp_shard=2", 8),
        ("bert", "dp_replicate=2", 2),
    ],
)
def test_parameters_and_stages_are_those_of_parallelize(name, spec, world):
    report, real = claims(name, spec, world), run(parallel, world, name, spec)
    assert report.problems == []
    assert report.parameters_per_rank == real[0]["counts"]
    assert {place.bytes for place in report.pipeline} == {4 * place.parameters for place in report.pipeline}
    for rank, held in enumerate(list(each["shapes"]) for each in real):
        place = report.pipeline[compute_coordinates(ParallelConfig.parse(spec).resolve(world), rank)["pp"]]
        if place.stages:
            assert {_module(key) for key in held if ".layers." not in key} == set(place.others)
            layers = {int(key.split(".layers.")[1].split(".")[0]) for key in held if ".layers." in key}
            assert layers == {number for shown in place.layers for number in _numbers(shown)}


def _module(key):
    return re.sub(r"\.(weight|bias)$", "", key)


def _numbers(shown):
    """model.layers.2-3 -> 2, 3"""
    ends = [int(number) for number in re.findall(r"\d+", shown)]
    return range(ends[0], ends[-1] + 1)


@pytest.mark.parametrize(
    ("name", "spec", "world"),
    [
        ("mamba", "tp=2", 2),
        ("llama", "tp=3", 3),
        ("llama", "pp=5", 5),
        ("llama", "pp=3,pipeline_schedule=looped_bfs", 3),
        ("qwen3", "pp=2,dp_shard=2,pipeline_schedule=dualpipe_v", 4),
        ("llama", "pp=2,pipeline_split=[3,2]", 2),
        ("bert", "pp=2", 2),
        ("llava", "pp=2", 2),
        ("vit", "tp=2,sequence_parallel=true", 2),
        ("llama", "tp=2,pp=2", 2),
        ("deepseek_v3", "tp=4,tp_mesh=2x2", 4),
        ("falcon", "tp=4,tp_mesh=2x2", 4),
        ("llama", "tp=4,tp_mesh=2x2,precision=int8", 4),
        ("llama", "attention=flash_attention_9", 1),
    ],
)
def test_refusals_are_those_of_parallelize(name, spec, world):
    with pytest.raises(RankFailure) as caught:
        run(parallel, world, name, spec)
    assert claims(name, spec, world).problems == [caught.value.message]

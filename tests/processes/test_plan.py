"""An axis that scales gradients needs its own module and one line; doctor and start print one plan."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

import hf_parallel
from hf_parallel.apply.parallelize import apply, state_of
from hf_parallel.ask.config import ParallelConfig, render_key_table
from hf_parallel.ask.keys.sizes import Keys, MeshAxis, key
from hf_parallel.axes.axis import Axis
from hf_parallel.axes.order import AXES
from hf_parallel.planner.dryrun.world import pretend_world
from hf_parallel.plans.examine import examine, report_of
from hf_parallel.plans.resolve import read_model, resolve
from hf_parallel.ranks.mesh import ParallelMesh
from tests.distributed import run_alone
from tests.refusals import pattern_of_refusal
from tests.unit.test_plan import on_meta

SPECS = [
    ("llama", "dp_shard=4"),
    ("llama", "tp=2,dp_shard=2"),
    ("gpt2", "tp=4"),
    ("t5", "tp=2,dp_replicate=2"),
    ("bert", "tp=2,sequence_parallel=false,dp_shard=2"),
    ("qwen3", "pp=2,tp=2"),
    ("qwen3", "pp=2,tp=2,pipeline_schedule=auto"),
    ("odd", "pp=2,dp_shard=2,activation_checkpointing=full,attention=eager"),
    ("deep", "pp=4,pipeline_split=[3,3,2,2]"),
    ("llama", "pp=2,dp_shard=2,pipeline_schedule=interleaved_1f1b,zero_stage=2"),
]


def applied(name, spec, rank=3):
    """The report of the plan that `apply` carried out, as one of four ranks that are not there."""
    with pretend_world(rank, 4):
        model = on_meta(name)
        mesh = ParallelMesh.create(ParallelConfig.parse(spec), torch.device("cpu"))
        apply(model, resolve(mesh.config, read_model(model, mesh.config)), mesh)
        return report_of(state_of(model).plan).to_dict()


@pytest.mark.parametrize(("name", "spec"), SPECS)
def test_doctor_and_start_up_report_print_one_plan(name, spec):
    assert run_alone(applied, name, spec) == examine(on_meta(name), ParallelConfig.parse(spec), 4).to_dict()


@dataclass(frozen=True)
class ScaleKeys(Keys):
    scale_size: int = key(1, "ranks whose gradients are scaled", shown="off")
    scale_by: int = key(3, "the factor", choices=(2, 3))


class Scale(Axis[int, int]):
    """Scales gradients."""

    name = "scale"

    def read(self, model, config):
        return len(list(model.parameters()))

    def resolve(self, config, anatomy, facts):
        return config.scale_by

    def notes(self, part):
        return [f"gradients times {part}"]

    def apply(self, model, part, building):
        def scale(gradient):
            return gradient * part

        scale.__module__ = "hf_parallel.axes.scale"  # where it would lie; hooks of scripts are refused
        for parameter in model.parameters():
            parameter.register_hook(scale)


@dataclass(frozen=True)
class WithScale(ParallelConfig, ScaleKeys):
    """Its keys among the bases, its mesh axis outside of all others."""

    mesh_axes = (MeshAxis("scale", data=True), *ParallelConfig.mesh_axes)


def test_an_axis_needs_its_own_module_and_one_line():
    config = WithScale.parse("scale=2,scale_by=2,dp_shard=-1").resolve(4)
    assert config.sizes == {"scale": 2, "dp_replicate": 1, "pp": 1, "dp_shard": 2, "cp": 1, "tp": 1}
    assert (config.data_parallel_size, config.world_size, config.to_spec()) == (4, 4, "scale=2,dp_shard=2,scale_by=2")
    assert "scale_size" in render_key_table(WithScale)
    with pytest.raises(hf_parallel.SpecError, match=pattern_of_refusal("scale_by=5", 2, works="3")):
        WithScale.parse("scale_by=5")
    gradients, notes, places = run_alone(scaled, config)
    assert (gradients, notes[-1], places) == ({2.0}, "gradients times 2", (1, 1))


def scaled(config):
    with pretend_world(3, 4):
        mesh, model = ParallelMesh.create(config, torch.device("cpu")), torch.nn.Linear(3, 5, bias=False)
        axes = (*AXES, Scale())
        plan = resolve(config, read_model(model, config, axes), axes)
        for name in ("dp",):  # FSDP2 has no hooks on the parameter that it shards
            plan = dataclasses.replace(plan, parts={k: v for k, v in plan.parts.items() if k != name})
        apply(model, plan, mesh)
        model(torch.ones(1, 3)).sum().backward()
        return set(model.weight.grad.flatten().tolist()), plan.notes, (mesh.index("scale"), mesh.data_rank % 2)

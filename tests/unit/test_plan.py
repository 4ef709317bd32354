"""Ask, read, plan, apply: one plan for all who print it, nothing refused after it, and an axis that is one module."""

import ast
import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import hf_parallel
from hf_parallel.apply.parallelize import apply, state_of
from hf_parallel.ask.config import ParallelConfig, key_table
from hf_parallel.ask.keys.sizes import Keys, MeshAxis, key
from hf_parallel.axes.axis import Axis
from hf_parallel.axes.order import AXES
from hf_parallel.planner.dryrun.world import fake_world
from hf_parallel.plans.examine import examine, report_of
from hf_parallel.plans.resolve import draft, read_model, resolve
from hf_parallel.ranks.mesh import ParallelMesh
from tests import models
from tests.distributed import run_alone

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
ROOM = Path(hf_parallel.__file__).parent
#: Where a plan is made: reading, deciding, and the arithmetic of schedules; and optimizers, which come after it.
PLANNING = {
    *(
        "attention/axis.py",
        "context/choose.py",
        "data/axis.py",
        "experts/axis.py",
        "tensor/axis.py",
        "tensor/infer.py",
    ),
    *("compression.py", "loss.py", "offload.py", "precision.py", "recompute.py", "tiled_mlp.py"),
    *("pipeline/balance.py", "pipeline/read.py", "pipeline/schedules.py", "pipeline/timeline.py"),
    *("data/files.py", "data/host_step.py", "data/local_step.py"),
}


def on_meta(name):
    config = models.CONFIGS[name]()
    with torch.device("meta"):
        return models.auto_class(config).from_config(config)


def applied(name, spec, rank=3):
    """The report of the plan that `apply` carried out, as one of four ranks that are not there."""
    with fake_world(rank, 4):
        model = on_meta(name)
        mesh = ParallelMesh.create(ParallelConfig.parse(spec), torch.device("cpu"))
        apply(model, resolve(mesh.config, read_model(model, mesh.config)), mesh)
        return report_of(state_of(model).plan).to_dict()


@pytest.mark.parametrize(("name", "spec"), SPECS)
def test_doctor_and_start_up_report_print_one_plan(name, spec):
    assert run_alone(applied, name, spec) == examine(on_meta(name), ParallelConfig.parse(spec), 4).to_dict()


def test_nothing_is_refused_once_the_plan_is_made():
    """`SpecError` is raised by what makes plans; what `apply` runs does not even know the name."""
    engine = [path for path in (ROOM / "axes").rglob("*.py") if not any(map(path.match, PLANNING))]
    assert len(engine) > 30
    for path in engine:
        names = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
        assert not {"SpecError", "refuse", "refuse_with"} & names, path


def test_every_refusal_has_the_one_form():
    """Key, reason, what works: written by `refuse` and nobody else."""
    for path in ROOM.rglob("*.py"):
        raised = [node.exc for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Raise)]
        calls = [node.func for node in raised if isinstance(node, ast.Call)]
        bare = [node for node in calls if "SpecError" in (getattr(node, "id", None), getattr(node, "attr", None))]
        assert not bare or path == ROOM / "ask" / "spec.py", f"{path}:{bare[0].lineno}: refuse(what, why, works)"


def test_no_source_of_a_model_is_read():
    """What a model does is declared in `families.py`, or seen by running it on stand-ins or the meta device.

    Recipes read the options that a script takes, and `migrate` what it asks of another engine: there is no model yet.
    """
    for path in {*ROOM.rglob("*.py")} - {ROOM / "cli" / "recipe_file.py", ROOM / "cli" / "migrate.py"}:
        assert not re.search(r"getsource|import (ast|dis)\b", path.read_text()), path


def test_the_mesh_and_the_plan_are_frozen():
    plan = draft(ParallelConfig.parse("pp=2").resolve(2), read_model(on_meta("llama"), ParallelConfig.parse("pp=2")))
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.config = None
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.anatomy.name = ""
    assert ParallelMesh.__dataclass_params__.frozen


# ---- an axis of its own: all of it is here ------------------------------------------------------------------------


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
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * part)


@dataclass(frozen=True)
class WithScale(ParallelConfig, ScaleKeys):
    """Its keys among the bases, its mesh axis outside of all others."""

    mesh_axes = (MeshAxis("scale", data=True), *ParallelConfig.mesh_axes)


def test_an_axis_needs_its_own_module_and_one_line():
    config = WithScale.parse("scale=2,scale_by=2,dp_shard=-1").resolve(4)
    assert config.sizes == {"scale": 2, "dp_replicate": 1, "pp": 1, "dp_shard": 2, "cp": 1, "tp": 1}
    assert (config.data_parallel_size, config.world_size, config.to_spec()) == (4, 4, "scale=2,dp_shard=2,scale_by=2")
    assert "scale_size" in key_table(WithScale)
    with pytest.raises(hf_parallel.SpecError, match="scale_by=5: not one of 2, 3"):
        WithScale.parse("scale_by=5")
    gradients, notes, places = run_alone(scaled, config)
    assert (gradients, notes[-1], places) == ({2.0}, "gradients times 2", (1, 1))


def scaled(config):
    with fake_world(3, 4):
        mesh, model = ParallelMesh.create(config, torch.device("cpu")), torch.nn.Linear(3, 5, bias=False)
        axes = (*AXES, Scale())
        plan = resolve(config, read_model(model, config, axes), axes)
        for name in ("dp",):  # FSDP2 has no hooks on the parameter that it shards
            plan = dataclasses.replace(plan, parts={k: v for k, v in plan.parts.items() if k != name})
        apply(model, plan, mesh)
        model(torch.ones(1, 3)).sum().backward()
        return set(model.weight.grad.flatten().tolist()), plan.notes, (mesh.index("scale"), mesh.data_rank % 2)


# ---- the README ----------------------------------------------------------------------------------------------------


def test_tables_of_keys_are_those_of_the_axes():
    """The page has all of them, the README some."""
    everything = key_table(ParallelConfig)
    assert everything in (ROOM.parent / "docs" / "keys.md").read_text()
    section = (ROOM.parent / "README.md").read_text().partition("| key (short)")[2].partition("\n\n")[0]
    shown = section.splitlines()[2:]
    assert len(shown) > 9
    assert [line for line in shown if line not in everything.splitlines()] == []


def test_the_readme_counts_the_sequences_of_a_step():
    section = (ROOM.parent / "README.md").read_text().partition("| layout | data ranks |")[2].partition("\n\n")[0]
    rows = re.findall(r"\| `(\S+)` \| (\d+) \| (\d+) \|", section)
    assert len(rows) > 5
    for spec, ranks, sequences in rows:
        data_ranks = ParallelConfig.parse(spec).resolve(8).data_parallel_size
        assert (int(ranks), int(sequences)) == (data_ranks, 4 * data_ranks)

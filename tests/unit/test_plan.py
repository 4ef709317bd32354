"""Ask, read, plan, apply: one plan for all who print it, nothing refused after it, and an axis that is one module."""

import ast
import dataclasses
import re
from pathlib import Path

import pytest
import torch

import hf_parallel
from hf_parallel.ask.config import ParallelConfig, render_key_table
from hf_parallel.plans.resolve import draft_plan, read_model
from hf_parallel.ranks.mesh import ParallelMesh
from tests import models

ROOM = Path(hf_parallel.__file__).parent
#: Where a plan is made: reading, deciding, and the arithmetic of schedules; and optimizers, which come after it.
PLANNING = {
    *(
        "context/choose.py",
        "data/axis.py",
        "experts/axis.py",
        "tensor/axis.py",
        "tensor/infer.py",
    ),
    *("attention_kernel.py", "loss.py", "precision.py", "recompute.py", "storage.py", "tiled_mlp.py"),
    *("pipeline/axis.py", "pipeline/balance.py", "pipeline/schedules.py", "pipeline/timeline.py"),
    *("data/files.py", "data/host_step.py", "data/local_step.py"),
}


def on_meta(name):
    config = models.CONFIGS[name]()
    with torch.device("meta"):
        return models.auto_class(config).from_config(config)


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
    plan = draft_plan(
        ParallelConfig.parse("pp=2").resolve(2), read_model(on_meta("llama"), ParallelConfig.parse("pp=2"))
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.config = None
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.anatomy.name = ""
    assert ParallelMesh.__dataclass_params__.frozen


# ---- the README ----------------------------------------------------------------------------------------------------


def test_tables_of_keys_are_those_of_the_axes():
    """The page has all of them, the README some."""
    everything = render_key_table(ParallelConfig)
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

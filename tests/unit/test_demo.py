"""`make demo`: the picture, and what the folders of both runs say; the runs take a minute and are not repeated."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file

from examples import demo
from tests.commands import ROOT

LOSSES = [6.25, 6.5, 6.0]


def write_run(folder, facts=None):
    """What a run leaves behind: the logs of three steps, and a model of 15 numbers."""
    history = [{"loss": loss, "step": step} for step, loss in enumerate(LOSSES)] + [{"eval_loss": 1.0}]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(3)}, folder / "model.safetensors")
    if facts is not None:
        (folder / "hf_parallel.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(("facts", "held"), [(None, [15]), ({"parameters_per_rank": [7, 8]}, [7, 8])])
def test_a_run_is_read_from_its_folder(tmp_path, facts, held):
    write_run(tmp_path, facts)
    found = demo.read_run(tmp_path, 1.0)
    assert (found.losses, found.parameters) == (LOSSES, held)
    assert found.megabytes == pytest.approx([16e-6 * count for count in held])


def test_the_picture(tmp_path):
    """Small enough for a repository, as is the one on the first page."""
    alone, spread = demo.Run(LOSSES, [1000], 1.0), demo.Run(LOSSES, [500, 500], 1.0)
    path = demo.draw(alone, spread, "pp=2", tmp_path / "demo.png")
    for picture in (path, ROOT / "docs" / "demo.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size < 80_000


def test_the_environment_is_small():
    """It has what this package and its pictures need, of the versions that pyproject.toml names: no other extras."""
    makefile, project = (ROOT / "Makefile").read_text(), (ROOT / "pyproject.toml").read_text()
    rule = makefile.partition("$(DEMO_STAMP): ")[2].partition("\n\n")[0]
    assert '"$(TORCH)" $(DEMO_NEEDS)' in rule
    assert "EXTRAS" not in rule
    named = re.findall('"([^"]+)"', re.search("^DEMO_NEEDS .*$", makefile, re.MULTILINE)[0])
    needed = re.search(r"^dependencies = \[(.*?)^\]", project, re.MULTILINE | re.DOTALL)[1]
    plots = re.search(r"^plots = \[(.*)\]$", project, re.MULTILINE)[1]
    required = re.findall('"([^"]+)"', needed + plots)
    assert set(named) <= set(required)
    # The others come with transformers and torch.
    brought = {"torch", "safetensors", "huggingface_hub", "numpy", "packaging", "pyyaml"}
    assert {re.match(r"\w+", name)[0] for name in {*required} - {*named}} == brought

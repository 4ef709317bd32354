"""A run that stops and goes on, under the same or another layout, does what an uninterrupted one does."""

import os
import signal

import pytest
import torch
from transformers import TrainerCallback

from tests import models
from tests.distributed import RankFailure, run, run_alone
from tests.resuming import (
    ONE,
    STEPS,
    STOP,
    Ended,
    checkpoint_differences,
    log_differences,
    train,
    train_rank,
    trained,
)
from tests.training import axes, none, spec_id

TOLERANCE = 2e-5
REST = range(STOP + 1, STEPS + 1)
LAYOUTS = [ONE, "tp=2", "pp=2,dp_shard=2", "tp=2,dp_shard=2"]


def layout_id(spec: str) -> str:
    return spec_id(spec) or "one"


class Stopped:
    """Uninterrupted runs, one per model and layout, whose checkpoints the tests resume from."""

    def __init__(self, root, runs):
        self.root, self.runs, self.made = root, runs, {}

    def __call__(self, model: str, spec: str) -> Ended:
        if (model, spec) not in self.made:
            out = str(self.root / f"{model}-{layout_id(spec)}")
            self.made[model, spec] = trained(spec, {"folder": self.runs.initial(model), "out": out})[0]
        return self.made[model, spec]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, runs):
    return Stopped(tmp_path_factory.mktemp("stopped"), runs)


def check(stopped, runs, out, model: str, sources: list[str], spec: str) -> None:
    """Resume under `spec` what each of the sources has saved, and compare with one process that never stopped."""
    jobs = [
        {
            "folder": runs.initial(model),
            "out": str(out / layout_id(source)),
            "resume": f"{stopped(model, source).folder}/checkpoint-{STOP}",
        }
        for source in sources
    ]
    built, found = models.build(model), []
    for source, ended in zip(sources, trained(spec, *jobs), strict=True):
        former, same = stopped(model, source), source == spec
        texts = log_differences(ended, former if same else stopped(model, ONE), REST, 0 if same else TOLERANCE)
        for step in (STOP, STEPS) if same else (STOP,):  # what was read, and where it led
            texts += checkpoint_differences(*(f"{run.folder}/checkpoint-{step}" for run in (ended, former)), built)
        found += [f"from {layout_id(source)}: {text}" for text in texts]
    none(found)


@pytest.mark.parametrize("spec", LAYOUTS, ids=layout_id)
def test_from_every_layout_to_every_layout(stopped, runs, tmp_path, spec):
    """Qwen3, whose tied embedding is on two stages; to the same layout bit for bit."""
    check(stopped, runs, tmp_path, "qwen3", LAYOUTS, spec)

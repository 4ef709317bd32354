"""Trainer with head and loss in chunks by default: the numbers of one plain process; whole logits where they are read.

Chunks are of 11 tokens here, and pay for any number of tokens.
"""

import json
from pathlib import Path

import pytest

from hf_parallel.axes.tensor import lean_loss
from tests.training import BF16, Script, Tolerance, axes, differences, none, spec_id


@pytest.fixture
def lean(monkeypatch, tmp_path):
    """How often ranks have computed head and loss in chunks so far."""
    calls, real = tmp_path / "calls", lean_loss._compute_loss_of_source

    def counted(*given):
        with calls.open("a") as file:
            file.write("x")
        return real(*given)

    monkeypatch.setattr(lean_loss, "count_tokens_of_chunk", lambda *_: 11)
    monkeypatch.setattr(lean_loss, "compute_fewest_tokens", lambda *_: 1)
    monkeypatch.setattr(lean_loss, "_compute_loss_of_source", counted)
    return lambda: len(calls.read_text()) if calls.exists() else 0


def check(runs, script: Script, spec: str, tolerance: Tolerance | None = None) -> str:
    """Compare with one process; what the start-up report says of the loss."""
    found = runs.parallel(script, spec)
    none(differences(found, runs.reference(script), tolerance or Tolerance()))
    return json.loads((Path(found[0].folder).parent / "hf_parallel.json").read_text())["loss"]


@pytest.mark.parametrize(
    ("model", "spec"),
    [("llama", spec) for spec in ("tp=2", "pp=2", "dp_shard=2", "tp=2,pp=2", "cp=2", "pp=2,dp_shard=2")]
    + [("llama", "pp=2,pipeline_schedule=interleaved_1f1b"), ("gemma2", "tp=2"), ("gemma2", "pp=2")]
    + [("qwen3", "pp=2"), ("qwen3", "tp=2,dp_shard=2")],  # tied
    ids=spec_id,
)
def test_numbers_of_one_process(runs, lean, model, spec):
    said = check(runs, Script(model), spec)
    heads = axes(spec)["world"] // (2 if "pp=" in spec else 1)
    assert lean() >= 3 * heads  # steps
    assert said.endswith("where that needs less memory than whole logits")


READ = {
    "compute_loss_func": Script(own_loss=True),
    "OwnTrainer": Script(overrides=True),
    "label_smoothing_factor": Script(arguments=(("label_smoothing_factor", 0.1),)),
}


@pytest.mark.parametrize(
    ("reader", "spec"),
    [
        ("compute_loss_func", "pp=2,dp_shard=2"),
        ("OwnTrainer", "pp=2,dp_shard=2"),
        ("OwnTrainer", "tp=2"),
        ("label_smoothing_factor", "dp_shard=2"),
    ],
)
def test_whole_logits_where_they_are_read(runs, lean, reader, spec):
    said = check(runs, READ[reader], spec)
    assert lean() == 0
    assert said.startswith(f"whole logits: {reader} ")


SETTINGS = {
    "bf16": (Script(arguments=(("bf16", True),)), BF16, True),
    "accumulation": (Script().with_accumulation(2), None, True),
    "adapters": (Script(lora=(("target_modules", ("q_proj", "lm_head")), ("r", 3))), None, False),
    "frozen head": (Script(lora=(("target_modules", ("q_proj",)), ("r", 3))), None, True),
    "copied head": (Script(lora=(("target_modules", ("q_proj",)), ("modules_to_save", ("lm_head",)))), None, False),
    "checkpointing": (Script(arguments=(("gradient_checkpointing", True),)), None, True),
}


@pytest.mark.parametrize(
    ("setting", "spec"),
    [
        ("bf16", "tp=2,dp_shard=2"),
        ("bf16", "pp=2"),
        ("accumulation", "pp=2,dp_shard=2"),
        ("adapters", "tp=2"),
        ("adapters", "dp_shard=2"),
        ("frozen head", "tp=2,dp_shard=2"),
        ("frozen head", "pp=2"),
        ("copied head", "dp_shard=2"),
        ("copied head", "tp=2"),
        ("checkpointing", "dp_shard=2"),
    ],
)
def test_settings(runs, lean, setting, spec):
    script, tolerance, chunks = SETTINGS[setting]
    said = check(runs, script, spec, tolerance)
    assert said.startswith("whole logits: ") is not chunks
    assert (lean() > 0) is chunks

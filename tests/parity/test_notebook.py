"""`hf_parallel.notebook_launcher`: a function of a notebook's cell on several processes, as in one."""

import json
from pathlib import Path

import pytest

import hf_parallel
from hf_parallel.ask.config import SpecError
from tests import models
from tests.distributed import run_alone


def cell(out: str) -> None:
    """What stands in a notebook: model, data and Trainer, with nothing of this package."""
    import torch
    from transformers import Trainer, TrainingArguments, set_seed

    set_seed(3)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.arange(11 * 33).view(11, 33) % models.VOCABULARY]
    args = TrainingArguments(
        out, max_steps=3, per_device_train_batch_size=2, learning_rate=0.1, optim="sgd", logging_steps=1,
        report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True,
        gradient_accumulation_steps=2 if world() == 1 else 1,
    )  # fmt: skip
    trainer = Trainer(models.build("qwen3"), args, train_dataset=rows)
    trainer.train()
    if trainer.is_world_process_zero():
        Path(out, "log.json").write_text(json.dumps(trainer.state.log_history))


def world() -> int:
    """Number of data ranks."""
    from accelerate import PartialState

    return PartialState().num_processes


def launch(*args, **options) -> None:
    """As in a notebook that has not imported bitsandbytes yet: this process has, for its patches."""
    import accelerate.launchers

    accelerate.launchers.are_libraries_initialized = lambda name: []
    hf_parallel.notebook_launcher(*args, **options)


def launched(out: str, **options) -> list[dict]:
    """The log of a launch in a process of its own, as that of a notebook."""
    run_alone(launch, cell, (out,), **options)
    return json.loads(Path(out, "log.json").read_text())


def test_a_cell_trains_as_in_one_process(tmp_path):
    alone = launched(str(tmp_path / "one"), num_processes=1)
    both = launched(str(tmp_path / "four"), parallel="tp=2,dp_shard=2")  # four processes: no GPU says otherwise
    assert len(alone) == len(both) == 4
    for one, four in zip(alone[:-1], both[:-1], strict=True):
        assert four["loss"] == pytest.approx(one["loss"], rel=1e-5)
        assert four["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)


def test_one_process_says_what_it_leaves_out(capfd):
    run_alone(launch, print, ("trained",), num_processes=1, parallel="sequence_parallel=false")
    found = capfd.readouterr()
    assert "trained" in found.out
    assert "without sequence_parallel=false" in found.err


def fails() -> None:
    import os

    if os.environ["RANK"] == "1":
        raise ValueError("of the cell")


def failure() -> str:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    with pytest.raises(ChildFailedError) as caught:
        launch(fails, num_processes=2, parallel="tp=2")
    return str(caught.value)


def test_an_error_of_a_rank_is_named():
    text = run_alone(failure)
    assert "ValueError: of the cell" in text
    assert "rank      : 1" in text


def test_refused_before_anything_starts(monkeypatch):
    with pytest.raises(SpecError, match="start 4 processes"):
        hf_parallel.notebook_launcher(fails, num_processes=3, parallel="tp=2,dp_shard=2")
    with pytest.raises(SpecError, match="num_processes=4"):
        hf_parallel.notebook_launcher(fails, parallel="auto")
    monkeypatch.setenv("HF_PARALLEL", "tp=4")
    with pytest.raises(SpecError, match="HF_PARALLEL is tp=4"):
        hf_parallel.notebook_launcher(fails, parallel="tp=2")


def test_without_a_spec_it_is_accelerates(monkeypatch):
    import accelerate

    called = []
    monkeypatch.setattr(accelerate, "notebook_launcher", lambda *args, **options: called.append((args, options)))
    hf_parallel.notebook_launcher(fails, (1,), 2, "bf16", num_nodes=2)
    assert called == [((fails, (1,), 2, "bf16"), {"num_nodes": 2})]

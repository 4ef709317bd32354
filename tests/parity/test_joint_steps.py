"""Gradient accumulation in a pipeline: the batches of a step are one run, with the numbers of one process."""

import json
import math
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, TrainerCallback, default_data_collator

from hf_parallel import parallelize
from hf_parallel.axes.pipeline import engine
from hf_parallel.axes.pipeline.joint import JointStep
from hf_parallel.hooks.trainer import joint_steps
from tests import models
from tests.distributed import run
from tests.rows import Rows
from tests.training import Script, activate, fit, train, trainer_of

UNEVEN = Script(uneven_lengths=True).with_accumulation(3)


def train_counting(spec: str | None, out: str, script: Script, initial: str):
    """The script; `more` has the micro-batches of each batch, for each run of the schedule."""
    counted, run_calls = [], engine.run_calls

    def counting(runner, calls, held):
        counted.append([call.count for call in calls])
        return run_calls(runner, calls, held)

    engine.run_calls = joint_steps.run_calls = counting
    outcome = train(script, initial, out, activate(spec), int(os.environ.get("RANK", 0)))
    outcome.more = counted
    return outcome


def check(runs, script: Script, spec: str) -> list[list[int]]:
    """Compare with one process. Return the micro-batches of each batch, for each run."""
    ranks = runs.compare(train_counting, spec, script, runs.initial(script.model))
    assert all(rank.more == ranks[0].more for rank in ranks)
    return ranks[0].more


@pytest.mark.parametrize("spec", ["pp=2", "pp=4", "pp=2,tp=2", "pp=2,dp_replicate=2", "pp=2,dp_shard=2"])
def test_one_run_per_step(runs, spec):
    """Batches of unlike lengths and label counts; the last step ends with a ragged batch, and runs batch by batch."""
    counts = check(runs, UNEVEN, spec)
    ragged = [] if spec == "pp=4" else [1]  # three rows, which four stages do not run as a schedule
    assert [len(run) for run in counts] == [3, 3, 1, 1, *ragged]
    assert len({count for run in counts[:2] for count in run}) == 1


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v"])
@pytest.mark.parametrize("spec", ["pp=2"])
def test_other_schedules(runs, spec, schedule):
    counts = check(runs, UNEVEN, f"{spec},pipeline_schedule={schedule}")
    assert [len(run) for run in counts[:2]] == [3, 3]


@pytest.mark.parametrize("spec", ["pp=2", "pp=2,dp_shard=2"])
def test_tied_embedding_and_checkpointing(runs, spec):
    """A checkpointed layer computes its forward again, with the mask of its own batch."""
    script = Script(model="qwen3", uneven_lengths=True, arguments=(("gradient_checkpointing", True),))
    assert len(check(runs, script.with_accumulation(2), spec)[0]) == 2


@pytest.mark.parametrize(
    ("script", "setting", "reason"),
    [
        (Script(), "", None),
        (Script(), ",pipeline_schedule=gpipe", "pipeline_schedule=gpipe would keep the activations"),
        (Script(overrides=True), "", "the loss is the script's"),
    ],
    ids=["1f1b", "gpipe", "own loss"],
)
def test_what_is_said(runs, script, setting, reason):
    """The report at the start says whether batches run together, and why not."""
    outcome = runs.parallel(script.with_accumulation(2), f"pp=2{setting}")[0]
    notes = json.loads((Path(outcome.folder).parent / "hf_parallel.json").read_text())["notes"]
    (said,) = [note for note in notes if note.startswith("gradient accumulation")]
    assert (reason or "the pipeline drains once per step") in said
    assert (reason is None) == ("one run of the schedule" in said)


def test_nothing_is_said_without_accumulation(runs):
    outcome = runs.parallel(Script(), "pp=2")[0]
    notes = json.loads((Path(outcome.folder).parent / "hf_parallel.json").read_text())["notes"]
    assert not [note for note in notes if note.startswith("gradient accumulation")]


class Spoils(TrainerCallback):
    """In the second step a module gives what is no number."""

    def __init__(self, model):
        self.bad = False
        model.model.layers[1].mlp.act_fn.register_forward_hook(lambda module, args, output: self.spoilt(output))

    def spoilt(self, output):
        return output * math.nan if self.bad and torch.is_tensor(output) else output

    def on_step_begin(self, args, state, control, **kwargs):
        self.bad = state.global_step == 1


def spoilt(spec: str, out: str, folder: str) -> list[float]:
    """Gradient norms of a training whose second step is bad."""
    data_ranks = activate(spec)
    model = LlamaForCausalLM.from_pretrained(folder)
    settings = {"max_steps": 3, "gradient_accumulation_steps": 2}
    more = {"callbacks": [Spoils(model)], "train_dataset": Rows(64, 3)}
    return [log["grad_norm"] for log in fit(*trainer_of(model, out, data_ranks, settings, **more)).logs]


def test_a_bad_step_is_searched_batch_by_batch(runs, capfd, tmp_path):
    """Its batches are computed once more, one after the other; the step after it is one run again."""
    norms = run(spoilt, 2, "pp=2,nan_action=skip", str(tmp_path), runs.initial("llama"), init=False)[0]
    assert [math.isfinite(norm) for norm in norms] == [True, False, True]
    assert "micro-batch 1 of 2" in capfd.readouterr().err


def kept(rows):
    """A collator that leaves rows out by their first token, so that data ranks have unlike numbers of them."""
    return default_data_collator([row for row in rows if row["input_ids"][0] % 8 > 2])


def train_kept(spec: str | None, out: str, folder: str):
    """Three steps of two batches; `more` has the rows of each, and the micro-batches of each for each run."""
    counted, rows, run_calls = [], [], engine.run_calls

    def counting(runner, calls, held):
        counted.append([call.count for call in calls])
        return run_calls(runner, calls, held)

    def noting(batch):
        found = kept(batch)
        rows.append(len(found["input_ids"]))
        return found

    engine.run_calls = joint_steps.run_calls = counting
    data_ranks = activate(spec)
    settings = {"max_steps": 3, "gradient_accumulation_steps": 2}
    more = {"data_collator": noting, "train_dataset": Rows(64, 3)}
    model = LlamaForCausalLM.from_pretrained(folder)
    outcome = fit(*trainer_of(model, out, data_ranks, settings, **more), f"{out}/saved")
    outcome.more = rows, counted
    return outcome


@pytest.mark.parametrize("spec", ["pp=2,dp_shard=2", "pp=2,dp_replicate=2", "pp=2,dp_shard=2,zero_stage=1"])
def test_data_ranks_with_unlike_numbers_of_rows(runs, spec):
    """All data ranks run a step's batches together, or none does, with the numbers of one process."""
    ranks = runs.compare(train_kept, spec, runs.initial("llama"))
    assert len({tuple(rank.more[0]) for rank in ranks}) == 2
    assert len({len(rank.more[1]) for rank in ranks}) == 1


def losses_of_calls(spec: str) -> list[list[float]]:
    """The losses of three batches of unlike lengths, run apart and together."""
    model = parallelize(models.build("llama").train(), spec)
    pipeline, generator = model._hf_parallel.pipeline, torch.Generator().manual_seed(3)
    batches = [torch.randint(0, models.VOCABULARY, (4, length), generator=generator) for length in (33, 7, 16)]
    apart = [float(model(input_ids=tokens, labels=tokens).loss) for tokens in batches]
    with pipeline.announcing() as calls:
        for tokens in batches:
            model(input_ids=tokens, labels=tokens)
    pipeline.joint = JointStep(list(calls), partial(engine.run_calls, pipeline, held=None))
    return [apart, [float(model(input_ids=tokens, labels=tokens).loss) for tokens in batches]]


def test_each_call_has_its_own_loss():
    for apart, together in run(losses_of_calls, 2, "pp=2"):
        assert together == pytest.approx(apart, rel=1e-6)
        assert len({round(loss, 4) for loss in apart}) == 3

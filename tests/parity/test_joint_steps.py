"""Gradient accumulation in a pipeline: the batches of a step are one run, with the numbers of one process."""

import dataclasses
import json
import math
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, default_data_collator

from hf_parallel import parallelize
from hf_parallel.axes.pipeline import engine
from hf_parallel.axes.pipeline.joint import JointStep
from hf_parallel.hooks.trainer import joint_steps
from tests import models
from tests.distributed import run
from tests.parity.test_chimera import Plain
from tests.parity.test_delayed_updates import ADAM, CASES, STEPS, Case, script
from tests.rows import Rows, data, pad
from tests.training import (
    Outcome,
    Script,
    activate,
    axes,
    fit,
    key_differences,
    none,
    own_loss,
    train,
    trainer_of,
    weight_differences,
)

UNEVEN = Script(uneven_lengths=True).with_accumulation(3)


def counting_runs() -> list[list[int]]:
    """The micro-batches of each batch, for each run of the schedule from now on."""
    counted, run_calls = [], engine.run_calls

    def counting(runner, calls, held):
        counted.append([call.count for call in calls])
        return run_calls(runner, calls, held)

    engine.run_calls = joint_steps.run_calls = counting
    return counted


def train_counting(spec: str | None, out: str, script: Script, initial: str):
    """The script; `more` has the micro-batches of each batch, for each run of the schedule."""
    counted = counting_runs()
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


def script_counting(spec: str | None, out: str, case: Case, initial: str) -> Outcome:
    """Two epochs of six steps, the last one ragged, with evaluations; `more` also has the batches of each run."""
    counted = counting_runs()
    outcome = script(spec, out, case, initial)
    outcome.more = outcome.more, [len(run) for run in counted]
    return outcome


def check_kind(runs, case: Case, spec: str) -> list[Outcome]:
    """Compare with one process, evaluations too; the steps of an epoch but the ragged one are one run each."""
    initial = runs.initial("llama", **({"tie_word_embeddings": True} if case.model == "tied" else {}))
    ranks = runs.compare(script_counting, spec, case, initial, tolerance=case.tolerance)
    evaluations, _ = runs.alone(script_counting, case, initial).more
    for rank in ranks:
        assert rank.more[0] == pytest.approx(evaluations, rel=case.tolerance.eval_loss)
        assert rank.more[1].count(case.accumulation) == 2 * (STEPS - 1)
    return ranks


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("spec", ["pp=2", "pp=4", "pp=2,tp=2", "pp=2,dp_replicate=2"])
def test_kinds_of_training(runs, spec, name):
    """Clipping, AdamW, checkpointing, a tied vocabulary, adapters and bf16."""
    check_kind(runs, Plain(**{**vars(CASES[name]), "accumulation": 2}), spec)


@pytest.mark.parametrize("other", ["pp=4", None])
def test_resume(runs, other):
    """A run goes on from a save, under the same and under another layout."""
    case = Plain(accumulation=2, saves=(4,), arguments=ADAM)
    (first, *_) = check_kind(runs, case, "pp=2")
    again = dataclasses.replace(case, resume=str(Path(first.folder).parent / "checkpoint-4"))
    layout = other or "pp=2"
    call = partial(script, layout, runs._folder(), again, runs.initial("llama"))
    resumed = run(call, axes(layout)["world"], init=False)[0]
    none(weight_differences(resumed.folder, first.folder, 1e-5 if other else 0.0))


@pytest.mark.parametrize("own", [{"overrides": True}, {"own_loss": True}], ids=["compute_loss", "compute_loss_func"])
@pytest.mark.parametrize("spec", ["pp=2", "pp=4", "pp=2,tp=2", "pp=2,dp_replicate=2", "pp=2,dp_shard=2"])
def test_losses_of_the_script(runs, spec, own):
    """The first step shows how the loss may be cut; the second is one run, the last ends with a ragged batch."""
    counts = check(runs, dataclasses.replace(UNEVEN, **own), spec)
    assert [len(run) for run in counts] == [1, 1, 3, 1, 1]


def trl_counting(*args) -> Outcome:
    """A script of TRL; the outcome also says how many batches each run of the schedule had."""
    from tests.trl_scripts import script

    counted = counting_runs()
    outcome = script(*args)
    outcome.runs = [len(run) for run in counted]
    return outcome


#: What SFT and DPO say of their batches.
TRL = {
    "sft": ("text", "adds up over micro-batches: 1f1b from now on\n"),
    "dpo": ("preference", "models without gradients"),
}


@pytest.mark.parametrize(
    ("name", "spec", "runs"),
    [("sft", "pp=2", [1, 2, 2]), ("sft", "pp=2,dp_shard=2", [1, 2, 2]), ("dpo", "pp=2", 5 * [1])],
)
def test_losses_of_trl(trl_runs, capfd, name, spec, runs):
    """Batches of SFT run together from the second step on. DPO's reference runs before each batch, which is said."""
    from tests.trl_scripts import log_differences

    (data, said), flags = TRL[name], "--gradient_accumulation_steps 2 --max_steps 3"
    reference = trl_runs.reference(name, data, flags)
    ranks = trl_runs.run(axes(spec)["world"], name, data, flags, spec, how=(trl_counting,))
    assert said in capfd.readouterr().err
    for rank in ranks:
        assert rank.runs == runs
        for logs in zip(rank.logs, reference.logs, strict=True):
            none(log_differences(*logs, True, 1e-4))
    none(key_differences([rank.gradient_keys for rank in ranks], reference.gradient_keys))
    none(weight_differences(ranks[0].folder, reference.folder, 2e-5))


class Counts(Trainer):
    """A trainer whose loss logs, and weighs the last batch of a step otherwise."""

    def loss_of(self, outputs, labels, items):
        return own_loss(outputs, labels, items)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        loss = self.loss_of(outputs, inputs["labels"], num_items_in_batch)
        loss = loss * (2 if self.accelerator.sync_gradients else 1)
        self.log({"own": loss.detach().item(), "syncs": float(self.accelerator.sync_gradients)})
        return (loss, outputs) if return_outputs else loss


class Means(Counts):
    """Its loss is the model's mean over the targets of one batch."""

    def loss_of(self, outputs, labels, items):
        return outputs["loss"]


class Own(TrainerCallback):
    """Keeps what the loss logs."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "own" in logs:
            self.logs.append((logs["own"], logs["syncs"]))


class Looks(TrainerCallback):
    """Looks at the gradients between the batches of a step."""

    def __init__(self):
        self.logs = []

    def on_substep_end(self, args, state, control, model=None, **kwargs):
        self.logs.append(all(p.grad is not None for p in model.parameters()))


def train_logging(spec: str | None, out: str, folder: str, kind: type[Trainer], callback: type[TrainerCallback] = Own):
    """Four steps of three batches; `more` has what the loss or a callback notes, batch by batch."""
    data_ranks, own = activate(spec), callback()
    model = LlamaForCausalLM.from_pretrained(folder)
    settings = {"max_steps": 4, "gradient_accumulation_steps": 3}
    more = {"train_dataset": data("llama", 96, 11, uneven_lengths=True), "data_collator": pad}
    made = trainer_of(model, out, data_ranks, settings, kind, callbacks=[own], **more)
    outcome = fit(*made, f"{out}/saved")
    outcome.more = own.logs
    return outcome


@pytest.mark.parametrize("kind", [Counts, Means])
@pytest.mark.parametrize("spec", ["pp=2"])
def test_a_loss_knows_its_place_in_the_step(runs, spec, kind):
    """A loss logs, and reads whether gradients are complete. Micro-batches of a batch are one entry, their mean."""
    initial = runs.initial("llama")
    ranks = runs.compare(train_logging, f"{spec},pipeline_microbatches=4", initial, kind)
    expected = runs.alone(train_logging, initial, kind).more
    assert [syncs for _, syncs in expected] == 4 * [0.0, 0.0, 1.0]
    for rank in ranks:
        assert [syncs for _, syncs in rank.more] == [syncs for _, syncs in expected]
        parts = [1 if i in (0, 11) else 4 for i in range(12)]  # the first batch, and the last of a loader, are not cut
        assert [loss * count for (loss, _), count in zip(rank.more, parts, strict=True)] == pytest.approx(
            [loss for loss, _ in expected], rel=1e-5
        )


def test_a_callback_sees_gradients_between_batches(runs):
    """Then batches run one by one, and the report says why."""
    ranks = runs.compare(train_logging, "pp=2", runs.initial("llama"), Trainer, Looks)
    notes = json.loads((Path(ranks[0].folder).parent / "hf_parallel.json").read_text())["notes"]
    assert any("Looks looks at gradients between them" in note for note in notes)
    assert [rank.more for rank in ranks] == 2 * [8 * [True]]


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
        (Script(overrides=True), "", None),
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

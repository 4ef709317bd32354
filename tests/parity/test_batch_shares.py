"""`batch_shares`: data ranks have unlike parts of each batch, and the numbers of one process."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer

from tests.distributed import RankFailure, run
from tests.refusals import pattern_of_refusal
from tests.resuming import ONE, STEPS, STOP, log_differences, trained
from tests.rows import Rows, pad
from tests.training import Outcome, Script, Tolerance, activate, fit, none, spec_id, trainer_of

SPECS = (
    "dp_shard=2,batch_shares=3:1",
    "dp_replicate=2,batch_shares=1:3",
    "dp_replicate=2,dp_shard=2,batch_shares=3:1:2:2",
    *("dp_shard=4,batch_shares=2:2:1:1", "dp_shard=4,batch_shares=1:1:1:0.5", "dp_replicate=4,batch_shares=3:3:2:2"),
    *(f"dp_shard=2,batch_shares=5:2,zero_stage={stage}" for stage in (0, 1, 2)),
)
#: Of a model in fp64 whose own loss, the counts of targets, and what is logged are in fp32.
FP64 = Tolerance(loss=1e-6, grad_norm=1e-6, eval_loss=1e-6, predictions=1e-6, weights=1e-7)
#: Of a script's loss in fp64 whose weights are powers of two: nothing is rounded to fp32 but what is logged.
EXACT = Tolerance(loss=1e-6, grad_norm=1e-6, eval_loss=1e-6, predictions=1e-10, weights=1e-12)
#: Of AdamW, which divides by the size of gradients, clipped by a norm in fp32.
ADAM = Tolerance(loss=1e-6, grad_norm=1e-6, eval_loss=1e-6, predictions=1e-4, weights=1e-5)
#: Of AdamW in fp32, relative, as `TOLERANCE` of tests/parity/test_resume.py.
RESUMED = 2e-5


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_same_numbers_as_one_process(runs, accumulation, spec):
    runs.check(Script().with_accumulation(accumulation), spec)


#: Model and layout; two data ranks of several ranks each, or experts that tokens of all data ranks meet at.
PRODUCTS = [
    ("llama", "tp=2,dp_shard=2,batch_shares=3:1"),
    ("llama", "cp=2,dp_shard=2,batch_shares=3:1"),
    ("llama", "cp=2,dp_replicate=2,batch_shares=1:3"),
    ("qwen3_moe", "dp_shard=2,ep=2,batch_shares=3:1"),
    ("mixtral_balanced", "dp_shard=2,batch_shares=3:1"),
    ("mixtral_balanced", "dp_shard=2,ep=2,batch_shares=3:1"),
    # 6 and 2 micro-batches of an example; with numbers that divide neither part, examples that do not count fill both
    ("llama", "pp=2,dp_shard=2,batch_shares=3:1"),
    ("llama", "pp=2,dp_replicate=2,batch_shares=3:1,pipeline_microbatches=4"),
    ("llama", "pp=2,dp_shard=2,batch_shares=5:2,pipeline_schedule=interleaved_1f1b"),
    ("qwen3_moe", "pp=2,dp_shard=2,ep=2,batch_shares=3:1,pipeline_microbatches=2"),
    ("mixtral_balanced", "pp=2,dp_shard=2,ep=2,batch_shares=3:1,pipeline_microbatches=2"),
    ("mixtral_balanced", "pp=2,dp_replicate=2,batch_shares=3:1"),
    ("llama", "tp=2,pp=2,dp_shard=2,batch_shares=3:1"),
    ("bert", "dp_shard=2,batch_shares=3:1"),
    ("llama", "tp=2,dp_shard=2,batch_shares=auto"),
    ("llama", "pp=2,dp_replicate=2,batch_shares=auto"),
]


@pytest.mark.parametrize(("model", "spec"), PRODUCTS, ids=spec_id)
def test_products(runs, model, spec):
    runs.check(Script(model), spec)


# ---- what a script may do otherwise ---------------------------------------------------------------------------------


class MeanOfExamples(Trainer):
    """A user's loss: the mean over examples of the mean over each one's targets, whatever their number."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        targets = inputs["labels"][:, 1:]
        each = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].transpose(1, 2), targets, reduction="none")
        loss = (each.sum(1) / (targets != -100).sum(1)).mean()
        return (loss, outputs) if return_outputs else loss


class MeanOfTargets(Trainer):
    """A user's loss: torch's mean over the targets of the batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, targets)
        return (loss, outputs) if return_outputs else loss


def script(spec: str | None, out: str, folder: str, kind: type[Trainer], rows: int, settings: tuple) -> Outcome:
    """In fp64, with examples of unlike lengths; weights are compared as they are."""
    ranks = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    sets = {"train_dataset": Rows(rows, 11, uneven_lengths=True), "eval_dataset": Rows(13, 12, uneven_lengths=True)}
    changes = {"max_grad_norm": 0.0, **dict(settings)}
    made = trainer_of(model, out, ranks, changes, kind, data_collator=pad, **sets)
    return fit(*made, f"{out}/saved")


#: Name -> trainer, examples, what the script says besides.
SCRIPTS: dict[str, tuple[type[Trainer], int, dict]] = {
    "mean of examples": (MeanOfExamples, 22, {}),
    "mean of examples, accumulated": (MeanOfExamples, 37, {"gradient_accumulation_steps": 2}),
    "mean of targets": (MeanOfTargets, 22, {}),
    "label smoothing": (Trainer, 22, {"label_smoothing_factor": 0.1}),
    "one example left": (Trainer, 17, {"num_train_epochs": 2}),
    "two examples left": (MeanOfExamples, 18, {}),
    "three examples left": (MeanOfExamples, 19, {"gradient_accumulation_steps": 2}),
    "less than a batch": (Trainer, 3, {"num_train_epochs": 2}),
    "a whole last batch": (MeanOfExamples, 16, {}),
    "drop last": (MeanOfExamples, 22, {"dataloader_drop_last": True}),
    "by length, with workers": (
        Trainer,
        39,
        {
            **{"train_sampling_strategy": "group_by_length", "dataloader_num_workers": 2},
            **{"gradient_accumulation_steps": 2, "num_train_epochs": 2, "dataloader_prefetch_factor": 3},
        },
    ),
    "clipped AdamW": (Trainer, 22, {"optim": "adamw_torch", "learning_rate": 1e-3, "max_grad_norm": 0.1}),
}
LIMITS = {"a whole last batch": EXACT, "clipped AdamW": ADAM}


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[2]], ids=spec_id)
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(runs, name, spec):
    kind, rows, settings = SCRIPTS[name]
    runs.compare(
        script, spec, runs.initial("llama"), kind, rows, tuple(settings.items()), tolerance=LIMITS.get(name, FP64)
    )


def crowded(spec: str | None, out: str, folder: str) -> Outcome:
    """Batches of 32 examples in fp64, three to a step; the last has 5."""
    ranks = activate(spec)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    sets = {"train_dataset": Rows(69, 11, uneven_lengths=True), "eval_dataset": Rows(37, 12, uneven_lengths=True)}
    changes = {"max_grad_norm": 0.0, "gradient_accumulation_steps": 3, "num_train_epochs": 2}
    changes |= dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), 32 // ranks)
    return fit(*trainer_of(model, out, ranks, changes, MeanOfExamples, data_collator=pad, **sets), f"{out}/saved")


def test_one_rank_has_nearly_all(runs):
    """1, 1, 1 and 29 examples."""
    runs.compare(crowded, "dp_shard=4,batch_shares=1:1:1:29", runs.initial("llama"), tolerance=FP64)


class ModelsLoss(Trainer):
    """A user's loss: the model's own, called without Trainer's count, and twice that."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (2 * outputs.loss, outputs) if return_outputs else 2 * outputs.loss


#: Losses of scripts in pipelines: scheduled where data ranks have as many micro-batches, else of whole batches.
SCHEDULED = ("pp=2,dp_shard=2,batch_shares=3:1,pipeline_microbatches=2", "pp=2,dp_shard=2,batch_shares=3:1")


@pytest.mark.parametrize("spec", SCHEDULED, ids=spec_id)
@pytest.mark.parametrize("kind", [MeanOfExamples, MeanOfTargets, ModelsLoss])
def test_losses_of_scripts_in_pipelines(runs, kind, spec):
    runs.compare(script, spec, runs.initial("llama"), kind, 22, (), tolerance=FP64)


@pytest.mark.parametrize("spec", SCHEDULED, ids=spec_id)
@pytest.mark.parametrize("kind", [{"own_loss": True}, {"overrides": True}], ids=str)
def test_sums_of_scripts_in_pipelines(runs, kind, spec):
    runs.check(Script(**kind).with_accumulation(2), spec)


@pytest.mark.parametrize("spec", ["dp_shard=2,batch_shares=3:1", "tp=2,dp_replicate=2,batch_shares=1:3"], ids=spec_id)
def test_streams(runs, spec):
    """Rank 0 reads for all; the last batch, of 6 examples, is shared out evenly."""
    runs.check(Script(stream=True), spec)


# ---- what is refused ------------------------------------------------------------------------------------------------


def start(spec: str, out: str, folder: str, settings: dict) -> None:
    ranks, rows = activate(spec), Rows(8, 1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer_of(model, out, ranks, settings, train_dataset=rows, eval_dataset=rows)


#: Of a batch of 2 or 3 examples for each of two data ranks, shared 9:1.
EVALUATES = {"eval_strategy": "steps", "eval_steps": 1, "per_device_train_batch_size": 5}
SMALL = [("per_device_train_batch_size", 2, {}), ("per_device_eval_batch_size", 3, EVALUATES)]


@pytest.mark.parametrize(("name", "value", "others"), SMALL)
def test_a_rank_without_an_example(runs, tmp_path, name, value, others):
    given = start, 2, "dp_shard=2,batch_shares=9:1", str(tmp_path), runs.initial("llama")
    with pytest.raises(
        RankFailure, match=pattern_of_refusal("batch_shares=9:1", f"{name}={value}", works=f"{name}=5 works")
    ):
        run(*given, {**others, name: value}, init=False)
    run(*given, {**others, name: 5}, init=False)


def test_micro_batches_that_meet_at_experts(runs, tmp_path):
    """6 and 2 examples are 6 and 2 micro-batches, or 2 and 2, as the case among the products has it."""
    given = start, 4, "pp=2,dp_shard=2,ep=2,batch_shares=3:1", str(tmp_path), runs.initial("qwen3_moe"), {}
    line = pattern_of_refusal("batch_shares=3:1", 6, 2, "ep_size=2", works="pipeline_microbatches=2 works")
    with pytest.raises(RankFailure, match=line):
        run(*given, init=False)


def test_room_of_experts(runs, tmp_path):
    spec, model = "dp_shard=2,batch_shares=3:1,expert_capacity_factor=1.25", runs.initial("mixtral")
    line = pattern_of_refusal("batch_shares=3:1", "expert_capacity_factor=1.25", works="batch_shares=even works")
    with pytest.raises(RankFailure, match=line):
        run(start, 2, spec, str(tmp_path), model, {}, init=False)


# ---- a run that goes on under other shares --------------------------------------------------------------------------


@pytest.mark.parametrize("others", [{"dataloader_num_workers": 2}, {"stream": True, "max_steps": STEPS}], ids=str)
def test_resumes_under_other_shares_and_layouts(runs, tmp_path, others):
    """In the middle of the second epoch, against one process that never stopped.

    Plain Trainer itself does not resume a stream where it stopped.
    """
    script = {"folder": runs.initial("llama"), **others}
    whole = trained(ONE, {**script, "out": str(tmp_path / "one")})[0]
    first = trained("dp_shard=2,batch_shares=3:1", {**script, "out": str(tmp_path / "first")})[0]
    found = log_differences(first, whole, range(1, STEPS + 1), RESUMED)
    for spec in (
        *([ONE] if "stream" not in others else []),
        "dp_shard=2",
        "dp_shard=2,batch_shares=2:5",
        "tp=2,dp_replicate=2,batch_shares=1:3",
    ):
        job = {**script, "out": str(tmp_path / spec_id(spec)), "resume": f"{first.folder}/checkpoint-{STOP}"}
        texts = log_differences(trained(spec, job)[0], whole, range(STOP + 1, STEPS + 1), RESUMED)
        found += [f"{spec}: {text}" for text in texts]
    none(found)

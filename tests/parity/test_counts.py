"""What is counted over data ranks: targets of every head, counts that scripts use themselves, rows of ragged batches.

Each layout runs all scripts of a group in one fork; the reference is one process.
"""

import pytest
from peft import LoraConfig, get_peft_model
from transformers import DataCollatorWithFlattening, Trainer

from tests import counted_scripts as scripts
from tests import models
from tests.counted_scripts import Counted, encoder
from tests.distributed import run, run_alone
from tests.rows import Rows
from tests.training import activate, axes, none, number_differences, trainer_of

TWICE = {"gradient_accumulation_steps": 2}
METRICS = {"include_for_metrics": ["inputs", "loss"]}
GENERATES = {"predict_with_generate": True}


def joined(**flags) -> dict:
    """Options of a trainer whose batches are one row without padding."""
    return {"data_collator": DataCollatorWithFlattening(**flags)}


GROUPS = {
    # Who weights a causal model's loss?
    "trainers": {
        "returns": Counted(scripts.llama, scripts.causal, scripts.Returns),
        "weights": Counted(scripts.llama, scripts.causal, scripts.Weights),
        "divides": Counted(scripts.llama, scripts.causal, scripts.Divides, arguments=TWICE, rows=27),
        "multiplies": Counted(scripts.llama, scripts.causal, scripts.Multiplies),
        "passes on": Counted(scripts.llama, scripts.causal, scripts.PassesOn),
        "looks": Counted(scripts.llama, scripts.causal, scripts.Looks),
        "twice": Counted(scripts.llama, scripts.causal, scripts.Twice),
        "mean": Counted(scripts.llama, scripts.causal, scripts.Mean),
        "by hand": Counted(scripts.llama, scripts.causal, scripts.ReadsAhead, arguments={"learning_rate": 0.01}),
        "function": Counted(scripts.llama, scripts.causal, options={"compute_loss_func": scripts.own_mean}),
        "predicts": Counted(scripts.llama, scripts.causal, scripts.Predicts, predicts=True),
    },
    # Heads that ignore the count: one process takes the mean of each micro-batch.
    "heads": {
        "masked": Counted(lambda: encoder("MaskedLM"), scripts.masked),
        "tokens": Counted(lambda: encoder("TokenClassification"), scripts.tagged),
        "answers": Counted(lambda: encoder("QuestionAnswering", num_labels=2), scripts.answered),
        "answers twice": Counted(
            lambda: encoder("QuestionAnswering", num_labels=2), scripts.answered, rows=27, arguments=TWICE
        ),
        "classes": Counted(lambda: encoder("SequenceClassification"), scripts.classed),
        "ratings": Counted(lambda: encoder("SequenceClassification", num_labels=1), scripts.rated),
        "class weights": Counted(lambda: encoder("SequenceClassification"), scripts.classed, scripts.ClassWeights),
        "unheard": Counted(scripts.unheard, scripts.classed),
        "t5": Counted(scripts.t5, scripts.translated),
        "masked passed on": Counted(lambda: encoder("MaskedLM"), scripts.masked, scripts.PassesOn),
    },
    # In a pipeline the last stage computes the loss: what fits is scheduled, the rest runs on whole batches.
    "stages": {
        "weights": Counted(scripts.llama, scripts.causal, scripts.Weights),
        "looks": Counted(scripts.llama, scripts.causal, scripts.Looks),
        "twice": Counted(scripts.llama, scripts.causal, scripts.Twice),
        "mean": Counted(scripts.llama, scripts.causal, scripts.Mean),
        "tokens": Counted(lambda: scripts.decoder("TokenClassification"), scripts.tagged),
        "class weights": Counted(
            lambda: scripts.decoder("SequenceClassification"), scripts.classed, scripts.ClassWeights
        ),
    },
    # 20 rows: four in the last batch, which data ranks fill by repeating others.
    "joined": {
        "positions": Counted(scripts.llama, scripts.bare, rows=20, options=joined()),
        "boundaries": Counted(scripts.llama, scripts.bare, rows=20, options=joined(return_flash_attn_kwargs=True)),
        "numbers": Counted(scripts.llama, scripts.bare, rows=19, options=joined(return_seq_idx=True)),
    },
    # Every way out of an evaluation.
    "evaluations": {
        "generates": Counted(scripts.t5, scripts.translated, arguments=GENERATES, predicts=True),
        "metrics": Counted(scripts.t5, scripts.translated, arguments=METRICS, predicts=True),
        "generates metrics": Counted(scripts.t5, scripts.translated, arguments=GENERATES | METRICS, predicts=True),
        "batches": Counted(
            scripts.t5, scripts.translated, arguments=METRICS | {"batch_eval_metrics": True}, predicts=True
        ),
    },
}


def all_of(group: str, spec: str | None) -> dict[str, list[float]]:
    """The numbers of each script of a group, in one process or on one rank."""
    data_ranks, found = activate(spec), {}
    for name, script in GROUPS[group].items():
        if script.arguments.get("include_for_metrics"):
            script.options["compute_metrics"] = scripts.Sums()
        found[name] = scripts.trained(script, data_ranks)
    return found


#: What is said of scripts of a group where nobody can know what a loss is a mean over, and how often.
SAID = {
    "trainers": ("taken for a mean over rows", 0),
    "heads": ("what the loss of Unheard is a mean over is not known", 1),
}


@pytest.fixture(scope="module")
def references():
    """What one process does, by group."""
    made: dict = {}

    def reference(group: str) -> dict[str, list[float]]:
        if group not in made:
            made[group] = run_alone(all_of, group, None)
        return made[group]

    return reference


CASES = [
    ("trainers", "dp_shard=2"),
    ("heads", "dp_shard=2"),
    ("stages", "pp=2,dp_shard=2"),
    ("joined", "dp_replicate=4"),
    ("evaluations", "dp_shard=4"),
]


@pytest.mark.parametrize(("group", "spec"), CASES)
def test_same_numbers_as_one_process(references, group, spec, capfd):
    """Relative 1e-5: sums of fp32 in another order; a row too many among 19 moves a loss by 1e-3 or more."""
    expected = references(group)
    for rank, numbers in enumerate(run(all_of, axes(spec)["world"], group, spec, init=False, timeout=300)):
        found = {name: number_differences(numbers[name], theirs)[:6] for name, theirs in expected.items()}
        none([f"rank {rank}: {name}: {line}" for name, lines in found.items() for line in lines])
    if group in SAID:
        words, times = SAID[group]
        assert capfd.readouterr().err.count(words) == times


class CountsItself(Trainer):
    """A script's own count of floating-point operations."""

    def floating_point_ops(self, inputs):
        return 7.0 * len(inputs["input_ids"])


def count_whole(spec: str | None, out: str, adapters: bool) -> tuple[float, int]:
    """What Trainer says of a whole training, and of the whole model."""
    data_ranks, model = activate(spec), models.build("qwen3")  # tied
    model = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj"])) if adapters else model
    trainer, _ = trainer_of(model, out, data_ranks, {}, CountsItself, train_dataset=Rows(22, 3))
    trainer.train()
    return trainer.state.total_flos, trainer.get_num_trainable_parameters()


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("spec", ["tp=2", "pp=2", "dp_shard=2"])
def test_operations_and_parameters_are_those_of_one_process(spec, adapters, tmp_path):
    expected = run_alone(count_whole, None, str(tmp_path / "one"), adapters)
    assert expected[0] == 7 * 22
    assert run(count_whole, 2, spec, str(tmp_path / "many"), adapters, init=False) == [expected] * 2

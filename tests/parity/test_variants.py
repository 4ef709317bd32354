"""What a script may do differently from the plain one, each against the same script in one process."""

import pytest

from tests.training import (
    BF16,
    Script,
    Tolerance,
    check_plainly_loaded,
    differences,
    none,
    over,
    weight_differences,
    weights,
)

PIPELINES = ("tp=2,pp=2", "pp=2,dp_shard=2")


@over("BERT", "dp_shard=2", "dp_replicate=2")
@pytest.mark.parametrize("accumulation", [1, 2])
def test_bert_whose_loss_knows_no_token_count(runs, spec, accumulation):
    """Plain Trainer multiplies this loss by the number of processes; rows, not tokens, weight its ranks."""
    runs.check(Script(model="bert").with_accumulation(accumulation), spec)


@over("IterableDataset", "tp=2,dp_shard=2")
@pytest.mark.parametrize("rows", [24, 22])
def test_iterable_dataset(runs, spec, rows):
    """Each data rank its own rows, ranks of one model the same ones; with 22 rows the last batch is ragged."""
    runs.check(Script(stream=True, rows=rows), spec)


@over("IterableDataset", "dp_shard=2", "pp=2,dp_shard=2")
@pytest.mark.parametrize("workers", [0, 1])
def test_streams_that_each_process_reads(runs, spec, workers):
    """A worker process tells what only fills its last batch; the loss of an evaluation is cut as in one process."""
    given = (("dataloader_num_workers", workers), ("accelerator_config", (("dispatch_batches", False),)))
    runs.check(Script(stream=True, uneven_lengths=True, arguments=given), spec)


@over("Llama", "tp=2", "dp_shard=2", *PIPELINES)
def test_rows_of_unequal_length(runs, spec):
    """A collator that pads per batch: lengths differ between steps and between data ranks."""
    runs.check(Script(uneven_lengths=True), spec)


@pytest.mark.parametrize("rows", [20, 21])
@over("Llama", "dp_shard=2", "pp=2,dp_shard=2")
def test_last_batch_leaves_a_data_rank_one_row_or_none(runs, spec, rows):
    """Fewer rows than stages: all data ranks must still run the same collectives."""
    runs.check(Script(rows=rows), spec)


@over("bf16", *PIPELINES, "tp=2", "dp_shard=2")
def test_bf16(runs, spec):
    runs.check(Script(arguments=(("bf16", True),)), spec, BF16)


@over("checkpointing", *PIPELINES, "tp=2,dp_shard=2")
def test_gradient_checkpointing(runs, spec):
    runs.check(Script(arguments=(("gradient_checkpointing", True),)), spec)


@over("label smoothing", *PIPELINES)
def test_label_smoothing(runs, spec):
    """The labels are popped before the model sees them, so the smoother must run on the last stage."""
    script = Script(arguments=(("label_smoothing_factor", 0.1),)).with_accumulation(2)
    runs.check(script, spec)


@over("own loss", *PIPELINES, "dp_shard=2")
def test_compute_loss_func(runs, spec):
    runs.check(Script(own_loss=True).with_accumulation(2), spec)


@over("own loss", *PIPELINES, "tp=2,dp_shard=2")
def test_compute_loss_overridden(runs, spec):
    """Gives the labels to the model and reads the logits: whole ones must appear in training."""
    runs.check(Script(model="qwen3", overrides=True).with_accumulation(2), spec)


def test_noise_on_embeddings(runs):
    """NEFTune draws on the first stage alone, and the same on all tp ranks: layouts agree with each other."""
    script = Script(arguments=(("neftune_noise_alpha", 5.0),))
    ranks = [rank for spec in ("pp=2", "tp=2,pp=2") for rank in runs.parallel(script, spec)]
    losses = [[entry["loss"] for entry in rank.logs] for rank in ranks]
    assert all(each == pytest.approx(losses[0], rel=1e-5) for each in losses)
    assert losses[0][0] != pytest.approx(runs.reference(Script()).logs[0]["loss"], rel=1e-3)


@over("Llama", *PIPELINES)
def test_clipping_to_a_small_norm(runs, spec):
    """Every gradient is scaled by ~1/50: a norm that misses a stage or a shard moves all weights."""
    runs.check(Script(arguments=(("max_grad_norm", 0.05),)), spec)


@over("Llama", *PIPELINES)
def test_without_clipping(runs, spec):
    runs.check(Script(arguments=(("max_grad_norm", 0.0),)), spec)


@over("gpipe", *PIPELINES)
def test_gpipe(runs, spec):
    runs.check(Script(), spec + ",pipeline_schedule=gpipe")


@pytest.mark.parametrize("split", ["[1,3]", "[3,1]"])
@over("Llama", "pp=2")
def test_explicit_split(runs, spec, split):
    runs.check(Script(), f"{spec},pipeline_split={split}")


@over("Llama", "pp=2", "pp=2,dp_shard=2")
def test_explicit_microbatches(runs, spec):
    runs.check(Script(), f"{spec},pipeline_microbatches=4")


@over("Llama", "dp_shard=2", "pp=2,dp_shard=2")
def test_zero_stage_2(runs, spec):
    runs.check(Script().with_accumulation(2), f"{spec},zero_stage=2")


@over("from_config", "dp_shard=2", "dp_replicate=2", "tp=2", "pp=2", "tp=2,pp=2,dp_shard=2")
def test_tied_model_from_config(runs, spec):
    runs.check(Script(model="qwen3", route="from_config"), spec)


@over("from_config", "dp_shard=2", "tp=2", "pp=2", "tp=2,pp=2")
def test_unequal_seeds_are_broadcast_from_rank_0(runs, spec):
    """Each rank draws its own weights; the run is the one of rank 0's weights."""
    runs.check(Script(route="unequal"), spec)


@pytest.mark.parametrize("model", ["llama", "qwen3"])
@over("Llama", "tp=2,pp=2", "tp=2,pp=2,dp_shard=2")
def test_plain_transformers_loads_the_saved_folder(runs, model, spec):
    """An ordinary Hub folder: no key missing, none too many, tied weights once, and the same weights again."""
    folder = runs.parallel(Script(model=model), spec)[0].folder
    check_plainly_loaded(folder)
    assert ("lm_head.weight" in weights(folder)) == (model == "llama")


@over("Llama", "tp=2,dp_shard=2")
def test_a_checkpoint_folder_holds_the_weights(runs, spec):
    """`save_strategy` writes what `save_model` writes."""
    saving = (("save_strategy", "steps"), ("save_steps", 3))
    folder = runs.parallel(Script(arguments=saving), spec)[0].folder
    none(weight_differences(folder.replace("/saved", "/checkpoint-3"), folder, 0.0))


def test_a_wrong_layout_would_be_seen(runs):
    """The comparison itself: another learning rate must show in the second step and in the weights."""
    reference = runs.reference(Script())
    other = runs.reference(Script(arguments=(("learning_rate", 0.2),)))
    found = "\n".join(differences([other], reference, Tolerance()))
    assert "loss in step 2" in found
    assert "weight model.layers.0" in found
    assert "step 1" not in found


#: Settings that users combine: the schedule, who reads the rows in which order, when it is evaluated.
SETTINGS = {
    "workers": {
        "optim_args": "momentum=0.9",
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 1,
        "max_grad_norm": 0.1,
        "dataloader_num_workers": 2,
        "dataloader_persistent_workers": True,
        "train_sampling_strategy": "group_by_length",
        "eval_strategy": "steps",
        "eval_steps": 1,
        "eval_on_start": True,
        "eval_accumulation_steps": 1,
    },
    "dispatched": {
        "accelerator_config": (("dispatch_batches", True),),
        "train_sampling_strategy": "sequential",
        "dataloader_drop_last": True,
        "max_steps": 5,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "load_best_model_at_end": True,
    },
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("spec", ["tp=2", "pp=2,dp_shard=2"])
def test_settings_together(runs, spec, name):
    runs.check(Script(arguments=tuple(SETTINGS[name].items()), uneven_lengths=name == "workers"), spec)

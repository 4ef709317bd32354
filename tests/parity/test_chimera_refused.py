"""What `pipeline_schedule=chimera` does not take: each line names the setting, and a value that works."""

import re

import pytest
from transformers import LlamaForSequenceClassification, Trainer

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.spec import SpecError
from hf_parallel.axes.pipeline.schedules import choose_schedule, count_micro_batches
from hf_parallel.hooks.trainer import joint_steps
from hf_parallel.plans.examine import examine
from tests import models
from tests.distributed import RankFailure, run
from tests.refusals import check_way_out
from tests.training import OwnTrainer, follow_trainer_refusal, make_trainer, own_loss

CHIMERA = "pipeline_schedule=chimera"


def make_classifier() -> LlamaForSequenceClassification:
    return LlamaForSequenceClassification(models.llama(pad_token_id=0, num_labels=models.CLASSES))


@pytest.mark.parametrize(
    "setting",
    [
        "pp_size=3",
        "pp_size=7",
        "dp_shard_size=2",
        "cp_size=2",
        "offload=optimizer",
        "compile=regional",
        "precision=fp8",
        "activation_offload=True",
        "tiled_mlp=True",
        "pipeline_virtual_stages=2",
        "pipeline_microbatches=1",
        "pipeline_microbatches=5",
        "pipeline_fill=kfac",
        "pipeline_energy=slack",
        "monitor=noise",
    ],
)
def test_settings(setting):
    """What the line says that works does."""
    pp = "" if setting.startswith("pp_size") else "pp_size=2,"
    with pytest.raises(SpecError) as refused:
        ParallelConfig.parse(f"{pp}{CHIMERA},{setting}")
    said = str(refused.value)
    named = setting if "fill" not in setting and "energy" not in setting else CHIMERA
    assert said.lower().startswith(named.lower())
    works = re.search(r"; (\S+) works$", said)[1]
    works = works if "=" in works else f"{setting.partition('=')[0]}={works}"
    if works.startswith("pipeline_schedule"):
        ParallelConfig.parse(f"{pp}{setting},{works}")
    else:
        ParallelConfig.parse(f"{pp}{CHIMERA},{works}")


@pytest.mark.parametrize(
    ("sizes", "setting"),
    [
        ("pp=2,tp=2", "ep=2"),
        ("pp=2,tp=4", "tp_mesh=2x2"),
        ("pp=2,dp_replicate=2,dp_shard=1", "batch_shares=3:1"),
        ("pp=2", "pipeline_split=3:1"),
        ("pp=2", "pipeline_split=auto"),
    ],
)
def test_settings_of_other_axes(sizes, setting):
    check_way_out(f"{sizes},{CHIMERA},{setting}")


@pytest.mark.parametrize(("rows", "works"), [(5, 4), (2, 4)])
def test_batches_that_do_not_halve(rows, works):
    config = ParallelConfig.parse(f"pp=4,dp_shard=1,{CHIMERA}")
    with pytest.raises(SpecError, match=rf"\b{rows} rows .*\b{works} works"):
        count_micro_batches(rows, config)
    assert count_micro_batches(works, config) == works


@pytest.mark.parametrize("count", [4, 8, 16, 64])
def test_auto_never_picks_it(count):
    config = ParallelConfig.parse(f"pp=4,dp_shard=1,pipeline_schedule=auto,pipeline_microbatches={count}")
    assert choose_schedule(config, 16, False) != "chimera"


@pytest.mark.parametrize("make", [lambda: models.build("mixtral"), make_classifier], ids=["experts", "whole batches"])
def test_models(make):
    """Experts, and losses over whole batches; what the line says that works does."""
    config = ParallelConfig.parse(f"pp=2,dp_shard=1,{CHIMERA}")
    problems = examine(make(), config, 2).problems
    assert problems[0].startswith(CHIMERA)
    works = re.search(r"; (\S+) works$", problems[0])[1]
    assert not examine(make(), ParallelConfig.parse(f"pp=2,dp_shard=1,{works}"), 2).problems


def test_a_model_that_no_pipeline_takes():
    """The line names the way out of the pipeline, not another schedule of it."""
    problems = examine(models.build("bert"), ParallelConfig.parse(f"pp=2,dp_shard=1,{CHIMERA}"), 2).problems
    assert re.search("pp_size=1 .*works", problems[0])


@pytest.mark.parametrize(
    ("kind", "changes", "options", "late", "said"),
    [
        (OwnTrainer, {}, {}, None, "a script's own runs on one"),
        (Trainer, {}, {"compute_loss_func": own_loss}, None, "a script's own runs on one"),
        (Trainer, {"label_smoothing_factor": 0.1}, {}, None, "a script's own runs on one"),
        (Trainer, {"optim": "lomo"}, {}, None, "optim=lomo"),
        (Trainer, {}, {}, joint_steps.check_mirrored_trainer, "fp16=True; bf16=True works"),
    ],
    ids=["compute_loss", "compute_loss_func", "label smoothing", "lomo", "fp16"],
)
def test_trainers(tmp_path, kind, changes, options, late, said):
    """What the line says that works starts."""
    with pytest.raises(RankFailure, match=f"{CHIMERA}: .* works") as failure:
        run(make_trainer, 2, f"pp=2,{CHIMERA}", str(tmp_path), kind, changes, options, late, init=False)
    assert said in str(failure.value)
    works = follow_trainer_refusal(str(failure.value), f"pp=2,{CHIMERA}", changes)
    run(make_trainer, 2, works[0], str(tmp_path), kind, works[1], options, init=False)

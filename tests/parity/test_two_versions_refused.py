"""Schedules without a flush: what they are refused with, and that `auto` never picks them."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import Trainer

from hf_parallel import parallelize
from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.axes.pipeline.schedules import choose_schedule
from hf_parallel.hooks.trainer import delayed_steps
from tests import models
from tests.distributed import RankFailure, run
from tests.refusals import pattern_of_refusal
from tests.training import OwnTrainer, Script, follow_trainer_refusal, make_trainer, own_loss

SCHEDULE = "pipeline_schedule=pipedream_2bw"
STASHED = "pipeline_schedule=pipedream"


@pytest.mark.parametrize(
    "setting",
    [
        "dp_shard_size=2",
        "cp_size=2",
        "offload=optimizer",
        "compile=regional",
        "precision=fp8",
        "activation_offload=True",
        "pipeline_virtual_stages=2",
        "pipeline_microbatches=1",
    ],
)
@pytest.mark.parametrize("schedule", [SCHEDULE, STASHED])
def test_settings_of_one_version(schedule, setting):
    """The line names the setting, and what it says that works does."""
    if schedule == STASHED and setting == "pipeline_microbatches=1":
        setting = "pipeline_microbatches=0"  # one is what its paper has
    with pytest.raises(SpecError) as refused:
        ParallelConfig.parse(f"pp=2,{schedule},{setting}")
    said = str(refused.value)
    assert said.lower().startswith(setting.lower())
    name, _, _ = setting.partition("=")
    works = re.search(r"; (\S+) works$", said)[1]
    works = works if "=" in works else f"{name}={works}"
    ParallelConfig.parse(f"pp=2,{schedule},{works}")


def test_experts_on_ranks_of_their_own():
    with pytest.raises(SpecError, match="ep_size=2: pipeline_schedule=pipedream_2bw"):
        ParallelConfig.parse(f"pp=2,tp=2,ep=2,{SCHEDULE}")


def test_what_remains_is_not_sharded():
    """By default dp_shard takes the remaining processes."""
    with pytest.raises(SpecError, match="dp_replicate_size=-1,dp_shard_size=1 works"):
        ParallelConfig.parse(f"pp=2,{SCHEDULE}").resolve(4)
    assert ParallelConfig.parse(f"pp=2,{SCHEDULE},dp_replicate_size=2,dp_shard_size=1").resolve(4).sharing_size == 1


@pytest.mark.parametrize("count", [4, 8, 16, 64])
def test_auto_never_picks_it(count):
    config = ParallelConfig.parse(f"pp=4,dp_shard=1,pipeline_schedule=auto,pipeline_microbatches={count}")
    assert not choose_schedule(config, 16, False).startswith("pipedream")


class OwnStep(Trainer):
    """A user's subclass."""

    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "changes", "options", "said"),
    [
        (OwnTrainer, {}, {}, "the loss is the script's"),
        (Trainer, {}, {"compute_loss_func": own_loss}, "the loss is the script's"),
        (Trainer, {"label_smoothing_factor": 0.1}, {}, "the loss is the script's"),
        (OwnStep, {}, {}, "OwnStep has its own training_step"),
        (Trainer, {"optim": "lomo"}, {}, "optim=lomo"),
        (Trainer, {"optim": "galore_adamw_layerwise"}, {}, "optim=galore_adamw_layerwise"),
    ],
    ids=["compute_loss", "compute_loss_func", "label smoothing", "training_step", "lomo", "layerwise"],
)
def test_trainers_that_cannot(tmp_path, kind, changes, options, said):
    """What the line says that works starts."""
    with pytest.raises(RankFailure, match="pipeline_schedule=pipedream_2bw") as failure:
        run(make_trainer, 2, f"pp=2,{SCHEDULE}", str(tmp_path), kind, changes, options, init=False)
    assert said in str(failure.value)
    works = follow_trainer_refusal(str(failure.value), f"pp=2,{SCHEDULE}", changes)
    run(make_trainer, 2, works[0], str(tmp_path), kind, works[1], options, init=False)


def test_fp16_cannot(tmp_path):
    with pytest.raises(RankFailure, match=pattern_of_refusal(SCHEDULE, "fp16=True", works="bf16=True works")):
        run(
            make_trainer,
            2,
            f"pp=2,{SCHEDULE}",
            str(tmp_path),
            Trainer,
            {},
            {},
            delayed_steps.check_trainer_for_delay,
            init=False,
        )
    run(make_trainer, 2, f"pp=2,{SCHEDULE}", str(tmp_path), Trainer, {"bf16": True}, {}, init=False)


@pytest.mark.parametrize("schedule", [SCHEDULE, STASHED])
def test_says_that_it_is_another_algorithm(runs, capfd, schedule):
    """Once, on rank 0; the file of facts counts the versions."""
    script, facts = Script(rows=8), []
    for asked in (schedule, "pipeline_schedule=1f1b"):
        outcome = runs.parallel(script, f"pp=2,{asked}")[0]
        facts.append(json.loads((Path(outcome.folder).parent / "hf_parallel.json").read_text()))
    name = schedule.partition("=")[2]
    said = f"pipeline_schedule={name} is another algorithm than training in one process"
    assert capfd.readouterr().err.count(said) == 1
    held, plain = (each["estimated_state_bytes_per_rank"] for each in facts)
    assert held == [size / 2 * 3 for size in plain]  # SGD: two versions of weights, and gradients


def loop(spec: str) -> None:
    """A training loop without Trainer."""
    model = parallelize(models.build("llama").train(), spec)
    tokens = torch.arange(64).view(8, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()


@pytest.mark.parametrize("schedule", [SCHEDULE, STASHED])
def test_loops_do_not_read_ahead(schedule):
    with pytest.raises(RankFailure, match=pattern_of_refusal(schedule, works="pipeline_schedule=1f1b works")):
        run(loop, 2, f"pp=2,{schedule}")
    run(loop, 2, "pp=2,pipeline_schedule=1f1b")

"""`pipeline_fill=kfac`: what it is refused with, each way out tried, and what it says of itself."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer

from hf_parallel import parallelize
from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.ask.keys.pipeline import LOOPED_SCHEDULES, V_SCHEDULES
from hf_parallel.hooks.trainer import joint_steps
from hf_parallel.planner.candidates import to_layout
from hf_parallel.planner.dryrun import dry_run
from hf_parallel.planner.layout import Job
from hf_parallel.planner.memory import predict_memory_of_ranks
from hf_parallel.planner.pipeline import make_stages
from hf_parallel.planner.shape import shape_of
from tests import models
from tests.distributed import RankFailure, run
from tests.refusals import pattern_of_refusal
from tests.rows import Rows
from tests.training import OwnTrainer, activate, arguments_of, follow_trainer_refusal, own_loss

FILL = "pipeline_fill=kfac"
SETTINGS = [
    "dp_shard_size=2",
    "cp_size=2",
    "tp_size=2",
    "offload=optimizer",
    "compile=regional",
    "precision=fp8",
    "activation_checkpointing=full",
    "activation_offload=true",
    "batch_shares=2:1",
    "nan_action=skip",
    "kfac_interval=0",
    "kfac_damping=-1.0",
    *(f"pipeline_schedule={name}" for name in ("pipedream_2bw", "chimera", "auto", *LOOPED_SCHEDULES, *V_SCHEDULES)),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(setting):
    """The line names the setting, and what it says that works does."""
    with pytest.raises(SpecError) as refused:
        ParallelConfig.parse(f"pp=2,{FILL},{setting}")
    said = str(refused.value)
    assert said.startswith(setting)
    works = re.search(r"; (\S+) works$", said)[1]
    assert ParallelConfig.parse(f"pp=2,{FILL},{works}").fills_bubbles


@pytest.mark.parametrize("spec", ["pipeline_fill=kfac", "pp=2,kfac_interval=2", "pp=2,kfac_damping=0.1"])
def test_without_bubbles_or_curvature(spec):
    with pytest.raises(SpecError) as refused:
        ParallelConfig.parse(spec)
    works = re.search(r"; (\S+) works$", str(refused.value))[1]
    ParallelConfig.parse(f"{spec},{works}")


def start(spec: str, out: str, kind: type[Trainer], changes: dict, options: dict, late: dict, name="llama") -> None:
    """A script until its trainer is made."""
    activate(spec)
    arguments = arguments_of(out, **changes)
    trainer = kind(model=models.build(name), args=arguments, train_dataset=Rows(8, 3), **options)
    if late:  # on CPUs it is refused before, with any layout
        vars(trainer.args).update(late)
        joint_steps.check_trainer_for_fill(trainer)


def load_in_four_bits(spec: str, folder: str) -> None:
    """The base of QLoRA."""
    activate(spec)
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)


def test_bases_in_four_bits(runs):
    """Their layers compute from rounded weights; the suggestion loads."""
    pytest.importorskip("bitsandbytes")
    folder = runs.initial("llama", hidden_size=128, intermediate_size=256)
    with pytest.raises(
        RankFailure, match=pattern_of_refusal("pipeline_fill=kfac", "load_in_4bit", works="pipeline_fill=none")
    ):
        run(load_in_four_bits, 2, f"pp=2,{FILL}", folder, init=False)
    run(load_in_four_bits, 2, "pp=2,pipeline_fill=none", folder, init=False)


class OwnStep(Trainer):
    """A user's subclass."""

    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "changes", "options", "late", "said"),
    [
        (OwnTrainer, {}, {}, {}, "the loss is the script's"),
        (Trainer, {}, {"compute_loss_func": own_loss}, {}, "the loss is the script's"),
        (OwnStep, {}, {}, {}, "OwnStep has its own training_step"),
        (Trainer, {}, {}, {"optim": "lomo"}, "optim=lomo"),
        (Trainer, {}, {}, {"fp16": True}, "fp16=True; bf16=True works"),
        (Trainer, {"gradient_checkpointing": True}, {}, {}, "gradient_checkpointing=False works"),
    ],
    ids=["compute_loss", "compute_loss_func", "training_step", "lomo", "fp16", "checkpointing"],
)
def test_trainers_that_cannot(tmp_path, kind, changes, options, late, said):
    """What the line says that works starts."""
    with pytest.raises(RankFailure, match="pipeline_fill=kfac") as failure:
        run(start, 2, f"pp=2,{FILL}", str(tmp_path), kind, changes, options, late, init=False)
    assert said in str(failure.value)
    spec, works = follow_trainer_refusal(str(failure.value), f"pp=2,{FILL}", changes)
    run(start, 2, spec, str(tmp_path), kind, works, options, {}, init=False)


def test_experts_cannot(tmp_path):
    with pytest.raises(
        RankFailure, match=pattern_of_refusal("pipeline_fill=kfac", "experts", works="pipeline_fill=none")
    ):
        run(start, 2, f"pp=2,{FILL}", str(tmp_path), Trainer, {}, {}, {}, "mixtral", init=False)


def loop(spec: str) -> None:
    """A training loop without Trainer."""
    model = parallelize(models.build("llama").train(), spec)
    tokens = torch.arange(64).view(8, 8)
    model(input_ids=tokens, labels=tokens).loss.backward()


def test_loops_tell_of_no_step():
    with pytest.raises(RankFailure, match=pattern_of_refusal("pipeline_fill=kfac", works="pipeline_fill=none works")):
        run(loop, 2, f"pp=2,{FILL}")
    run(loop, 2, "pp=2,pipeline_fill=none")


def test_dry_run_has_no_times():
    with pytest.raises(SpecError, match="pipeline_fill=kfac.*pipeline_fill=none works"):
        dry_run(models.build("llama").config, f"pp=2,{FILL}")


def test_memory_is_planned():
    """Factors four times, and what all linears see of a step."""
    shape, job = shape_of(models.build("llama")), Job(33, 1, 4, engine="hf_parallel")

    def curvature(spec):
        layout = to_layout(ParallelConfig.parse(f"pp=2,dp_shard=1{spec}").resolve(2))
        memories = predict_memory_of_ranks(make_stages(shape, layout, job), layout, job)
        return [memory.kinds.get("curvature") for memory in memories]

    modules = models.build("llama").model.layers[:2].modules()
    linears = [module for module in modules if isinstance(module, torch.nn.Linear)]
    sizes = [(linear.in_features, linear.out_features) for linear in linears]
    expected = sum(16 * (i**2 + o**2) + 33 * 4 * job.width * (i + o) for i, o in sizes)
    assert curvature(f",{FILL}") == [expected, expected]
    assert curvature("") == [None, None]

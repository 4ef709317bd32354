"""The kernel that a plan assumes is what `auto` would be there; what eager and masked ones hold is what runs show."""

import dataclasses
import functools

import pytest

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.keys.layers import TORCH_FLASH
from hf_parallel.planner import make_cluster, shape_of
from hf_parallel.planner.activations import EAGER, FLASH, MASKED, SDPA, Planned, assume_planned
from hf_parallel.planner.advice import explain_attention
from hf_parallel.planner.candidates import Goal
from hf_parallel.planner.choices import predict_choice
from hf_parallel.planner.dryrun.run import dry_run
from hf_parallel.planner.hardware import find_gpu
from hf_parallel.planner.memory import GIB, find_fullest
from hf_parallel.planner.search import count_activations, search
from tests import models
from tests.distributed import run_alone

H100, V100 = "h100-80gb", "v100-32gb"


@pytest.mark.parametrize(
    ("model", "gpu", "precision", "own", "name", "why"),
    [
        ("llama", H100, "bf16", None, TORCH_FLASH, "document by document"),
        ("llama", V100, "bf16", None, "sdpa", "7.0 has no flash kernel"),
        ("llama", H100, "mixed", None, "sdpa", "under autocast"),
        ("llama", H100, "bf16", "eager", "eager", "the script's own choice"),
        ("llama", H100, "bf16", "flash_attention_2", "flash_attention_2", "the script's own choice"),
        ("gemma2", H100, "bf16", None, "eager", "softcapping"),
        ("gpt_oss", H100, "bf16", None, TORCH_FLASH, "windows of 8"),
        ("gemma3", H100, "mixed", None, TORCH_FLASH, "a mask of queries by keys"),
    ],
)
def test_what_auto_would_be_on_the_gpus_of_the_plan(model, gpu, precision, own, name, why):
    config = getattr(models, model)(**({"head_dim": 64} if model.startswith("g") else {"num_attention_heads": 4}))
    found = assume_planned(config, find_gpu(gpu), precision, 4096, own)
    assert found.name == name, found
    assert why in found.why


def test_packs_under_autocast_take_flash_attention():
    """`auto` would leave sdpa, which gets a mask then."""
    config = models.llama()
    plain, packed = (assume_planned(config, find_gpu(H100), "mixed", 512, documents=packs) for packs in (False, True))
    assert (plain.asked, plain.name) == ("auto", "sdpa")
    assert (packed.asked, packed.auto) == (TORCH_FLASH, "sdpa")


@pytest.mark.parametrize(
    ("spec", "documents", "kind"),
    [
        ("dp_shard=2", False, SDPA),
        ("dp_shard=2", True, MASKED),
        ("dp_shard=2,attention=torch_flash", True, FLASH),
        ("dp_shard=2,attention=eager", False, EAGER),
        ("cp=2", True, FLASH),
    ],
)
def test_kinds(spec, documents, kind):
    assert Planned("sdpa", documents=documents).kind(ParallelConfig.parse(spec)) == kind


# ---- against dry runs -----------------------------------------------------------------------------------------------

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
}
CASES = [
    ("llama", "attention=eager", 1024, "bf16"),
    ("llama", "attention=eager", 1024, "fp32"),
    ("llama", "attention=eager,activation_checkpointing=full", 1024, "bf16"),
    ("llama", "attention=eager,activation_checkpointing=selective", 1024, "bf16"),
    ("mistral", "attention=sdpa,activation_checkpointing=selective", 1024, "bf16"),
]


def both(model, spec, seq, precision):
    """GiB planned, and of the dry run."""
    config = getattr(models, model)(**SIZES, **({"sliding_window": 100} if model == "mistral" else {}))
    assert shape_of(config).blocks[0].attentions[0].window == (100 if model == "mistral" else None)
    layout = ParallelConfig.parse(f"dp_shard=4,{spec}").resolve(4)
    ran = dry_run(config, layout, rows=4, seq=seq, precision=precision)
    shape = count_activations(shape_of(config), config, precision)
    goal = Goal(shape, make_cluster("a100-80gb", 4), seq, None, precision, rows=4)
    choice = predict_choice(goal, layout, 4)
    return find_fullest(list(choice.prediction.breakdown.ranks)).tensors / GIB, ran.peak_bytes / GIB


@functools.cache
def compared():
    return run_alone(lambda: [both(*case) for case in CASES], timeout=280)


@pytest.mark.parametrize("at", range(len(CASES)), ids=[f"{m}-{s}-{n}-{p}" for m, s, n, p in CASES])
def test_memory_is_that_of_a_dry_run(at):
    planned_gib, ran = compared()[at]
    assert planned_gib == pytest.approx(ran, rel=0.05)


# ---- what is said ---------------------------------------------------------------------------------------------------


def test_the_plan_says_which_and_what_others_cost():
    found = search(
        model=models.llama(**SIZES), cluster=make_cluster(H100, 4), seq=8192, global_batch=16, documents=True
    )
    (line,) = explain_attention(found.goal, found.best)
    assert line.startswith("attention=auto is torch_flash: packs and padded rows document by document; sdpa would ")
    flash, masked, eager = (
        predict_choice(found.goal, dataclasses.replace(found.best.config, attention=name), 1)
        for name in ("torch_flash", "sdpa", "eager")
    )
    assert flash.needed_gib < masked.needed_gib < eager.needed_gib
    seconds = [choice.prediction.breakdown.time["attention"] for choice in (flash, masked, eager)]
    assert seconds == sorted(seconds)
    assert flash.step_time_s <= masked.step_time_s < eager.step_time_s  # Python launches what a small model computes


def test_a_kernel_that_is_asked_for_holds_for_mere_numbers():
    given = {"cluster": make_cluster(H100, 8), "seq": 4096, "global_batch": 32, "accept": lambda c: c.cp_size == 1}
    flash, eager = (search(model=models.LLAMA_8B, attention=name, **given) for name in (None, "eager"))
    (line,) = explain_attention(eager.goal, eager.best)
    assert line.startswith("attention=auto is eager: the script's own choice; torch_flash would ")
    assert eager.best.step_time_s > 1.1 * flash.best.step_time_s


def test_eight_bits_are_planned_under_any_precision():
    """fp8 products beside fp32 weights under autocast used to be planned as 16-bit ones."""
    for precision in ("bf16", "mixed", "fp32"):
        goal = Goal(shape_of(models.LLAMA_8B), make_cluster(H100, 8), 4096, None, precision, rows=1)
        plain, eight = (
            predict_choice(goal, ParallelConfig.parse(f"dp_shard=8{more}"), 1).prediction
            for more in ("", ",precision=fp8")
        )
        ratio = eight.breakdown.time["matrix products"] / plain.breakdown.time["matrix products"]
        assert ratio < 0.75, precision
    found = search(model=models.LLAMA_8B, cluster=make_cluster(H100, 8), seq=4096, global_batch=32, precision="fp8")
    assert "precision=fp8" in found.best.config.to_spec()

"""`--parallel auto` on a LoRA script: counted as one, with checkpointing and shards where they pay, and reasons."""

import json
from pathlib import Path

import pytest

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.hooks import auto
from hf_parallel.planner import make_cluster
from hf_parallel.planner.advice import list_reasons
from hf_parallel.planner.search import search
from tests import models
from tests.distributed import run, run_alone
from tests.training import trainer_of

PAGE = Path(__file__).parents[2] / "docs" / "dry_run.md"


@pytest.mark.parametrize(
    ("argv", "rank"),
    [
        (["--use_peft"], 16),
        (["--use_peft", "true", "--lora_r=4"], 4),
        (["--lora_rank", "8"], 8),
        (["--use_peft", "false", "--lora_r", "8"], 0),
        ([], 0),
    ],
)
def test_adapters_that_the_command_line_asks_for(argv, rank):
    assert auto.read_script_batch(models.llama(), ["train.py", *argv]).lora == rank


def alone(config) -> bool:
    return config.tp_size == config.pp_size == config.cp_size == 1


def best(**changes):
    """Among layouts that share out data alone."""
    given = {"seq": 4096, "global_batch": None, "precision": "mixed", "rows": 4, "lora": 16, **changes}
    return search(model=models.LLAMA_8B_CONFIG, cluster=make_cluster("a100-40gb", 8), top=1, accept=alone, **given)


def test_a_lora_script_gets_shards_and_checkpoints_with_reasons():
    found = best()
    config, lines = found.best.config, list(list_reasons(found.goal, found.best))
    assert (config.dp_shard_size, config.zero_stage > 0) == (8, True), config.to_spec()  # whole weights do not fit
    assert config.activation_checkpointing in ("selective", "full")
    page = " ".join(PAGE.read_text().split())
    assert [line for line in (config.to_spec(), *lines) if line not in page] == []  # the page's example
    assert lines[0].startswith("adapters of rank 16")
    assert lines[1].startswith(f"dp_shard=8,zero_stage={config.zero_stage}: whole weights on each rank would need")
    assert lines[2].startswith(f"activation_checkpointing={config.activation_checkpointing}: none would need")
    more = best(rows=8)
    whole = [line for line in list_reasons(more.goal, more.best) if "whole logits would need" in line]
    assert [line.partition(":")[0] for line in whole] == ["lean_loss=auto"]


def test_where_all_fits_nothing_is_computed_again():
    found = best(seq=512, rows=1)
    (line,) = [line for line in list_reasons(found.goal, found.best) if line.startswith("activation_checkpointing")]
    assert line.startswith("activation_checkpointing=none: all activations fit (")
    assert "x the time" in line


@pytest.mark.parametrize(("gpus", "rows"), [(4, 1), (8, 2)])
def test_llama_8b_on_desktop_gpus_fits_by_a_dry_run(gpus, rows):
    """One word for a LoRA script in bf16: what `auto` takes for Llama 3 8B on GPUs of 24 GB, and what it says."""
    from hf_parallel.hooks.peft.planned_adapters import plan_lora
    from hf_parallel.planner.dryrun import dry_run

    cluster, given = make_cluster("rtx4090-24gb", gpus), {"global_batch": None, "rows": rows, "lora": 16}
    found = search(model=models.LLAMA_8B_CONFIG, cluster=cluster, seq=2048, **given)
    choice, lines = found.best, list(list_reasons(found.goal, found.best))
    config = choice.config
    assert config.activation_checkpointing in ("selective", "full")
    assert f"activation_checkpointing={config.activation_checkpointing}: none would need " in "\n".join(lines)
    assert any(line.startswith("attention=auto is torch_flash: ") and "eager would need" in line for line in lines)
    ran = run_alone(lambda: dry_run(models.LLAMA_8B_CONFIG, config, rows=rows, seq=2048, adapt=plan_lora(16)))
    (planned, *_) = choice.prediction.breakdown.ranks
    assert ran.peak_bytes == pytest.approx(planned.tensors, rel=0.1)
    assert ran.peak_bytes < cluster.gpu.memory_gib * 2**30


def kept_by_layers(rank: int) -> tuple:
    """What the planner counts of a layer that it builds and runs on tensors without memory."""
    from hf_parallel.hooks.peft.planned_adapters import plan_lora
    from hf_parallel.planner.search import measure_shape

    return measure_shape(models.llama(), "bf16", plan_lora(rank) if rank else None).blocks[0].kept


def test_auto_counts_what_plan_counts():
    """Among processes that are connected already, with adapters and without."""
    for rank in (0, 4):
        alone = run_alone(kept_by_layers, rank)
        assert alone
        assert run(kept_by_layers, 1, rank) == [alone]


def chosen_for(folder: str, out: str) -> list[str]:
    """The lines for a script with a LoraConfig made before its model is shown, which trains two steps."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from hf_parallel.hooks import activation

    activation.activate("auto", source="the test")
    config = LoraConfig(r=5, target_modules="all-linear")
    model = AutoModelForCausalLM.from_pretrained(folder)
    rows = [{"input_ids": list(range(at, at + 16)), "labels": list(range(at, at + 16))} for at in range(16)]
    trainer, _ = trainer_of(get_peft_model(model, config), out, settings={"max_steps": 2}, train_dataset=rows)
    assert trainer.train().training_loss > 0
    return json.loads(Path(out, "hf_parallel.json").read_text())["auto"]


def test_a_lora_config_made_before_the_model_is_counted(runs, tmp_path):
    pytest.importorskip("peft")
    lines, _ = run(chosen_for, 2, runs.initial("llama"), str(tmp_path))
    assert any("adapters of rank 5" in line for line in lines)
    assert any("activation_checkpointing=" in line for line in lines)
    assert any("attention=auto is sdpa: the model's own, where there is no CUDA device" in line for line in lines)


def accepted(folder: str, kind: str) -> list[bool]:
    """Which layouts auto may choose once a script has made an adapter's config: over data ranks, tp, pp."""
    from peft import IA3Config, LoraConfig
    from transformers import AutoModelForCausalLM

    from hf_parallel.hooks import activation
    from hf_parallel.planner import search

    def find(**options: object) -> None:
        specs = ("dp_shard=2", "tp=2", "pp=2")
        raise LookupError([options["accept"](ParallelConfig.parse(spec)) for spec in specs])

    search.search, auto.make_engine_options = find, lambda *args: {"accept": lambda layout: True}
    activation.activate("auto", source="the test")
    made = {
        "lora": lambda: LoraConfig(target_modules="all-linear"),
        "mica": lambda: LoraConfig(target_modules="all-linear", init_lora_weights="mica"),
        "ia3": IA3Config,
    }[kind]()
    assert made
    try:
        AutoModelForCausalLM.from_pretrained(folder)
    except LookupError as found:
        return found.args[0]
    raise AssertionError("auto did not choose")


@pytest.mark.parametrize("kind", ["lora", "mica", "ia3"])
def test_adapters_that_tp_and_pp_refuse(runs, kind):
    """A layout that splits layers would be refused when the adapters come."""
    pytest.importorskip("peft")
    assert run(accepted, 2, runs.initial("llama"), kind)[0] == [True, kind == "lora", kind == "lora"]

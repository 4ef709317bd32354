"""`--parallel auto` on a LoRA script: counted as one, with checkpointing and shards where they pay, and reasons."""

import pytest

from hf_parallel.hooks import auto
from hf_parallel.planner import make_cluster
from hf_parallel.planner.reasons import reasons
from hf_parallel.planner.search import search
from tests import models
from tests.distributed import run


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
    assert auto.script_batch(models.llama(), ["train.py", *argv])["lora"] == rank


def alone(config) -> bool:
    return config.tp_size == config.pp_size == config.cp_size == 1


def best(**changes):
    """Among layouts that share out data alone."""
    given = {"seq": 4096, "global_batch": None, "precision": "mixed", "rows": 4, "lora": 16, **changes}
    return search(model=models.LLAMA_8B_CONFIG, cluster=make_cluster("a100-40gb", 8), top=1, accept=alone, **given)


def test_a_lora_script_gets_shards_and_checkpoints_with_reasons():
    found = best()
    config, lines = found.best.config, list(reasons(found.goal, found.best))
    assert (config.dp_shard_size, config.zero_stage > 0) == (8, True), config.to_spec()  # whole weights do not fit
    assert config.activation_checkpointing in ("selective", "full")
    assert lines[0].startswith("adapters of rank 16")
    assert "whole weights on each rank would need" in lines[1]
    assert "of 39 GiB" in lines[1]
    assert lines[2].startswith(f"activation_checkpointing={config.activation_checkpointing}: none would need")


def test_where_all_fits_nothing_is_computed_again():
    found = best(seq=512, rows=1)
    line = list(reasons(found.goal, found.best))[-1]
    assert line.startswith("activation_checkpointing=none: all activations fit (")
    assert "x the time" in line


def chosen_for(folder: str) -> list[str]:
    """The lines that a script with a LoraConfig made before its model is shown."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    from hf_parallel import hooks

    hooks.activate("auto", source="the test")
    config, lines, best_of = LoraConfig(r=5, target_modules="all-linear"), [], auto._best

    def kept(*given):
        spec, said = best_of(*given)
        lines.extend(said)
        return spec, said

    auto._best = kept
    model = AutoModelForCausalLM.from_pretrained(folder)
    get_peft_model(model, config)
    return lines


def test_a_lora_config_made_before_the_model_is_counted(tmp_path):
    pytest.importorskip("peft")
    models.build("llama").save_pretrained(tmp_path)
    lines, _ = run(chosen_for, 2, str(tmp_path))
    assert any("adapters of rank 5" in line for line in lines)
    assert any("activation_checkpointing=" in line for line in lines)
    assert any("attention=auto" in line for line in lines)

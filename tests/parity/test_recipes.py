"""The recipes of the smallest models train: five steps of the tiny model that they shrink to, as in one process."""

from functools import partial

import pytest

from hf_parallel.cli.recipe_file import load_recipe
from tests.training import spec_id

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytest.importorskip("peft")

from tests import shrunk

SMALLEST = (
    *("qwen3-0.6b-full-1x24gb", "qwen3-0.6b-grpo-2x24gb", "gemma-3-1b-lora-1x24gb", "gemma-3-1b-full-2x24gb"),
    *("llama-3.2-1b-full-1x48gb", "llama-3.2-1b-dpo-1x24gb", "qwen3-1.7b-lora-1x24gb", "qwen3-1.7b-dpo-2x48gb"),
    *("qwen3-1.7b-full-4x24gb-ethernet", "qwen3-4b-qlora-1x24gb"),
)
CASES = [(name, shrunk.spec_of(load_recipe(name))) for name in SMALLEST]


@pytest.mark.parametrize(("name", "spec"), [pytest.param(*case, id=f"{case[0]}-{spec_id(case[1])}") for case in CASES])
def test_as_in_one_process(trl_runs, name, spec):
    recipe = load_recipe(name)
    kind, limits = recipe.script.rpartition(".")[2], ()
    if recipe.four_bit:
        pytest.importorskip("bitsandbytes")
        limits = (False, 1e-2, 1e-2)  # TRL trains bf16 adapters on such a base: losses round at other places
    model = trl_runs.model(name, partial(shrunk.write_model, recipe))
    flags = f"--model_name_or_path {model} {shrunk.flags_of(recipe)}"
    trl_runs.check(kind, shrunk.DATA[kind], flags, spec, *limits)


def test_what_is_kept_of_a_recipe():
    """Kinds of layers, arguments and axes are the recipe's."""
    recipe = load_recipe("qwen3-1.7b-full-4x24gb-ethernet")
    assert shrunk.spec_of(recipe) == "pp=2,pipeline_microbatches=4,pipeline_schedule=zbv_zero_bubble"
    assert "--lr_scheduler_type cosine" in shrunk.flags_of(recipe)
    small, whole = shrunk.config_of(recipe), recipe.config()
    assert (small.model_type, small.tie_word_embeddings) == (whole.model_type, whole.tie_word_embeddings)
    assert small.num_attention_heads // small.num_key_value_heads == 2 == 16 // 8

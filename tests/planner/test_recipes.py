"""Every recipe that comes with the package fits its machines, and says of them what the planner and a dry run say."""

import dataclasses

import pytest

import hf_parallel
from hf_parallel.ask.config import SpecError
from hf_parallel.ask.spec import list_shipped_recipes
from hf_parallel.cli.recipe_check import check_recipe, plan_recipe
from hf_parallel.cli.recipe_file import METHODS, list_shapes, load_recipe, read_recipe, read_shipped_config
from hf_parallel.planner.shape import shape_of
from hf_parallel.planner.states import PACKED_BYTES
from tests.distributed import run_alone

#: Of the models' pages on the Hub, tied weights once.
PARAMETERS = {
    **{"llama-3.2-1b": 1_235_814_400, "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496},
    **{"qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096},
    **{"qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264},
    **{"qwen3-30b-a3b": 30_532_122_624, "gemma-3-1b": 999_885_952, "gemma-3-4b": 4_300_079_472},
    **{"gemma-3-12b": 12_187_325_040, "gemma-3-27b": 27_432_406_640, "mistral-7b": 7_248_023_552},
    **{"phi-4": 14_659_507_200, "gpt-oss-20b": 20_914_757_184, "deepseek-v2-lite": 15_706_484_224},
    "deepseek-r1-distill-qwen-7b": 7_615_616_512,
}
RECIPE = """
about: A test
model: me/mine
shape: qwen3-0.6b
method: full
hardware: {gpu: h100-80gb, gpus: 8}
parallel: {dp_shard: 8}
script: trl.scripts.sft
arguments: {per_device_train_batch_size: 2, max_length: 512, gradient_checkpointing: false}
data: {tokens_per_row: 512}
"""


def test_models_have_as_many_parameters_as_the_hub_says():
    found = {name: shape_of(read_shipped_config(name)).parameters for name in list_shapes()}
    assert found == pytest.approx(PARAMETERS, rel=0.02)


def verdicts(recipes, dry):
    """What is wrong with some."""
    return [str(verdict) for verdict in (check_recipe(name, dry) for name in recipes) if verdict.wrong]


@pytest.mark.parametrize("name", list_shipped_recipes())
def test_all_fit_by_the_planner_and_say_so(name):
    assert verdicts([name], False) == []


def test_numbers_are_those_of_plan():
    """To the digit, whole logits counted."""
    recipe = load_recipe("qwen3-0.6b-full-1x24gb")
    found = hf_parallel.plan(
        recipe.config(),
        gpu=recipe.hardware.gpu,
        gpus=recipe.hardware.gpus,
        seq=recipe.seq,
        global_batch=None,
        rows=recipe.rows,
        accumulation=recipe.accumulation,
        precision="mixed",
        whole_logits=True,
    )
    (same,) = [choice for choice in found.choices if choice.config.to_spec() == recipe.layout.to_spec()]
    planned = plan_recipe(recipe)
    assert (planned.memory_gib, planned.step_s) == (same.needed_gib, same.step_time_s)


@pytest.mark.parametrize("name", list_shipped_recipes())
def test_runs_dry(name):
    """A plain run tries one of them: a dry run takes up to a minute."""
    assert run_alone(verdicts, [name], True, timeout=280) == []


def test_what_is_there():
    """Models, numbers of GPUs, their memory and methods that people have."""
    found = [load_recipe(name) for name in list_shipped_recipes()]
    assert len(found) >= 24
    assert {recipe.method for recipe in found} == set(METHODS)
    assert {recipe.hardware.gpus for recipe in found} == {1, 2, 4, 8, 64}
    memory = {recipe.hardware.gpu.rpartition("-")[2] for recipe in found}
    assert memory == {"24gb", "48gb", "80gb", "141gb"}
    slow = [one for one in found if one.hardware.nodes > 1 and "ethernet" in one.hardware.cluster.between.name]
    assert len(slow) >= 3
    for recipe in found:
        size = f"{recipe.hardware.gpus}x{recipe.hardware.gpu.rpartition('-')[2]}"
        assert size in recipe.name
        assert recipe.expect.keys() == {"planner", "dry_run"}, recipe.name


def written(tmp_path, old="", new=""):
    assert old in RECIPE
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE.replace(old, new, 1))
    return read_recipe("mine", str(path))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("method:", "metod:", "metod: unknown key; did you mean method?"),
        ("gpus: 8", "gpuss: 8", "hardware: gpuss: unknown key; did you mean gpus?"),
        ("method: full", "method: fast", "method=fast: not one of full"),
        ("{dp_shard: 8}", "{dp_shard: 4}", "dp_shard=8 works"),
        ("{dp_shard: 8}", "{dp_shards: 8}", "dp_shards: unknown key; did you mean"),
        ("h100-80gb", "h100-8gb", "gpu=h100-8gb: not in the catalogue"),
        ("shape: qwen3-0.6b", "shape: qwen", "shape=qwen: no such model"),
        ("script: trl.scripts.sft", "script: os.system", "script=os.system: not one of trl.scripts.sft"),
        ("tokens_per_row: 512", "tokens_per_row: 8", "max_length is 512; tokens_per_row: 512 works"),
        (", gradient_checkpointing: false", "", "gradient_checkpointing: false works"),
        ("about: A test", "about: !!python/object/apply:os.getcwd []", "not a YAML file"),
        ("model: me/mine", "model: me/mine\nmodel: me/yours", "model: given twice"),
        ("method: full", "method: full\nexpect: {guess: {}}", "expect: guess: unknown key"),
        ("gpus: 8", "gpus: eight", "hardware: gpus=eight: not a whole number"),
        ("tokens_per_row: 512", "tokens_per_row: 0", "data: tokens_per_row=0: is one at least"),
        ("batch_size: 2", "batch_size: 2k", "arguments: per_device_train_batch_size=2k: not a whole number"),
        ("script: trl.scripts.sft", "script_arguments: [lora_r]", "script_arguments: is a list, not a mapping"),
        ("model: me/mine", "model: 5", 'model=5: is a int, not a text; model: "5" works'),
        (
            "batch_size: 2",
            "batch_size: 2, learning_rate: null",
            "arguments: learning_rate: has no value; leave it out",
        ),
        ("method: full", "method: full\nexpect: {measured: {step_s: fast}}", "measured: step_s=fast: is no number"),
        ("method: full", "method: full\nexpect: {planner: {within: .nan}}", "planner: within=nan: is no number"),
    ],
)
def test_what_is_refused(tmp_path, old, new, message):
    with pytest.raises(SpecError) as caught:
        written(tmp_path, old, new)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def changed(**changes):
    """Memory and speed of a recipe with other settings."""
    found = plan_recipe(dataclasses.replace(load_recipe("llama-3.2-1b-dpo-1x24gb"), **changes))
    return found.memory_gib, found.tokens_per_s


def test_what_the_planner_does_not_know_is_put_on_top():
    """DPO's reference takes time; of all weights it is a second model; 4 bits take a quarter."""
    arguments = load_recipe("llama-3.2-1b-dpo-1x24gb").script_arguments
    memory, speed = changed()
    same = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 16}  # rows: a pair has two
    assert changed(method="lora", arguments=same)[1] == pytest.approx(speed * 4 / 3)
    four = changed(script_arguments={**arguments, "load_in_4bit": True})[0]
    linear = 16 * (2048 * 2048 * 2 + 2 * 2048 * 512 + 3 * 2048 * 8192)
    # The planner's weights are those of the base in 16 bits, and the adapters, which are a hundredth.
    assert memory - four == pytest.approx(linear * (2 - PACKED_BYTES["nf4"]) / 2**30, rel=0.03)
    whole = changed(script_arguments={"dtype": "bfloat16"})
    alone = changed(script_arguments={"dtype": "bfloat16"}, method="full", arguments=same)
    assert whole[0] - alone[0] == pytest.approx(2 * 1_235_814_400 / 2**30, rel=1e-6)


def test_an_outdated_expectation_is_found(tmp_path):
    """And named with the command that makes it anew."""
    path = tmp_path / "mine.yaml"
    path.write_text(RECIPE + "expect:\n  planner: {memory_gib: 1, step_s: 1, tokens_per_s: 1, within: 0.25}\n")
    wrong = check_recipe(str(path), dry=False).wrong
    assert len(wrong) == 3
    assert all("recipe check --write" in line for line in wrong)
    path.write_text(RECIPE + "expect:\n  dry_run: {memory_gib: 81}\n")
    assert any(line.startswith("needs 81.0 GiB in a dry run") for line in check_recipe(str(path), dry=False).wrong)
    path.write_text(RECIPE.replace("gpus: 8", "gpus: 1").replace("dp_shard: 8", "dp_shard: 1").replace("512", "40960"))
    assert any(line.startswith("needs ") for line in check_recipe(str(path), dry=False).wrong)

"""Recipes from the first command to a trained step; arguments as the scripts parse them."""

import importlib
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

from hf_parallel import __main__ as runner
from hf_parallel import cli
from hf_parallel.ask.spec import list_shipped_recipes
from hf_parallel.cli.recipe_file import CONFIG_CLASSES, fill_options, list_options_of, load_recipe
from tests.commands import ROOT, commands
from tests.distributed import run, run_alone
from tests.unit.test_cli import launched  # noqa: F401 - a fixture


def parsed_arguments(script: str) -> None:
    """In a process of its own: arguments of a Trainer make Accelerate's state."""
    module, _, kind = CONFIG_CLASSES[script].rpartition(".")
    known = {field.name for field in fields(getattr(importlib.import_module(module), kind))}
    parser, options = importlib.import_module(script).make_parser(), list_options_of(script, True)
    for recipe in (one for one in map(load_recipe, list_shipped_recipes()) if one.script == script):
        assert set(recipe.arguments) - known == set(), recipe.name
        words = fill_options(recipe, ["--output_dir", "out", "--use_cpu"], options, script).words
        parsed = parser.parse_args_and_config(words, fail_with_unknown_args=True)
        values = {key: value for part in parsed for key, value in vars(part).items()}
        assert values["learning_rate"] == recipe.arguments["learning_rate"]
        assert values["dataset_name"] == recipe.data["dataset_name"]
        assert values["model_name_or_path"] == recipe.model


@pytest.mark.parametrize("script", [script for script in CONFIG_CLASSES if script])
def test_arguments_are_those_of_the_script(script):
    """Of every recipe: `arguments` are fields of the Trainer's config class, all are options of its parser."""
    pytest.importorskip("trl")
    run_alone(parsed_arguments, script)


def train(words: list[str]) -> bool:
    """What a rank does with the words that the launcher has started it with."""
    command = runner.parse_command(words)
    runner.prepare(command)
    runner.run(command)
    return Path("out", "model.safetensors").is_file()


def test_a_new_users_path(launched, capsys, tmp_path, monkeypatch):  # noqa: F811
    """The commands of docs/recipes.md from the first to a trained step, on a tiny model and two forked ranks."""
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    from tests import trl_scripts

    path = (ROOT / "docs" / "recipes.md").read_text().partition("## The first step")[2].partition("\n## ")[0]
    first, *shown = [command.split() for command in commands(path)]
    assert first[:2] == ["pip", "install"]
    assert len(shown) <= 3
    monkeypatch.chdir(tmp_path)
    trl_scripts.write_data("data")
    run(partial(trl_scripts.write_model, "tiny"), 1, init=False)
    for words in shown[:-1]:
        assert cli.main(words[1:]) == 0
    here = "--model_name_or_path tiny --dataset_name data/chat --use_cpu true --bf16 false --report_to none"
    words = [*shown[-1][1:3], "--num_processes", "2", "--parallel", "dp_shard=2", *shown[-1][3:], *here.split()]
    assert cli.main([*words, "--gradient_accumulation_steps", "1"]) == 0
    (args,) = launched
    environment = {"ACCELERATE_USE_CPU": "true", "TQDM_DISABLE": "1"}
    assert run(train, 2, args.training_script_args, init=False, env=environment) == [True, True]

"""`hf-parallel recipe`: where recipes come from, what they add to a command line, what is pushed."""

import os
from dataclasses import fields
from functools import partial
from pathlib import Path

import huggingface_hub
import pytest

from hf_parallel import cli
from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.ask.spec import list_shipped_recipes, locate_spec_file
from hf_parallel.cli.recipe_check import push_recipe
from hf_parallel.cli.recipe_file import fill_options, list_options_of, load_recipe, render_markdown
from tests.commands import ROOT
from tests.refusals import find_line, pattern_of_refusal
from tests.unit.test_cli import launched  # noqa: F401 - a fixture

NAME = "qwen3-0.6b-full-1x24gb"
SCRIPT = """
from dataclasses import dataclass
from transformers import HfArgumentParser, TrainingArguments

@dataclass
class Own:
    model_id: str = "x"
    dataset: str = "y"

HfArgumentParser((Own, TrainingArguments)).parse_args_into_dataclasses()
"""


def say(capsys, *words) -> tuple[int, str, str]:
    code = cli.main(["recipe", *words])
    return code, *capsys.readouterr()


# ---- where they are ----------------------------------------------------------------------------------------------


def test_the_checkout_has_the_files_of_the_package():
    """Not copies: `pip install` and the repository show one folder. (Archives of sources have no links.)"""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    assert (ROOT / "configs" / "recipes").resolve() == ROOT / "hf_parallel" / "recipes" / "shipped"
    assert (ROOT / "configs" / "models").resolve() == ROOT / "hf_parallel" / "recipes" / "models"
    assert Path(str(list_shipped_recipes()[NAME])).parent == ROOT / "hf_parallel" / "recipes" / "shipped"


def test_a_layout_by_the_name_of_a_recipe(tmp_path):
    """`--parallel` takes what `recipe run` takes: shipped, local, of the Hub."""
    name = "deepseek-r1-distill-qwen-7b-grpo-4x80gb"
    expected = ParallelConfig.parse("tp=2,dp_shard=2,activation_checkpointing=selective")
    assert ParallelConfig.parse(name) == expected
    with pytest.raises(SpecError, match=pattern_of_refusal("qwen3-0.6b-ful-1x24gb", works="qwen3-0.6b-full-1x24gb")):
        ParallelConfig.parse("qwen3-0.6b-ful-1x24gb")
    with pytest.raises(SpecError, match="tp2: expected key=value"):
        ParallelConfig.parse("tp2")
    (tmp_path / "mine.yaml").write_text("parallel: tp=2,pp=2\n")
    assert ParallelConfig.parse(str(tmp_path / "mine.yaml")) == ParallelConfig.parse("tp=2,pp=2")
    (tmp_path / "mine.yaml").write_text("parallel: tp=2\nmodle: x\n")
    with pytest.raises(SpecError, match=pattern_of_refusal("modle", works="model")):
        ParallelConfig.parse(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("me/recipes", ("me/recipes", "recipe.yaml", None)),
        ("me/recipes:a/b.yaml", ("me/recipes", "a/b.yaml", None)),
        ("me/recipes@v1", ("me/recipes", "recipe.yaml", "v1")),
        ("me/my.recipes:b.yaml@refs/pr/1", ("me/my.recipes", "b.yaml", "refs/pr/1")),
        ("configs/none.yaml", "no such spec file"),
        ("tp=2", None),
        ("../other/place", None),
    ],
)
def test_what_the_hub_is_asked_for(monkeypatch, text, asked):
    calls = []

    def download(repo, file, revision=None):
        calls.append((repo, file, revision))
        return str(list_shipped_recipes()[NAME])

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    if isinstance(asked, str):
        with pytest.raises(SpecError, match=asked):
            ParallelConfig.parse(text)
        return
    found = locate_spec_file(text)
    assert calls == ([asked] if asked else [])
    assert asked is None or load_recipe(text).model == load_recipe(NAME).model == "Qwen/Qwen3-0.6B"
    assert (found is None) == (asked is None)


def test_offline_only_what_is_cached(tmp_path):
    """By huggingface_hub itself: HF_HUB_OFFLINE, which the tests have set, and a cache with one file."""
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    with pytest.raises(SpecError) as caught:
        ParallelConfig.parse("nobody/has-this")
    assert str(caught.value).startswith("nobody/has-this:recipe.yaml: not to be had from the Hub")
    assert "\n" not in str(caught.value)
    folder = tmp_path / "models--me--recipes"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (folder / "snapshots" / ("0" * 40) / "recipe.yaml").write_text("parallel: pp=2\n")
    download = partial(huggingface_hub.hf_hub_download, cache_dir=tmp_path)
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(huggingface_hub, "hf_hub_download", download)
        assert ParallelConfig.parse("me/recipes").pp_size == 2


# ---- arguments ---------------------------------------------------------------------------------------------------


def test_arguments_of_scripts_of_ones_own():
    from transformers import TrainingArguments

    known = {field.name for field in fields(TrainingArguments)}
    found = [load_recipe(name) for name in list_shipped_recipes() if load_recipe(name).script is None]
    assert found
    assert [recipe.name for recipe in found if set(recipe.arguments) - known or recipe.script_arguments] == []


@pytest.mark.parametrize(
    ("words", "given", "absent"),
    [
        (["--learning_rate", "1"], {"learning_rate"}, "--learning_rate 2e-05"),
        (["--learning-rate=1"], {"learning_rate"}, "--learning_rate 2e-05"),
        (["--no_bf16"], {"bf16"}, "--bf16 true"),
        (["--config", "mine.yaml"], {"max_length", "lr_scheduler_type"}, "--max_length 2048"),
        (["--model_name_or_path", "here"], {"model_name_or_path"}, "--model_name_or_path Qwen/Qwen3-0.6B"),
    ],
)
def test_what_the_user_gives_wins(tmp_path, monkeypatch, words, given, absent):
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text("max_length: 7\nlr_scheduler_type: linear\n")
    pytest.importorskip("trl")
    filled = fill_options(load_recipe(NAME), words, list_options_of("trl.scripts.sft", True), "sft")
    assert set(filled.given) == given
    assert filled.words[-len(words) :] == words
    assert absent not in filled.filled
    assert "--warmup_steps 0.03" in filled.filled


def test_a_script_of_ones_own(tmp_path):
    """The model under the name that it has there; what it does not take is left out and named."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    known = list_options_of(str(script), False)
    filled = fill_options(load_recipe(NAME), ["--dataset", "mine"], known, "train.py")
    assert "--model_id Qwen/Qwen3-0.6B" in filled.filled
    assert "max_length" in filled.unknown
    assert not any("max_length" in word for word in filled.words)
    assert filled.words[:2] == ["--model_id", "Qwen/Qwen3-0.6B"]
    script.write_text("print(1)")
    with pytest.raises(SpecError, match=pattern_of_refusal("train.py", works=f"--parallel {NAME}")):
        fill_options(load_recipe(NAME), [], list_options_of(str(script), False), "train.py")
    with pytest.raises(SpecError, match="takes no others"):
        fill_options(load_recipe(NAME), ["args.json"], known, "train.py")
    examples = list_options_of(str(ROOT / "examples" / "finetune_lora.py"), False)
    assert {"base", "rank", "learning_rate"} <= examples


# ---- run ---------------------------------------------------------------------------------------------------------


def test_run_is_a_launch(launched, capsys, tmp_path):  # noqa: F811
    """Processes, layout and the script's options, as far as they are open; and one line about each."""
    (tmp_path / "train.py").write_text(SCRIPT)
    script = str(tmp_path / "train.py")
    assert cli.main(["recipe", "run", NAME, script, "--dataset", "mine"]) == 0
    (args,) = launched
    assert args.num_processes == 1
    assert args.training_script_args[:3] == ["--parallel", "dp_shard=1", script]
    assert args.training_script_args[-2:] == ["--dataset", "mine"]
    err = capsys.readouterr().err
    assert find_line(err, NAME, "--parallel dp_shard=1", "--num_processes 1", "--model_id Qwen/Qwen3-0.6B")
    assert find_line(err, "left out", "--max_length")
    launched.clear()
    mine = ["--num_processes", "2", "--parallel", "tp=2"]
    assert cli.main(["recipe", "run", *mine, NAME, script, "--learning_rate", "1"]) == 0
    (args,) = launched
    assert (args.num_processes, args.training_script_args[:2]) == (2, ["--parallel", "tp=2"])
    err = capsys.readouterr().err
    assert "yours: --learning_rate" in err
    assert "--parallel" not in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-recipe"], "no-such-recipe: no recipe of that name"),
        (["llama-3.1-8b-full-8x80gb", "-m", "trl.scripts.sft"], "needs 8 GPUs on each machine, 0 are here"),
        ([NAME, "none.py"], "none.py: no such script"),
        (["llama-3.1-8b-128k-8x80gb"], "names no script"),
        ([NAME, "--num_processes", "2"], "--num_processes: is an option of the launcher"),
        (["-m", NAME], "-m: goes behind the recipe"),
        (
            ["qwen3-1.7b-full-4x24gb-ethernet", "-m", "trl.scripts.sft"],
            "--num_machines 4: needs --machine_rank as well",
        ),
        (["--num_processes", "3", NAME, "-m", "trl.scripts.sft"], "dp_shard=3 works"),
    ],
)
def test_run_refuses_in_one_line(launched, capsys, words, message):  # noqa: F811
    code, out, err = say(capsys, "run", *words)
    assert (code, out, launched) == (2, "", [])
    line = err.splitlines()[-1]
    assert message in line
    assert line.startswith("hf_parallel: ")


# ---- show, push --------------------------------------------------------------------------------------------------


def test_list_and_show(capsys):
    code, out, _ = say(capsys, "list", "--gpus", "64", "--method", "full")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == [
        name for name in list_shipped_recipes() if "full-64x" in name
    ]
    code, out, _ = say(capsys, "show", NAME)
    assert out.startswith(list_shipped_recipes()[NAME].read_text().rstrip())
    assert out.rstrip().endswith(f"hf-parallel recipe run {NAME} --output_dir out")


class Api:
    """What `push_recipe` asks of the Hub; keeps what it is given."""

    def __init__(self, folder, card=None):
        self.folder, self.calls, self.files = folder, [], {}
        if card is not None:
            self.files["README.md"] = card

    def create_repo(self, repo, private=None, exist_ok=False):
        self.calls.append((repo, private, exist_ok))

    def file_exists(self, repo, file):
        return file in self.files

    def hf_hub_download(self, repo, file):
        (self.folder / file).write_text(self.files[file])
        return str(self.folder / file)

    def create_commit(self, repo, operations, commit_message):
        assert commit_message
        self.files |= {one.path_in_repo: one.path_or_fileobj.decode() for one in operations}

        class Info:
            commit_url = f"https://huggingface.co/{repo}/commit/1"

        return Info


def test_push_writes_the_file_and_a_section(tmp_path):
    api = Api(tmp_path)
    recipe = load_recipe(NAME)
    assert push_recipe(recipe, "me/mine", api=api).endswith("me/mine/commit/1")
    assert api.calls == [("me/mine", None, True)]
    assert api.files["recipe.yaml"] == list_shipped_recipes()[NAME].read_text()
    card = api.files["README.md"]
    assert card.startswith("---\ntags:\n- hf-parallel\n")
    assert "hf-parallel recipe run me/mine --output_dir out" in card
    assert render_markdown([recipe]) in card


def test_push_leaves_the_rest_of_a_card_alone(tmp_path):
    api = Api(tmp_path, card="# Mine\n\nwords\n")
    for text in ("first", "second"):
        recipe = load_recipe(NAME)
        push_recipe(type(recipe)(**{**vars(recipe), "about": text}), "me/mine", "a.yaml", api=api)
    card = api.files["README.md"]
    assert card.startswith("# Mine\n\nwords\n\n<!--")
    assert ("first" in card, card.count("Recipe: second"), card.count("me/mine:a.yaml")) == (False, 1, 2)


def test_the_page_has_the_table():
    """docs/reference/recipes.md; `hf-parallel recipe list --markdown` prints it."""
    assert (
        render_markdown([load_recipe(name) for name in list_shipped_recipes()])
        in (ROOT / "docs" / "reference" / "recipes.md").read_text()
    )

"""The pages of docs/ as a site: no link leads nowhere, nothing is fetched from elsewhere."""

import argparse
import json
import re
import runpy
from pathlib import Path

import pytest

import hf_parallel.planner
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.cli.plan import add_arguments
from hf_parallel.planner import find_gpu

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    folder = tmp_path_factory.mktemp("site")
    config = load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder))
    build(config)  # strict: a link without an end, or a page that is not in the navigation, raises
    return folder


def test_it_has_every_page_and_the_support_matrix(site):
    docs = ROOT / "docs"
    pages = {str(path.relative_to(docs).with_suffix("")) for path in docs.rglob("*.md")}
    pages |= {"kubernetes", "slurm", "changelog"}
    missing = {page for page in pages - {"index"} if not (site / page / "index.html").exists()}
    assert not missing
    for page in (".", "reference/support_matrix"):
        text = (site / page / "index.html").read_text()
        assert '<th style="text-align: center;"><code>tp=2,pp=2</code></th>' in text
    assert "ring" in (site / "search/search_index.json").read_text()


def test_no_block_is_wider_than_a_page():
    """Beside the navigation of a screen of 1,440 pixels a block has room for 146 characters (docs/site/wide.css)."""
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    lines = [(page.name, line) for page in pages for line in page.read_text().splitlines() if line.startswith("    ")]
    assert [(page, line) for page, line in lines if len(line) > 150 and not line.lstrip().startswith(("-", "|"))] == []


def test_pictures_are_current():
    pictures = runpy.run_path(str(ROOT / "docs/site/pictures.py"))
    for name, axis in pictures["AXES"].items():
        assert (ROOT / f"docs/images/{name}.svg").read_text() == pictures["draw"](axis)


def test_the_api_reference_has_every_public_name(site):
    """With its signature and its docstring; sections of docstrings are lists."""
    text = (site / "api" / "index.html").read_text()
    for module in (hf_parallel, hf_parallel.planner):
        assert [name for name in module.__all__ if f">{module.__name__}.{name}<" not in text] == []
    assert "<li><code>global_batch</code>: sequences per step over all data ranks.</li>" in text
    assert "Collective: every process calls it." in text


def test_a_signature_is_as_in_the_source():
    made = runpy.run_path(str(ROOT / "docs/site/reference.py"))

    example = eval("lambda model, *, name='a', **more: None", {})  # no annotation is looked up
    example.__annotations__ = {"model": "Model | None", "name": "str", "more": "int", "return": "Found"}
    assert made["_signature"](example) == ("(model: Model | None, *, name: str = 'a', **more: int) -> Found")


PAGE = runpy.run_path(str(ROOT / "docs/site/which_layout.py"))
ANSWERS = PAGE["read"]()


def test_every_question_has_an_answer():
    """A layout that can be asked for, with 8 % of a GPU free; or what would do."""
    head = (ROOT / "docs/which_layout.js").read_text().partition("const ANSWERS=")[0].splitlines()
    assert json.loads(head[1].removeprefix("const OPTIONS=")[:-1]) == [list(options) for options in PAGE["QUESTIONS"]]
    assert list(ANSWERS) == PAGE["list_places"]()
    for places, found in ANSWERS.items():
        machine = PAGE["MACHINES"][PAGE["asked"](places)[2]]
        assert "advice" in found or ParallelConfig.parse(found["spec"]).resolve(machine["gpus"])
        assert "advice" in found or found["gib"] <= 0.92 * find_gpu(machine["gpu"]).memory_gib + 0.05, places


def test_other_questions_have_a_command():
    """It asks `plan` what the page would have stored."""
    words = json.loads((ROOT / "docs/which_layout.js").read_text().splitlines()[2].removeprefix("const WORDS=")[:-1])
    assert words == PAGE["list_words"]()
    assert [len(options) for options in words] == [len(options) for options in PAGE["QUESTIONS"]]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    for number in range(max(map(len, words))):
        chosen = [options[min(number, len(options) - 1)] for options in words]
        args = parser.parse_args(" ".join(chosen).split())
        _, method, machine, length = (
            list(options.values())[min(number, len(options) - 1)] for options in PAGE["QUESTIONS"]
        )
        assert (args.lora, args.load_in_4bit) == (method.get("lora", 0), method.get("four_bit", False))
        assert {key: getattr(args, key) for key in machine} == machine
        assert (args.seq, args.seq * args.global_batch) == (length, PAGE["TOKENS"])


@pytest.mark.parametrize("places", ANSWERS)
def test_an_answer_is_what_plan_says(places):
    """To the digit, with its reasons: a plain run tries some of them."""
    assert PAGE["answer"](*PAGE["asked"](places)) == ANSWERS[places]


def test_adapters_of_an_8b_model_fit_one_gpu_of_24_gb():
    (places,) = [
        places
        for places in ANSWERS
        if (asked := PAGE["asked"](places))[0].startswith("8 B")
        and "(LoRA" in asked[1]
        and asked[2:] == ["1 GPU of 24 GB", "up to 4,096 tokens"]
    ]
    assert ANSWERS[places]["spec"] == "dp_shard=1,activation_checkpointing=full"


def test_it_fetches_nothing(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?))"', page.read_text())
        assert not fetched, page

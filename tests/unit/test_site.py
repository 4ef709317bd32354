"""The pages of docs/ as a site: no link leads nowhere, nothing is fetched from elsewhere."""

import json
import math
import re
import runpy
from pathlib import Path

import pytest

import hf_parallel.planner
from hf_parallel.ask.config import ParallelConfig

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
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} | {"readme", "kubernetes", "slurm", "changelog"}
    missing = {page for page in pages - {"index"} if not (site / page / "index.html").exists()}
    assert not missing
    for page in ("readme", "support_matrix"):
        text = (site / page / "index.html").read_text()
        assert '<th style="text-align: center;"><code>tp=2,pp=2</code></th>' in text
    assert "ring" in (site / "search/search_index.json").read_text()


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


def test_answers_hold():
    """Every layout of the page can be asked for; one is what the planner says now."""
    page = runpy.run_path(str(ROOT / "docs/site/which_layout.py"))
    head, _, lines = (ROOT / "docs/which_layout.js").read_text().partition("const ANSWERS=")
    answers = json.loads(lines.rstrip().rstrip(";"))
    assert json.loads(head.partition("const OPTIONS=")[2].rstrip().rstrip(";")) == [list(q) for q in page["QUESTIONS"]]
    assert len(answers) == math.prod(len(options) for options in page["QUESTIONS"])
    for found in answers.values():
        assert "advice" in found or ParallelConfig.parse(found["spec"])
    first = [next(iter(options)) for options in page["QUESTIONS"]]
    assert page["answer"](*first).get("spec") == answers["0-0-0-0"].get("spec")


def test_it_fetches_nothing(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?))"', page.read_text())
        assert not fetched, page

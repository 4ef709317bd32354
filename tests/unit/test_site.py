"""The pages of docs/ as a site: no link leads nowhere, nothing is fetched from elsewhere."""

import re
import runpy
from pathlib import Path

import pytest

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
    assert '<th style="text-align: center;"><code>tp=2,pp=2</code></th>' in (site / "readme/index.html").read_text()
    assert "ring" in (site / "search/search_index.json").read_text()


def test_pictures_are_current():
    pictures = runpy.run_path(str(ROOT / "docs/site/pictures.py"))
    for name, axis in pictures["AXES"].items():
        assert (ROOT / f"docs/images/{name}.svg").read_text() == pictures["draw"](axis)


def test_it_fetches_nothing(site):
    for page in site.rglob("*.html"):
        fetched = re.findall(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?))"', page.read_text())
        assert not fetched, page

"""The table "how many GPUs does my model need" says what `hf-parallel plan` says now."""

import json

import pytest

from tests import memory_table
from tests.memory_table import COUNTS, GPUS, METHODS, MODELS, RESULTS, Cell, key, search_cell

QUICK = [(model, method, gpu) for model in [*MODELS][:2] for method in METHODS for gpu in GPUS]


def test_pages_say_what_the_results_say():
    assert memory_table.main(["--check"]) == 0
    assert set(json.loads(RESULTS.read_text())) == {
        key(m, how, gpu) for m in MODELS for how in METHODS for gpu in GPUS
    }


def test_a_page_that_says_something_else_is_told(tmp_path, monkeypatch, capsys):
    pages = [tmp_path / page.name for page in memory_table.PAGES]
    for page, own in zip(pages, memory_table.PAGES, strict=True):
        page.write_text(own.read_text().replace("tokens/s", "tokens", 1))
    pages[0].write_text(memory_table.PAGES[0].read_text().replace("% free", "% left", 1))
    monkeypatch.setattr(memory_table, "PAGES", tuple(pages))
    assert memory_table.main(["--check"]) == 1
    assert "README.md" in capsys.readouterr().err


@pytest.mark.parametrize(("model", "method", "gpu"), QUICK)
def test_a_cell(model, method, gpu):
    """The command prints it for this number of GPUs, and nothing fits on half of them."""
    written = json.loads(RESULTS.read_text())[key(model, method, gpu)]
    count = written[0]
    assert search_cell(model, method, gpu, (count // 2, count) if count > 1 else (1,)) == Cell(*written)
    assert count in COUNTS

"""The support matrix of the README and of its page says what the results say, and nothing else."""

import json
import re
from unittest import mock

import pytest

from tests import support_matrix
from tests.support_matrix import BEGIN, END

RESULTS = {
    "versions": {"torch": "2.13.0"},
    "cells": {"tp=2,pp=2": {"Llama": "passed", "BERT": "failed"}, "dp_shard=2": {"Llama": "passed", "LoRA": "passed"}},
}


@pytest.fixture
def files(tmp_path):
    readme, page, results = tmp_path / "README.md", tmp_path / "support_matrix.md", tmp_path / "support.json"
    for path in (readme, page):
        path.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nThe end.\n")
    results.write_text(json.dumps(RESULTS))
    return (readme, page), ["--readme", str(readme), "--page", str(page), "--results", str(results)]


def test_rows_columns_and_signs():
    lines = support_matrix.table(RESULTS).splitlines()
    assert lines[0] == "| model | `dp_shard=2` | `tp=2,pp=2` |"
    assert "| Llama | ✓ | ✓ |" in lines
    assert "| BERT |  | ✗ |" in lines
    assert "| LoRA | ✓ |" in lines
    assert not any("pipeline schedule" in line for line in lines)
    assert "torch 2.13.0" in lines[-1]


def test_write_then_check(files):
    pages, arguments = files
    assert support_matrix.main([*arguments, "--check"]) == 1
    assert all("old" in page.read_text() for page in pages)
    assert support_matrix.main(arguments) == 0
    assert support_matrix.main([*arguments, "--check"]) == 0
    for page, title in zip(pages, ("| model |", "| feature |"), strict=True):
        text = page.read_text()
        assert text.startswith("# Title\n\n")
        assert text.endswith("\n\nThe end.\n")
        assert "old" not in text
        assert re.findall(r"^\| [a-z]+ \|", text, re.MULTILINE) == [title]
    pages[1].write_text(pages[1].read_text().replace("✓", "✗"))
    assert support_matrix.main([*arguments, "--check"]) == 1


def test_the_pages_say_what_was_recorded():
    assert support_matrix.main(["--check"]) == 0
    assert {*support_matrix.FIRST, *support_matrix.REST} == set(support_matrix.TABLES)


def test_a_column_nobody_knows_is_an_error():
    with pytest.raises(ValueError, match="Lama"):
        support_matrix.table({**RESULTS, "cells": {"tp=2": {"Lama": "passed"}}})


def test_one_layout_is_one_column():
    cells = {"dp_shard=2,tp=2": {"Llama": "passed"}, "tp=2,dp_shard=2": {"BERT": "refused"}}
    lines = support_matrix.table({**RESULTS, "cells": cells}).splitlines()
    assert lines[0] == "| model | `tp=2,dp_shard=2` |"
    assert "| BERT | – |" in lines


def test_a_part_is_added_to_what_was_recorded():
    part = {"versions": RESULTS["versions"], "cells": {"tp=2,pp=2": {"BERT": "passed"}, "pp=2": {"Llama": "passed"}}}
    cells = support_matrix.added(RESULTS, part)["cells"]
    assert cells["tp=2,pp=2"] == {"Llama": "passed", "BERT": "passed"}
    assert (cells["dp_shard=2"], cells["pp=2"]) == (RESULTS["cells"]["dp_shard=2"], {"Llama": "passed"})


def test_rows_recorded_before_an_upgrade_say_so():
    """A row of two versions is an error; a whole row is recorded, and the others keep their versions."""
    commits, newer = {"Llama": "abc1234", "BERT": "def5678"}, {"torch": "2.14.0"}
    part = {"versions": newer, "commits": {"BERT": "0123456"}, "cells": {"tp=2,pp=2": {"BERT": "passed"}}}
    results = support_matrix.added({**RESULTS, "commits": commits}, part)
    assert results["commits"] == {"Llama": "abc1234 with torch 2.13.0", "BERT": "0123456"}
    assert results["versions"] == newer
    again = support_matrix.added(results, {**part, "versions": {"torch": "2.15.0"}})
    assert again["commits"]["Llama"] == "abc1234 with torch 2.13.0"
    assert "Recorded on commit abc1234 with torch 2.13.0; BERT on 0123456." in support_matrix.table(results)
    with pytest.raises(ValueError, match="all cells of Llama again"):
        support_matrix.added(RESULTS, {"versions": newer, "cells": {"tp=2,pp=2": {"Llama": "passed"}}})


def test_what_was_compared_and_on_which_commit():
    commits = {"Llama": "abc1234", "BERT": "def5678"}
    text = support_matrix.table({**RESULTS, "commits": commits})
    assert f"Compared: {support_matrix.TRAINER}. Recorded on commit abc1234; BERT on def5678." in text
    part = {
        "versions": RESULTS["versions"],
        "commits": {"BERT": "0123456"},
        "cells": {"tp=2,pp=2": {"BERT": "passed"}},
    }
    assert support_matrix.added({**RESULTS, "commits": commits}, part)["commits"] == {**commits, "BERT": "0123456"}
    assert set(support_matrix.COMPARED) == set(support_matrix.TABLES)


def test_sequences_over_ranks_have_a_table():
    """A cell by the axes of a spec alone, in the order of all layouts."""
    lines = support_matrix.table({**RESULTS, "cells": {"cp=2,tp=2": {"Trainer": "passed"}}}).splitlines()
    assert lines[0] == "| context parallelism | `tp=2,cp=2` |"
    node = mock.Mock()
    node.get_closest_marker.return_value = pytest.mark.support("{name}, each variant").mark
    node.callspec.params = {"name": "bert", "spec": "cp=4,context_parallel=hybrid:2,dp_shard=2"}
    assert support_matrix.cell(node) == ("cp=4,dp_shard=2", "BERT, each variant")


def test_scripts_have_their_rows():
    pytest.importorskip("datasets")
    from tests.outside.cases import CASES

    assert set(CASES) <= set(support_matrix.TABLES["unchanged script"])

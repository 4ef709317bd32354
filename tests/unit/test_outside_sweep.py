"""The driver that runs other projects' own scripts: what it edits, how it judges, and the table it prints."""

import pytest

pytest.importorskip("datasets")

from tests.outside import sweep
from tests.outside.cases import Case
from tests.outside.originals import ORIGINALS, SPECS


@pytest.fixture
def desk(tmp_path):
    (tmp_path / "sources" / "project").mkdir(parents=True)
    (tmp_path / "work" / "root").mkdir(parents=True)
    (tmp_path / "work" / "root" / "written").touch()
    (tmp_path / "sources" / "project" / "train.py").write_text("import beside\nbatch_size = 16\nsteps = 100\n")
    (tmp_path / "sources" / "project" / "beside.py").write_text("")
    return sweep.Desk(str(tmp_path / "sources"), str(tmp_path / "work"))


def test_an_original_runs_where_it_lies(desk):
    assert desk.script(Case("project/train.py", "")) == desk.sources / "project" / "train.py"


def test_an_edited_copy_keeps_its_neighbours(desk):
    edits = (("batch_size = 16", "batch_size = ROWS"), ("not there", "?"))
    copy = desk.script(Case("project/train.py", "", edits=edits))
    assert copy.read_text() == "import beside\nbatch_size = ROWS\nsteps = 100\n"
    assert (copy.parent / "beside.py").exists()
    assert "ROWS" not in (desk.sources / "project" / "train.py").read_text()


def test_edits_that_match_nothing_are_an_error(desk):
    with pytest.raises(ValueError, match="nothing to edit"):
        desk.script(Case("project/train.py", "", edits=(("not there", "?"),)))


class Failure:
    def __init__(self, kind, message, others=()):
        self.kind, self.message, self.kinds = kind, message, dict(enumerate((kind, *others)))


@pytest.mark.parametrize(
    ("failure", "outcome"),
    [
        (Failure("SpecError", "tp_size=2: no; tp_size=1 works"), "refused"),
        (Failure("RuntimeError", "lost a peer", ["SpecError"]), "refused"),
        (Failure("NotImplementedError", "hf_parallel: how it uses this is not known"), "refused"),
        (Failure("IndexError", "index 2 is out of bounds"), "error"),
        (Failure("Hung", "still running after 170 s"), "stands still"),
    ],
)
def test_only_errors_in_our_words_are_refusals(failure, outcome):
    assert sweep.judged(failure)[0] == outcome


def test_the_latest_row_counts_and_is_explained(desk):
    first, second = list(ORIGINALS)[:2]
    desk.note(first, SPECS[0], "error", "IndexError: 2", 1.0)
    desk.note(first, SPECS[0], "equal", "3 steps", 1.0)
    desk.note(second, SPECS[1], "refused", "pp_size=2: no; pp_size=1 works", 1.0)
    shown = sweep.table(desk.known())
    assert f"| {first} | ✓ |" in shown
    assert f"- – pp_size=2: no; pp_size=1 works: {second} on `{SPECS[1]}`" in shown
    assert "IndexError" not in shown

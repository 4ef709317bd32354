"""TRL's scripts on layouts that tests/parity/test_trl.py leaves out."""

import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")

from tests import trl_scripts
from tests.parity.test_trl import check

LAYOUTS = [("kto", "tp=2"), ("reward", "tp=2"), ("reward", "tp=2,pp=2")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trl_scripts.Folder(tmp_path_factory.mktemp("trl"))


@pytest.mark.support("trl {name}")
@pytest.mark.parametrize(("name", "spec"), LAYOUTS)
def test_as_in_one_process(folder, name, spec):
    check(folder, name, "preference", "", spec)

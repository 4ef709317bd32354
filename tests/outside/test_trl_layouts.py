"""TRL's scripts on layouts that tests/parity/test_trl.py leaves out."""

import pytest

pytest.importorskip("trl")
pytest.importorskip("datasets")

LAYOUTS = [("kto", "tp=2"), ("reward", "tp=2"), ("reward", "tp=2,pp=2")]


@pytest.mark.support("trl {name}")
@pytest.mark.parametrize(("name", "spec"), LAYOUTS)
def test_as_in_one_process(trl_runs, name, spec):
    trl_runs.check(name, "preference", "", spec)

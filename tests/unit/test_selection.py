"""What a plain run leaves out: never a test, an axis or a pair of axes of a file, and never because of other files."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest, selection
from tests.selection import AXES, Case, choose, values

MODELS = ("llama", "gpt2", "t5")
SPECS = ("dp_shard=2", "tp=2", "pp=2", "tp=2,pp=2", "tp=2,dp_shard=2", "pp=2,dp_shard=2,pipeline_schedule=gpipe")


def cases(file="tests/parity/test_a.py", test="test_one", models=MODELS, specs=SPECS):
    name = f"{file}::{test}"
    pairs = [(model, spec) for model in models for spec in specs]
    return [Case(f"{name}[{m}-{s}]", name, values({"model": m, "spec": s})) for m, s in pairs]


def test_values_of_a_case():
    found = values(
        {"spec": "tp=2,dp_shard=-1,pp=1,pipeline_schedule=gpipe", "model": "llama", "n": 3}, ["dp_replicate=2"]
    )
    assert found == {"tp", "dp_shard", "dp_replicate", "pipeline_schedule=gpipe", "model=llama", "n=3"}
    assert values({"thing": object()}) == values({"thing": object()})  # no address


def test_smoke_then_covering_while_seconds_last():
    """Every axis and pair of axes of the file; then values and pairs of values, as many as the time allows."""
    everything = cases()
    seconds = {everything[0].test: 1.0}
    taken = {
        limit: [case for case in everything if case.name in choose(everything, seconds, limit)] for limit in (1, 9, 99)
    }
    for some in taken.values():
        axes = {axes for case in some for axes in case.axes}
        assert axes == {axes for case in everything for axes in case.axes}
    assert len(taken[1]) == 6  # the axes alone and their pairs, of whatever model
    assert {model for case in taken[9] for model in case.values if "model=" in model} == {f"model={m}" for m in MODELS}
    assert len(taken[9]) == 9
    assert taken[99] == everything
    assert set(taken[1]) <= set(taken[9])


def test_a_long_test_runs_once():
    plain = [
        Case(f"t/parity/test_b.py::test_two[{n}]", "t/parity/test_b.py::test_two", values({"n": n})) for n in range(9)
    ]
    assert len(choose(plain, {}, 1.0)) == 1


def test_a_case_that_takes_too_long_is_left_to_all():
    long, short = (Case(f"t/parity/test_b.py::{name}", f"t/parity/test_b.py::{name}") for name in ("long", "short"))
    seconds = {long.test: selection.LONGEST_CASE + 1, short.test: selection.LONGEST_CASE - 1}
    assert choose([long, short], seconds) == {short.name}


@pytest.mark.parametrize("added", [cases("tests/parity/test_0.py"), cases("tests/parity/test_z.py", models=("bert",))])
def test_other_files_change_nothing(added):
    before, after = choose(cases(), {}), choose([*added, *cases()], {})
    assert before == after - {case.name for case in added}


def test_two_halves_are_all_files():
    """A short file is in both; where a long file belongs does not depend on others."""
    files = {f"tests/parity/test_{number}.py": 10.0 for number in range(40)} | {"tests/unit/test_a.py": 0.1}
    first, second = (selection.choose_half(files, half) for half in (0, 1))
    assert first | second == set(files)
    assert first & second == {"tests/unit/test_a.py"}
    assert 10 < len(first) < 31
    alone = {"tests/parity/test_3.py": 10.0}
    assert (selection.choose_half(alone, 0) == alone.keys()) == ("tests/parity/test_3.py" in first)


def test_a_commit_has_one_half(tmp_path):
    root = selection.SECONDS.parents[2]
    assert selection.half_of_commit(root) == selection.half_of_commit(root)
    assert selection.half_of_commit(tmp_path) == 0  # no git


def test_no_order_changes_it():
    assert choose(cases(), {}) == choose(reversed(cases()), {})


def test_files_that_take_long_come_first(monkeypatch):
    """Of two workers the one that ends first waits for the other's last file."""
    seconds = {"t/parity/test_long.py::test_one": 9.0, "t/parity/test_many.py::test_two": 1.0}
    monkeypatch.setattr(selection, "recorded", lambda: seconds)
    names = ["t/unit/test_new.py::test_new", *(f"t/parity/test_many.py::test_two[{n}]" for n in range(3))]
    items = [SimpleNamespace(nodeid=name) for name in [*names, "t/parity/test_long.py::test_one"]]
    conftest._put_long_files_first(items)
    assert [item.nodeid for item in items] == [items[0].nodeid, *names[1:], names[0]]
    assert items[0].nodeid == "t/parity/test_long.py::test_one"


def test_a_plain_run_keeps_to_its_time(request):
    """Else PER_TEST, or what a new test takes, has to come down; `--record-seconds` measures."""
    if not request.config.args or request.config.args == request.config.getini("testpaths"):
        limit = selection.PER_RUN if request.config.getoption("--half") is None else selection.PER_HALF
        assert request.config.stash.get(conftest.CHOSEN, 0.0) <= limit


def test_what_was_measured_is_still_there():
    """A test that was renamed would count as unmeasured."""
    known = set(selection.recorded())
    root = selection.SECONDS.parents[2]
    gone = [t for t in known if f"def {t.split('::')[1]}(" not in (root / t.split("::")[0]).read_text()]
    assert gone == []
    assert set(AXES) >= {"tp", "pp", "dp_shard", "dp_replicate"}


def test_unit_tests_start_no_process():
    """They are in tests/processes, tests/parity and the other folders."""
    found = []
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        try:
            module = importlib.import_module(f"tests.unit.{path.stem}")
        except pytest.skip.Exception:  # a library is missing
            continue
        tests = {name: value for name, value in vars(module).items() if name.startswith("test_") and callable(value)}
        found += [f"{path.name}::{name}" for name, test in tests.items() if selection.starts_processes(test)]
    assert found == []


def test_tests_that_are_gone_are_forgotten():
    """By file and by name; one whose name is the beginning of another's is gone, too."""
    here = "tests/unit/test_selection.py"
    assert selection.is_there(f"{here}::test_tests_that_are_gone_are_forgotten")
    assert not selection.is_there(f"{here}::test_tests_that_are_gone")
    assert not selection.is_there("tests/unit/test_none.py::test_tests_that_are_gone_are_forgotten")

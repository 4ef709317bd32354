"""What `python -m tests.house` measures, and which nothing may undo."""

from tests.house import circles, imports_of, modules, riddles


def test_no_modules_import_each_other():
    """Nor do they inside of functions, or for types: import-linter looks at neither."""
    known = modules()
    assert circles({name: imports_of(module, known) for name, module in known.items()}) == []


def test_docstrings_begin_with_a_sentence():
    """A public docstring says what it is about."""
    assert [name for name in riddles(modules()) if not name.rpartition(".")[2].startswith("_")] == []

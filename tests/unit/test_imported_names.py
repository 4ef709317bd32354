"""Files that no plain test run imports take names of hf_parallel that exist."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "docs", "examples", "integrations", "tests/outside", "tests/cuda")


def find_missing(source: str) -> list[str]:
    """Return the line and the dotted name of all that a source takes from hf_parallel and that is not there."""
    modules: dict[str, str] = {}
    taken: list[tuple[int, str, str]] = []
    nodes = list(ast.walk(ast.parse(source)))
    for node in nodes:
        if isinstance(node, ast.Import):
            taken += [(node.lineno, *alias.name.rpartition(".")[::2]) for alias in node.names if "." in alias.name]
        elif isinstance(node, ast.ImportFrom) and node.module:
            taken += [(node.lineno, node.module, alias.name) for alias in node.names]
            modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and not node.attr.startswith("__"):
            module = modules.get(node.value.id, "")
            taken += [(node.lineno, module, node.attr)] * (module in _list_modules())
    ours = (one for one in taken if one[1].partition(".")[0] == "hf_parallel")
    return [f"line {line}: {module}.{name}" for line, module, name in ours if not _is_there(module, name)]


def _is_there(module: str, name: str) -> bool:
    known = _list_modules()
    return f"{module}.{name}" in known or (module in known and name in _list_names(known[module]))


@cache
def _list_modules() -> dict[str, Path]:
    """Return the files of the package's modules by dotted name."""
    files = {path.relative_to(ROOT).with_suffix("").parts: path for path in (ROOT / "hf_parallel").rglob("*.py")}
    return {".".join(parts).removesuffix(".__init__"): path for parts, path in files.items()}


@cache
def _list_names(path: Path) -> set[str]:
    """Return what a module defines, imports or assigns, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _list_files() -> Iterator[Path]:
    for folder in FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def test_names_taken_from_the_package_exist():
    files = list(_list_files())
    assert len(files) > 80
    found = [f"{file.relative_to(ROOT)}: {line}" for file in files for line in find_missing(file.read_text())]
    assert not found, "not in hf_parallel:\n" + "\n".join(found)


def test_a_name_that_is_not_there_is_found():
    """A module, a name of a module, and an attribute of an imported module."""
    assert find_missing("import hf_parallel.axes.data.zero\nfrom hf_parallel import parallelize, axes\n") == []
    assert find_missing("import hf_parallel.axes.none\n") == ["line 1: hf_parallel.axes.none"]
    assert find_missing("from hf_parallel.axes.data.zero import none\n") == ["line 1: hf_parallel.axes.data.zero.none"]
    assert find_missing("from hf_parallel.axes.data import zero\nzero.none\nzero.fully_shard\n") == [
        "line 2: hf_parallel.axes.data.zero.none"
    ]

"""Names that tests replace in modules are read there: a test that replaces what nobody reads replaces nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Of monkeypatch, of Python, and of tests/reliability/faults.py.
SETTERS = {"setattr", "_first", "_at_call"}


def find_unread(source: str) -> list[str]:
    """Return what a test's source replaces in modules and classes of ours where nobody reads it."""
    tree = ast.parse(source)
    modules = dict(_list_imports(tree))
    found = []
    for module, name, line in _list_replaced(tree, modules):
        path = _find_module(module)
        of_class = path is None and _find_module(module.rpartition(".")[0]) is not None
        if (path is not None and not _is_read(path, name)) or (of_class and not _is_attribute(name)):
            found.append(f"line {line}: {module}.{name}")
    return found


def _list_imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield each imported name, as the file calls it, with its dotted name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.asname or alias.name, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def _list_replaced(tree: ast.AST, modules: dict[str, str]) -> Iterator[tuple[str, str, int]]:
    """Yield owner, name and line of `setattr(owner, "name", …)`, `setattr("owner.name", …)` and `owner.name = …`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            targets = [target for target in node.targets if isinstance(target, ast.Attribute)]
            yield from ((_resolve(target.value, modules), target.attr, node.lineno) for target in targets)
        called = node.func if isinstance(node, ast.Call) else None
        if getattr(called, "attr", getattr(called, "id", "")) not in SETTERS or not node.args:
            continue
        words = [arg.value if isinstance(arg, ast.Constant) else None for arg in node.args[:2]]
        if isinstance(words[0], str):
            yield *words[0].rpartition(".")[::2], node.lineno
        elif len(words) == 2 and isinstance(words[1], str):
            yield _resolve(node.args[0], modules), words[1], node.lineno


def _resolve(owner: ast.expr, modules: dict[str, str]) -> str:
    """Return the dotted name of an imported module or class; an empty text for others."""
    first, dot, rest = ast.unparse(owner).partition(".")
    return modules[first] + dot + rest if first in modules else ""


@cache
def _find_module(name: str) -> Path | None:
    """Return the file of a module of hf_parallel; None for other packages, classes and functions."""
    path = ROOT / name.replace(".", "/")
    candidates = path.with_suffix(".py"), path / "__init__.py"
    return next((file for file in candidates if file.exists()), None) if name.startswith("hf_parallel.") else None


def _is_read(path: Path, name: str) -> bool:
    """Is the name of this module read in it, or taken from it by code that runs later?"""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return name in _list_read(path) or any((module, name) in _list_taken(file) for file in _list_sources())


def _is_attribute(name: str) -> bool:
    return any(name == attribute for file in _list_sources() for _, attribute in _list_taken(file))


@cache
def _list_sources() -> list[Path]:
    return sorted((ROOT / "hf_parallel").rglob("*.py"))


@cache
def _list_read(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}


@cache
def _list_taken(path: Path) -> set[tuple[str, str]]:
    """List module and name of `module.name`, and of `from module import name` inside functions."""
    tree = ast.parse(path.read_text())
    modules, top = dict(_list_imports(tree)), set(tree.body)
    taken = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            taken.add((modules.get(ast.unparse(node.value), ""), node.attr))
        elif isinstance(node, ast.ImportFrom) and node.module and node not in top:
            taken |= {(node.module, alias.name) for alias in node.names}
    return taken


def test_what_tests_replace_is_read():
    """In every file of the tests."""
    files = sorted((ROOT / "tests").rglob("*.py"))
    found = [f"{file.relative_to(ROOT)}: {line}" for file in files for line in find_unread(file.read_text())]
    assert not found, "no code reads:\n" + "\n".join(found)


def test_a_name_that_nobody_reads_is_found():
    """A name of another module, and one that the module only defines."""
    source = "from hf_parallel.axes.data import zero\nmonkeypatch.setattr(zero, {!r}, 0)\n"
    assert find_unread(source.format("BUCKET")) == []
    assert find_unread(source.format("BUCKETS")) == ["line 2: hf_parallel.axes.data.zero.BUCKETS"]
    assert find_unread('patch.setattr("hf_parallel.axes.data.zero.BUCKETS", 0)\n')
    of_class = "from hf_parallel.ask.config import ParallelConfig\npatch.setattr(ParallelConfig, {!r}, None)\n"
    assert find_unread(of_class.format("parse")) == []
    assert find_unread(of_class.format("parses"))
    of_its_module = "from hf_parallel.ask import config\n_first(config.ParallelConfig, {!r}, None)\n"
    assert find_unread(of_its_module.format("parse")) == []
    assert find_unread(of_its_module.format("parses"))
    assigned = "from hf_parallel.ask import config\nconfig.ParallelConfig.{} = None\n"
    assert find_unread(assigned.format("parse")) == []
    assert find_unread(assigned.format("parses"))

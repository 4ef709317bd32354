"""Measure how the package is built: `python -m tests.house` prints each figure beside its goal.

The figures come from the source, by `ast`, and from the pages; nothing is imported. `BEFORE` has the first ones.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import tomllib

ROOT = Path(__file__).parent.parent
PACKAGE = "hf_parallel"
#: Names that say nothing by themselves: at most one module may have a function of such a name.
VAGUE = {"check", "read", "begin", "place", "leave", "part", "of", "plain", "step", "run", "wait"}
#: Openings of docstrings that have no verb, or hide the subject.
RIDDLES = re.compile(r"(Of|Those|That|The same|What|Which|How|Whether|One|None|Also|And|As|In here)\b")
#: Functions that every command has.
SHARED = {"main", "add_arguments"}
#: Lines of a function that may say no more than its body would in the place of its single use.
SHORT = 4
MUTABLE = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
CONTAINERS = {"dict", "list", "set", "defaultdict", "Counter", "deque", "WeakKeyDictionary", "WeakValueDictionary"}
#: What each figure was when it was first measured.
BEFORE = {
    "functions per 1,000 lines": "75",
    # Too few: uses are counted by name, and many functions of that time shared their name with others.
    "top-level functions with a single use": "706",
    "lines per file": "140",
    "share of blank and import lines": "28 %",
    "files at the package's root": "20",
    "rooms (folders with code)": "36",
    "floors (layers of the import contract)": "16",
    "modules in import circles": "90 in the largest of 5",
    "mutable or global module-level names": "52",
    "vague names in two modules": "6 (37 check, 24 read, 20 begin, 16 place, 15 leave, 9 of)",
    "function names in two modules": "235",
    "docstrings that open with a riddle": "hundreds of 3,148",
}
GOAL = {
    "functions per 1,000 lines": "30-55",
    "longest function": "<= 60",
    "lines per file": "200-500",
    "share of blank and import lines": "<= 18 %",
    "files at the package's root": "<= 3",
    "rooms (folders with code)": "<= 18",
    "floors (layers of the import contract)": "<= 11",
    "modules in import circles": "0",
    "mutable or global module-level names": "<= 15",
    "vague names in two modules": "0",
    "function names in two modules": "0, or public ones",
    "docstrings that open with a riddle": "0 in public ones",
    "words of docs outside docs/reference": "<= 30,000",
}


@dataclass(frozen=True)
class Module:
    """One source file of the package."""

    name: str
    path: Path

    @cached_property
    def text(self) -> str:
        """The source."""
        return self.path.read_text()

    @cached_property
    def tree(self) -> ast.Module:
        """The source as a tree."""
        return ast.parse(self.text)

    @property
    def functions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
        """All functions and methods."""
        return [node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    @property
    def import_lines(self) -> int:
        """Number of lines that import."""
        imports = (node for node in ast.walk(self.tree) if isinstance(node, ast.Import | ast.ImportFrom))
        return sum((node.end_lineno or node.lineno) - node.lineno + 1 for node in imports)


def modules() -> dict[str, Module]:
    """Return all modules of the package by dotted name."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = Module(name, path)
    return found


def imports_of(module: Module, known: dict[str, Module]) -> set[str]:
    """Return the modules that a module imports anywhere: at its top, inside functions, for types."""
    found = set()
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name in known}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & set(known)
            if names - set(known):
                found.add(str(node.module))
    return found - {module.name}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that import each other, the largest first (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            place = stack.index(node)
            found.append(stack[place:])
            del stack[place:]

    sys.setrecursionlimit(10_000)
    for node in graph:
        if node not in index:
            visit(node)
    return sorted((sorted(group) for group in found if len(group) > 1), key=len, reverse=True)


def count_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of lines of a function, from its `def` on, without its docstring."""
    first = function.body[0]
    has_docstring = ast.get_docstring(function, clean=False) is not None
    written = (first.end_lineno or first.lineno) - first.lineno + 1 if has_docstring else 0
    return (function.end_lineno or function.lineno) - function.lineno + 1 - written


def find_longest_function(known: dict[str, Module]) -> str:
    """Return the number of lines of the longest function, and its name."""
    found = [(count_lines(node), f"{name}.{node.name}") for name, one in known.items() for node in one.functions]
    return "{} ({})".format(*max(found))


def single_uses(known: dict[str, Module], most: int | None = None) -> list[str]:
    """Return top-level functions whose name occurs once beside their definition, in their own module.

    Args:
        most: leaves out those of more lines.
    """
    words = {name: Counter(re.findall(r"\w+", module.text)) for name, module in known.items()}
    everywhere: Counter[str] = Counter()
    for counted in words.values():
        everywhere.update(counted)
    found = []
    for name, module in known.items():
        for node in module.tree.body:
            is_short = isinstance(node, ast.FunctionDef) and (most is None or count_lines(node) <= most)
            if is_short and not node.decorator_list and words[name][node.name] == 2:
                found += [f"{name}.{node.name}"] if everywhere[node.name] == 2 else []
    return found


def mutable_names(module: Module) -> Iterator[str]:
    """Yield module-level names that code can change: containers that are written to, and names in `global`."""
    rebound = {name for node in ast.walk(module.tree) if isinstance(node, ast.Global) for name in node.names}
    yield from (f"{module.name}.{name}" for name in sorted(rebound))
    for node in module.tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        value = getattr(node, "value", None)
        if not isinstance(target, ast.Name) or value is None or target.id in rebound or target.id == "__all__":
            continue
        called = getattr(getattr(value, "func", None), "id", "")
        if (isinstance(value, MUTABLE) or called in CONTAINERS) and _is_written(module.text, target.id):
            yield f"{module.name}.{target.id}"


def _is_written(text: str, name: str) -> bool:
    methods = "append|add|update|setdefault|pop|popitem|clear|extend|discard|remove|insert|appendleft"
    return bool(re.search(rf"\b{name}(\.({methods})\(|\[[^\]]*\]\s*([-+|]?=)[^=])|\bdel {name}\[", text))


def find_shared_names(known: dict[str, Module]) -> dict[str, list[str]]:
    """Return the top-level functions that more than one module defines: name -> modules.

    Replacements in other libraries are called by nobody, and each command has its `main` and `add_arguments`.
    """
    homes = defaultdict(set)
    for name, module in known.items():
        for node in module.tree.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name in SHARED:
                continue
            if not any(ast.unparse(decorator).startswith("patch(") for decorator in node.decorator_list):
                homes[node.name].add(name)
    return {name: sorted(places) for name, places in sorted(homes.items()) if len(places) > 1}


def docstrings(known: dict[str, Module]) -> Iterator[tuple[str, str]]:
    """Yield the full name and the docstring of every module, class and function that has one."""
    for name, module in known.items():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    yield f"{name}.{getattr(node, 'name', '')}".rstrip("."), text


def riddles(known: dict[str, Module]) -> list[str]:
    """Return the names of whatever has a docstring that opens with a word of `RIDDLES`."""
    return [name for name, text in docstrings(known) if RIDDLES.match(text)]


def figures() -> dict[str, str]:
    """Return each figure as text."""
    known = modules()
    lines = sum(module.text.count("\n") for module in known.values())
    blank = sum(1 for module in known.values() for line in module.text.splitlines() if not line.strip())
    importing = sum(module.import_lines for module in known.values())
    functions = sum(len(module.functions) for module in known.values())
    groups = circles({name: imports_of(module, known) for name, module in known.items()})
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    written = [name for module in known.values() for name in mutable_names(module)]
    homes, texts, hidden = find_shared_names(known), list(docstrings(known)), riddles(known)
    vague = {name: len(places) for name, places in homes.items() if name in VAGUE}
    public = [name for name in hidden if not name.rpartition(".")[2].startswith("_")]
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "reference" not in page.parts]
    circle = f"{len(groups[0])} in the largest of {len(groups)}" if groups else "0"
    return {
        "lines": f"{lines:,}",
        "files": str(len(known)),
        "AST statements": f"{sum(isinstance(n, ast.stmt) for m in known.values() for n in ast.walk(m.tree)):,}",
        "functions per 1,000 lines": f"{1000 * functions / lines:.0f} ({functions:,})",
        "top-level functions with a single use": str(len(single_uses(known))),
        f"single use, at most {SHORT} lines": str(len(single_uses(known, SHORT))),
        "longest function": find_longest_function(known),
        "lines per file": f"{lines / len(known):.0f}",
        "share of blank and import lines": f"{100 * (blank + importing) / lines:.0f} %",
        "files at the package's root": str(len(list((ROOT / PACKAGE).glob("*.py")))),
        "rooms (folders with code)": str(len({module.path.parent for module in known.values()})),
        "floors (layers of the import contract)": str(len(layers)),
        "modules in import circles": circle,
        "mutable or global module-level names": str(len(written)),
        "vague names in two modules": f"{len(vague)} ({', '.join(f'{n} {name}' for name, n in vague.items())})",
        "function names in two modules": str(len(homes)),
        "docstrings that open with a riddle": f"{len(hidden):,} of {len(texts):,}, {len(public):,} public",
        "words of docs outside docs/reference": f"{sum(len(page.read_text().split()) for page in pages):,}",
    }


def main() -> None:
    """Print the table, or with `--list NAME` what stands behind a figure."""
    known = modules()
    lists = {
        "circles": lambda: [" ".join(group) for group in circles({n: imports_of(m, known) for n, m in known.items()})],
        "single": lambda: single_uses(known),
        "short": lambda: single_uses(known, SHORT),
        "mutable": lambda: [name for module in known.values() for name in mutable_names(module)],
        "names": lambda: [f"{name}: {' '.join(places)}" for name, places in find_shared_names(known).items()],
        "riddles": lambda: riddles(known),
    }
    if sys.argv[1:2] == ["--list"]:
        print(*lists[sys.argv[2]](), sep="\n")
        return
    print(f"{'':40} {'now':42} {'before':60} goal")
    for name, value in figures().items():
        print(f"{name:40} {value:42} {BEFORE.get(name, ''):60} {GOAL.get(name, '')}")


if __name__ == "__main__":
    main()

"""A script's command line from a recipe: what its user gave stays, what it does not take is left out.

Which options a script takes is read from its text, which is not run: classes of arguments that it imports, its own
dataclasses, its `add_argument("--name")`.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from hf_parallel.recipes.recipe import Recipe
from hf_parallel.spec import read_yaml, refuse

#: What scripts call the model, the most usual first.
_MODEL_OPTIONS = ("model_name_or_path", "model_name", "model_id", "model")
#: Of `data` what is an option of scripts; the rest is for people.
_DATA_OPTIONS = ("dataset_name", "dataset_config")


@dataclasses.dataclass(frozen=True)
class Filled:
    """The words of a script, and the options among them that are the recipe's; those left to the user, or unknown."""

    words: list[str]
    filled: tuple[str, ...]
    given: tuple[str, ...]
    unknown: tuple[str, ...]


def fill(recipe: Recipe, words: list[str], known: set[str], script: str) -> Filled:
    """The user's words behind what the recipe adds: of an option given twice parsers take the last.

    Args:
        known: options that the script takes.

    Raises:
        SpecError: the options are in a file that replaces the command line.
    """
    if len(words) == 1 and words[0].endswith(".json"):
        refuse(words[0], "a script that reads its arguments from a file takes no others", do="give them as options")
    wanted, have = options(recipe, known), given_options(words)
    filled = {key: value for key, value in wanted.items() if key in known and key not in have}
    unknown = tuple(key for key in wanted if key not in known and key not in have)
    if known.isdisjoint(wanted):
        why = "its text shows no option that the recipe has"
        refuse(script, why, do=f"--parallel {recipe.name} takes the layout alone")
    spelled = {key: [f"--{key}", *_spelled(value)] for key, value in filled.items()}
    added = [word for option in spelled.values() for word in option]
    yours = tuple(key for key in wanted if key in have)
    return Filled([*added, *words], tuple(map(" ".join, spelled.values())), yours, unknown)


def options(recipe: Recipe, known: set[str]) -> dict[str, object]:
    """All options of a recipe, the model's under the name that the script has for it."""
    model = next((name for name in _MODEL_OPTIONS if name in known), _MODEL_OPTIONS[0])
    data = {key: recipe.data[key] for key in _DATA_OPTIONS if key in recipe.data}
    if recipe.script is None:
        data = {}
    return {model: recipe.model, **data, **recipe.script_arguments, **recipe.arguments}


def given_options(words: list[str]) -> set[str]:
    """Options among words: `--a 1`, `--a=1`, `--no_a`, and the keys of TRL's `--config FILE`."""
    found: set[str] = set()
    for word, following in zip(words, [*words[1:], ""], strict=False):
        if not word.startswith("--"):
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        found |= {name, name.removeprefix("no_")}
        file = value if equals else following
        if name == "config" and file.endswith((".yaml", ".yml")):
            found |= {str(key) for key in read_yaml(file)}
    if "datasets" in found:  # TRL's mixture of several
        found |= set(_DATA_OPTIONS)
    return found


def _spelled(value: object) -> list[str]:
    if isinstance(value, list):
        return [str(item) for item in value]
    if isinstance(value, dict):
        return [json.dumps(value)]
    return [str(value).lower() if isinstance(value, bool) else str(value)]


# ---- what a script takes -----------------------------------------------------------------------------------------


def options_of(script: str, is_module: bool) -> set[str]:
    """The options that a script's text shows.

    Raises:
        SpecError: there is no such script or module, or it is no Python.
    """
    path = _module_file(script) if is_module else Path(script)
    if not path.is_file():
        refuse(script, "no such script")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        refuse(script, f"not Python ({error.msg}, line {error.lineno})", cause=error)
    return {name for node in ast.walk(tree) for name in _shown(node)}


def _module_file(name: str) -> Path:
    try:
        found = importlib.util.find_spec(name)
    except ImportError:
        found = None
    if found is None or found.origin is None:
        refuse(f"-m {name}", "no such module", do=f"pip install {name.partition('.')[0]}")
    return Path(found.origin)


def _shown(node: ast.AST) -> Iterator[str]:
    """Options that one piece of a script shows."""
    if isinstance(node, ast.ImportFrom):
        for alias in node.names:
            yield from _fields(node.module or "", alias.name)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        yield from _fields(node.value.id, node.attr)
    elif isinstance(node, ast.ClassDef):
        places = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
        yield from (place.id for place in places if isinstance(place, ast.Name))
    elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
        names = [part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)]
        yield from (name[2:].replace("-", "_") for name in names if name.startswith("--"))


def _fields(module: str, name: str) -> Iterator[str]:
    """The fields of a class of arguments of Transformers or TRL; nothing else is imported."""
    library = module.partition(".")[0]
    of_trl = library == "trl" and name.endswith(("Config", "Arguments"))
    if not (of_trl or (library == "transformers" and name.endswith("TrainingArguments"))):
        return
    kind = getattr(importlib.import_module(library), name, None)
    if kind is not None and dataclasses.is_dataclass(kind):
        yield from (field.name for field in dataclasses.fields(kind))

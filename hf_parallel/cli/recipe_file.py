"""A recipe as a value: read from its YAML, every key looked at, nothing run that a file says.

recipe = load("qwen3-0.6b-full-1x24gb")     # or a file, or owner/repo[:file][@revision] of the Hub
recipe.layout.to_spec(), recipe.hardware.gpus, recipe.arguments["learning_rate"]
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.resources
import importlib.util
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.spec import (
    HUB_FILE,
    RECIPE_KEYS,
    check_model_name,
    convert,
    layout_of,
    list_shipped_recipes,
    locate_spec_file,
    read_yaml,
    refuse,
    suggest_key,
    suggest_recipes,
)
from hf_parallel.planner.hardware import Cluster, make_cluster

if TYPE_CHECKING:
    from transformers import PretrainedConfig


#: Ways to train; docs/recipes.md describes them.
METHODS = ("full", "lora", "qlora", "dpo", "grpo", "pretrain", "long_context")
#: Scripts that a recipe may name, and the class of their Trainer's arguments; none: a script of the user's own.
CONFIG_CLASSES = {
    "trl.scripts.sft": "trl.SFTConfig",
    "trl.scripts.dpo": "trl.DPOConfig",
    "trl.scripts.grpo": "trl.GRPOConfig",
    None: "transformers.TrainingArguments",
}
_MODELS = importlib.resources.files("hf_parallel") / "recipes" / "models"
_NEEDED = ("about", "model", "method", "hardware", "parallel", "arguments", "data")
_TEXTS = ("about", "model", "method", "shape", "script")
_DATA_KEYS = ("tokens_per_row", "dataset_name", "dataset_config", "note")
#: Arguments that memory and speed depend on.
_COUNTS = ("per_device_train_batch_size", "gradient_accumulation_steps")
_EXPECT_KEYS = {
    "planner": ("memory_gib", "step_s", "tokens_per_s", "within", "note"),
    "dry_run": ("memory_gib",),
    "measured": ("memory_gib", "step_s", "tokens_per_s", "note"),
}


@dataclass(frozen=True)
class Hardware:
    """The machines: a GPU and a link between nodes of the planner's catalogue."""

    gpu: str
    gpus: int
    gpus_per_node: int = 8
    network: str | None = None

    @property
    def cluster(self) -> Cluster:
        """Return the machines as the planner has them."""
        return make_cluster(self.gpu, self.gpus, self.gpus_per_node, self.network)

    @property
    def nodes(self) -> int:
        """Return the number of machines."""
        return -(-self.gpus // self.gpus_per_node)

    def __str__(self) -> str:
        network = f", {self.cluster.between.name} between {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.gpus} x {self.cluster.gpu.name}{network}"


@dataclass(frozen=True)
class Recipe:
    """A recipe; `layout` is resolved for its number of GPUs."""

    name: str
    path: str
    about: str
    model: str
    method: str
    hardware: Hardware
    layout: ParallelConfig
    arguments: dict
    data: dict
    shape: str | None = None
    script: str | None = None
    script_arguments: dict = dataclasses.field(default_factory=dict)
    expect: dict[str, dict] = dataclasses.field(default_factory=dict)

    @property
    def seq(self) -> int:
        """Return the tokens of a sequence."""
        return self.data["tokens_per_row"]

    @property
    def rows(self) -> int:
        """Return the sequences of one model call on a data rank: both answers of a DPO pair count."""
        return self.arguments["per_device_train_batch_size"] * (2 if self.method == "dpo" else 1)

    @property
    def accumulation(self) -> int:
        """Return the model calls per step."""
        return self.arguments.get("gradient_accumulation_steps", 1)

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens of a step on all data ranks."""
        return self.rows * self.accumulation * self.layout.data_parallel_size * self.seq

    @property
    def adapter_rank(self) -> int:
        """Return the rank of LoRA; 0: all weights are trained."""
        return int(self.script_arguments.get("lora_r", 16)) if self.script_arguments.get("use_peft") else 0

    @property
    def four_bit(self) -> bool:
        """Return whether the base is packed to 4 bits."""
        return bool(self.script_arguments.get("load_in_4bit"))

    def config(self) -> PretrainedConfig:
        """Return the model's config: of this package's `recipes/models`, else of the Hub or a folder."""
        if self.shape is not None:
            return read_shipped_config(self.shape)
        check_model_name(self.model, "a folder with a config.json works", needs_weights=False)
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.model, trust_remote_code=False)


def load_recipe(text: str) -> Recipe:
    """Load a recipe by the name of a shipped one, from a file, or from the Hub.

    Raises:
        SpecError: there is none, or its values cannot hold.
    """
    path = locate_spec_file(text)
    if path is None:
        close = suggest_recipes(text)
        meant = f"did you mean {' or '.join(close)}? " if close else ""
        do = f"{meant}`hf-parallel recipe list` names them; a file and owner/repo work, too"
        refuse(text, "no recipe of that name", do=do)
    name = text if text in list_shipped_recipes() else os.path.splitext(os.path.basename(path))[0]
    return read_recipe(name if f"{name}.yaml" != HUB_FILE else text, path)


def read_recipe(name: str, path: str) -> Recipe:
    """Read the recipe of a YAML file.

    Raises:
        SpecError: a key that is not known or missing, or numbers that cannot hold.
    """
    values = read_yaml(path)
    _check_keys(name, values, RECIPE_KEYS, _NEEDED)
    hardware = _read_section(name, values, "hardware", [f.name for f in dataclasses.fields(Hardware)], ("gpu", "gpus"))
    data = _read_section(name, values, "data", _DATA_KEYS, ("tokens_per_row",))
    expect = _read_section(name, values, "expect", _EXPECT_KEYS)
    for source in expect:
        found = _read_section(f"{name}: expect", expect, source, _EXPECT_KEYS[source])
        for key, value in found.items():
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
            if key != "note" and not number:
                refuse(f"{name}: expect: {source}: {key}={value}", "is no number", f"{key}: 1.5")
    for key in _TEXTS:  # YAML takes names that have digits alone for numbers
        value = values.get(key)
        if value is not None and not isinstance(value, str):
            refuse(f"{name}: {key}={value}", f"is a {type(value).__name__}, not a text", f'{key}: "{value}"')
    _convert_to_numbers(f"{name}: hardware", hardware, ("gpus", "gpus_per_node"))
    _convert_to_numbers(f"{name}: data", data, ("tokens_per_row",))
    machines = Hardware(**hardware)
    layout = ParallelConfig.from_mapping(layout_of(values, name)).resolve(machines.gpus)
    kept: dict = {key: values.get(key) for key in _TEXTS}
    words = {key: _read_section(name, values, key) for key in ("arguments", "script_arguments")}
    for key, options in words.items():
        where = f"{name}: {key}"
        for key, value in options.items():
            if value is None:
                refuse(f"{where}: {key}", "has no value", do="leave it out")
            if not isinstance(key, str):
                refuse(f"{where}: {key}", "is no name of an option", do="leave it out")
    _convert_to_numbers(f"{name}: arguments", words["arguments"], _COUNTS)
    kept |= {"hardware": machines, "layout": layout, "data": data, "expect": expect, **words}
    recipe = Recipe(name=name, path=path, **kept)
    _check_recipe(recipe)
    return recipe


def _read_section(
    where: str, values: dict, key: str, known: Collection[str] = (), needed: Collection[str] = ()
) -> dict:
    """Return a mapping in a recipe; without `known` it may have any keys."""
    found = values.get(key) or {}
    if not isinstance(found, dict):
        works = f"{key}: {{{next(iter(known), 'name')}: …}}"
        refuse(f"{where}: {key}", f"is a {type(found).__name__}, not a mapping", works)
    if known:
        _check_keys(f"{where}: {key}", found, known, needed)
    return found


def _convert_to_numbers(where: str, values: dict, keys: tuple[str, ...]) -> None:
    """Convert values to numbers, because YAML takes `4k` for a word."""
    for key in keys:
        if key in values:
            values[key] = convert(f"{where}: {key}", int, values[key], "2")
            if values[key] < 1:
                refuse(f"{where}: {key}={values[key]}", "is one at least", f"{key}: 1")


def _check_keys(where: str, values: Mapping, known: Collection[str], needed: Collection[str] = ()) -> None:
    for key in values:
        if key not in known:
            refuse(f"{where}: {key}", "unknown key", do=suggest_key(str(key), list(known)))
    for key in needed:
        if values.get(key) is None:
            refuse(where, f"{key} is missing", f"a line `{key}: …`")


def _check_recipe(recipe: Recipe) -> None:
    """Check what holds for every recipe, whatever its model."""
    where = recipe.name
    if recipe.method not in METHODS:
        refuse(f"{where}: method={recipe.method}", f"not one of {', '.join(METHODS)}")
    if recipe.script not in CONFIG_CLASSES:
        known = ", ".join(filter(None, CONFIG_CLASSES))
        refuse(f"{where}: script={recipe.script}", f"not one of {known}", do="leave it out for a script of your own")
    if recipe.shape is not None and not (_MODELS / f"{recipe.shape}.json").is_file():
        refuse(f"{where}: shape={recipe.shape}", "no such model", do=f"{', '.join(list_shapes())} are here")
    if "per_device_train_batch_size" not in recipe.arguments:
        refuse(where, "the batch is missing", "arguments: {per_device_train_batch_size: 1}")
    length = recipe.arguments.get("max_length")
    if length not in (None, recipe.seq):
        refuse(f"{where}: tokens_per_row={recipe.seq}", f"max_length is {length}", f"tokens_per_row: {length}")
    if recipe.arguments.get("gradient_checkpointing", recipe.script is not None):
        why = "the layout's activation_checkpointing says what is recomputed; TRL's own default is true"
        refuse(f"{where}: gradient_checkpointing", why, "gradient_checkpointing: false")
    recipe.hardware.cluster  # noqa: B018 - names that the catalogue does not have are refused


def read_shipped_config(shape: str) -> PretrainedConfig:
    """Return the config of one of the models in `recipes/models`."""
    from transformers import AutoConfig

    values = json.loads((_MODELS / f"{shape}.json").read_text(encoding="utf-8"))
    return AutoConfig.for_model(**{key: value for key, value in values.items() if key not in ("source", "model")})


def list_shapes() -> list[str]:
    """Return the models whose sizes come with this package."""
    names = [file.name for file in _MODELS.iterdir() if file.name.endswith(".json")]
    return sorted(name.removesuffix(".json") for name in names)


# ---- Recipes in rows: for a terminal, for docs/reference/recipes.md, for the card of a repository -------------------

_HEADINGS = ("recipe", "model", "method", "machines", "layout", "tokens per step", "GiB per GPU", "tokens/s")


def render_markdown(recipes: list[Recipe]) -> str:
    """Return the table of docs/reference/recipes.md, with a row for each recipe."""
    lines = [_HEADINGS, ("---",) * len(_HEADINGS)]
    for recipe in recipes:  # memory by the planner and the dry run, speed by the planner, or both as measured
        planner, dry = recipe.expect.get("planner", {}), recipe.expect.get("dry_run", {})
        measured = recipe.expect.get("measured", {})
        memory = f"{planner.get('memory_gib', '?')}, {dry.get('memory_gib', '?')}"
        speed = f"{planner.get('tokens_per_s', 0):,.0f}"
        line = (
            f"`{recipe.name}`",
            recipe.model,
            recipe.method,
            str(recipe.hardware),
            f"`{recipe.layout.to_spec()}`",
            f"{recipe.tokens_per_step:,}",
            f"{measured['memory_gib']} measured" if "memory_gib" in measured else memory,
            f"{measured['tokens_per_s']:,} measured" if "tokens_per_s" in measured else speed,
        )
        lines.append(line)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


# ---- A script's command line from a recipe: what its user gave stays, what it does not take is left out -------------
# Which options a script takes is read from its text, which is not run: classes of arguments that it imports, its own
# dataclasses, its `add_argument("--name")`.

#: Options by which scripts name the model, the most usual first.
_MODEL_OPTIONS = ("model_name_or_path", "model_name", "model_id", "model")
#: Keys of `data` that are options of scripts; the rest is for people.
_DATA_OPTIONS = ("dataset_name", "dataset_config")


@dataclasses.dataclass(frozen=True)
class Filled:
    """The words of a script, and which of the recipe's options are among them, were the user's, or are unknown."""

    words: list[str]
    filled: tuple[str, ...]
    given: tuple[str, ...]
    unknown: tuple[str, ...]


def fill_options(recipe: Recipe, words: list[str], known: set[str], script: str) -> Filled:
    """Put the recipe's options before the user's words: parsers take the last of an option given twice.

    Args:
        known: options that the script takes.

    Raises:
        SpecError: the options are in a file that replaces the command line.
    """
    if len(words) == 1 and words[0].endswith(".json"):
        refuse(words[0], "a script that reads its arguments from a file takes no others", do="give them as options")
    wanted, have = list_options(recipe, known), list_given_options(words)
    filled = {key: value for key, value in wanted.items() if key in known and key not in have}
    unknown = tuple(key for key in wanted if key not in known and key not in have)
    if known.isdisjoint(wanted):
        why = "its text shows no option that the recipe has"
        refuse(script, why, do=f"--parallel {recipe.name} takes the layout alone")
    spelled = list[list[str]]()
    for key, value in filled.items():
        if isinstance(value, list):
            written = [str(item) for item in value]
        elif isinstance(value, dict):
            written = [json.dumps(value)]
        else:
            written = [str(value).lower() if isinstance(value, bool) else str(value)]
        spelled.append([f"--{key}", *written])
    added = [word for option in spelled for word in option]
    yours = tuple(key for key in wanted if key in have)
    return Filled([*added, *words], tuple(map(" ".join, spelled)), yours, unknown)


def list_options(recipe: Recipe, known: set[str]) -> dict[str, object]:
    """Return all options of a recipe, the model's under the name that the script has for it."""
    model = next((name for name in _MODEL_OPTIONS if name in known), _MODEL_OPTIONS[0])
    data = {key: recipe.data[key] for key in _DATA_OPTIONS if key in recipe.data}
    if recipe.script is None:
        data = {}
    return {model: recipe.model, **data, **recipe.script_arguments, **recipe.arguments}


def list_given_options(words: list[str]) -> set[str]:
    """Return the options among words: `--a 1`, `--a=1`, `--no_a`, and the keys of TRL's `--config FILE`."""
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


# ---- what a script takes -----------------------------------------------------------------------------------------


def list_options_of(script: str, is_module: bool) -> set[str]:
    """Return the options that a script's text shows.

    Raises:
        SpecError: there is no such script or module, or it is no Python.
    """
    path = Path(script)
    if is_module:
        try:
            found = importlib.util.find_spec(script)
        except ImportError:
            found = None
        if found is None or found.origin is None:
            refuse(f"-m {script}", "no such module", do=f"pip install {script.partition('.')[0]}")
        path = Path(found.origin)
    if not path.is_file():
        refuse(script, "no such script")
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError as error:
        refuse(script, f"not Python ({error.msg}, line {error.lineno})", cause=error)
    shown = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            shown.update(*(_iterate_fields(node.module or "", alias.name) for alias in node.names))
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            shown.update(_iterate_fields(node.value.id, node.attr))
        elif isinstance(node, ast.ClassDef):
            places = [part.target for part in node.body if isinstance(part, ast.AnnAssign)]
            shown.update(place.id for place in places if isinstance(place, ast.Name))
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            words = [part.value for part in node.args if isinstance(part, ast.Constant)]
            options = [word for word in words if isinstance(word, str) and word.startswith("--")]
            shown.update(option[2:].replace("-", "_") for option in options)
    return shown


def _iterate_fields(module: str, name: str) -> Iterator[str]:
    """Yield the fields of a class of arguments of Transformers or TRL; nothing else is imported."""
    library = module.partition(".")[0]
    of_trl = library == "trl" and name.endswith(("Config", "Arguments"))
    if not (of_trl or (library == "transformers" and name.endswith("TrainingArguments"))):
        return
    kind = getattr(importlib.import_module(library), name, None)
    if kind is not None and dataclasses.is_dataclass(kind):
        yield from (field.name for field in dataclasses.fields(kind))

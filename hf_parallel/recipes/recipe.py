"""A recipe as a value: read from its YAML, every key looked at, nothing run that a file says.

recipe = load("qwen3-0.6b-full-1x24gb")     # or a file, or owner/repo[:file][@revision] of the Hub
recipe.layout.to_spec(), recipe.hardware.gpus, recipe.arguments["learning_rate"]
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_parallel.config import ParallelConfig
from hf_parallel.planner.hardware import Cluster, make_cluster
from hf_parallel.spec import (
    HUB_FILE,
    RECIPE_KEYS,
    convert,
    layout_of,
    like_a_recipe,
    locate,
    nearest_key,
    read_yaml,
    refuse,
    shipped,
)

if TYPE_CHECKING:
    from importlib.abc import Traversable

    from transformers import PretrainedConfig

#: What trains how; docs/recipes.md says it in words.
METHODS = ("full", "lora", "qlora", "dpo", "grpo", "pretrain", "long_context")
#: Scripts that a recipe may name, and the class of their Trainer's arguments; none: a script of the user's own.
CONFIG_CLASSES = {
    "trl.scripts.sft": "trl.SFTConfig",
    "trl.scripts.dpo": "trl.DPOConfig",
    "trl.scripts.grpo": "trl.GRPOConfig",
    None: "transformers.TrainingArguments",
}
_NEEDED = ("about", "model", "method", "hardware", "parallel", "arguments", "data")
_TEXTS = ("about", "model", "method", "shape", "script")
_DATA_KEYS = ("tokens_per_row", "dataset_name", "dataset_config", "note")
#: Of the arguments those that memory and speed depend on.
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
        """As the planner has it."""
        return make_cluster(self.gpu, self.gpus, self.gpus_per_node, self.network)

    @property
    def nodes(self) -> int:
        """How many machines."""
        return -(-self.gpus // self.gpus_per_node)

    def __str__(self) -> str:
        network = f", {self.cluster.between.name} between {self.nodes} nodes" if self.nodes > 1 else ""
        return f"{self.gpus} x {self.cluster.gpu.name}{network}"


@dataclass(frozen=True)
class Recipe:
    """One recipe; `layout` is resolved for its number of GPUs."""

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
        """Tokens of a row."""
        return self.data["tokens_per_row"]

    @property
    def rows(self) -> int:
        """Rows of one call of the model on a data rank: of a pair of DPO both answers."""
        return self.arguments["per_device_train_batch_size"] * (2 if self.method == "dpo" else 1)

    @property
    def accumulation(self) -> int:
        """Calls per step."""
        return self.arguments.get("gradient_accumulation_steps", 1)

    @property
    def tokens_per_step(self) -> int:
        """Of all data ranks."""
        return self.rows * self.accumulation * self.layout.data_parallel_size * self.seq

    @property
    def adapter_rank(self) -> int:
        """Of LoRA; 0: all weights are trained."""
        return int(self.script_arguments.get("lora_r", 16)) if self.script_arguments.get("use_peft") else 0

    @property
    def four_bit(self) -> bool:
        """Is the base packed to 4 bits?"""
        return bool(self.script_arguments.get("load_in_4bit"))

    def config(self) -> PretrainedConfig:
        """The model's config: of this package's `recipes/models`, else of the Hub or a folder."""
        if self.shape is not None:
            return shipped_config(self.shape)
        from transformers import AutoConfig

        return AutoConfig.from_pretrained(self.model, trust_remote_code=False)

    def command(self) -> str:
        """The line that runs it."""
        script = "" if self.script else " train.py"
        data = "" if self.data.get("dataset_name") or not self.script else " --dataset_name DATASET"
        return f"hf-parallel recipe run {self.name}{script}{data} --output_dir out"


def names() -> list[str]:
    """The recipes that come with this package."""
    return list(shipped())


def _meant(text: str) -> str:
    close = like_a_recipe(text)
    return f"did you mean {' or '.join(close)}? " if close else ""


def load(text: str) -> Recipe:
    """A recipe by the name of a shipped one, from a file, or of the Hub.

    Raises:
        SpecError: there is none, or what it says cannot hold.
    """
    path = locate(text)
    if path is None:
        refuse(
            text,
            "no recipe of that name",
            do=f"{_meant(text)}`hf-parallel recipe list` names them; a file and owner/repo work, too",
        )
    name = text if text in shipped() else os.path.splitext(os.path.basename(path))[0]
    return read_recipe(name if f"{name}.yaml" != HUB_FILE else text, path)


def read_recipe(name: str, path: str) -> Recipe:
    """The recipe of a YAML file.

    Raises:
        SpecError: a key that is not known or missing, or numbers that cannot hold.
    """
    values = read_yaml(path)
    _check_keys(name, values, RECIPE_KEYS, _NEEDED)
    hardware = _section(name, values, "hardware", [f.name for f in dataclasses.fields(Hardware)], ("gpu", "gpus"))
    data = _section(name, values, "data", _DATA_KEYS, ("tokens_per_row",))
    expect = _section(name, values, "expect", _EXPECT_KEYS)
    for source in expect:
        _to_be_numbers(f"{name}: expect: {source}", _section(f"{name}: expect", expect, source, _EXPECT_KEYS[source]))
    _to_be_texts(name, values)
    _to_numbers(f"{name}: hardware", hardware, ("gpus", "gpus_per_node"))
    _to_numbers(f"{name}: data", data, ("tokens_per_row",))
    machines = Hardware(**hardware)
    layout = ParallelConfig.from_mapping(layout_of(values, name)).resolve(machines.gpus)
    kept: dict = {key: values.get(key) for key in _TEXTS}
    words = {key: _mapping(name, values, key) for key in ("arguments", "script_arguments")}
    for key, options in words.items():
        _to_be_given(f"{name}: {key}", options)
    _to_numbers(f"{name}: arguments", words["arguments"], _COUNTS)
    kept |= {"hardware": machines, "layout": layout, "data": data, "expect": expect, **words}
    recipe = Recipe(name=name, path=path, **kept)
    _check(recipe)
    return recipe


def _section(where: str, values: dict, key: str, known: Collection[str], needed: Collection[str] = ()) -> dict:
    found = _mapping(where, values, key, next(iter(known)))
    _check_keys(f"{where}: {key}", found, known, needed)
    return found


def _mapping(where: str, values: dict, key: str, example: str = "name") -> dict:
    found = values.get(key) or {}
    if not isinstance(found, dict):
        refuse(f"{where}: {key}", f"is a {type(found).__name__}, not a mapping", f"{key}: {{{example}: …}}")
    return found


def _to_numbers(where: str, values: dict, keys: tuple[str, ...]) -> None:
    """YAML takes `4k` for a word."""
    for key in keys:
        if key in values:
            values[key] = convert(f"{where}: {key}", int, values[key])
            if values[key] < 1:
                refuse(f"{where}: {key}={values[key]}", "is one at least", f"{key}: 1")


def _to_be_numbers(where: str, values: Mapping[str, object]) -> None:
    """What is expected, but for the note."""
    for key, value in values.items():
        if key != "note" and (isinstance(value, bool) or not isinstance(value, (int, float)) or value != value):
            refuse(f"{where}: {key}={value}", "is no number", f"{key}: 1.5")


def _to_be_texts(where: str, values: Mapping[str, object]) -> None:
    """Names, which YAML takes for numbers where they have digits alone."""
    for key in _TEXTS:
        value = values.get(key)
        if value is not None and not isinstance(value, str):
            refuse(f"{where}: {key}={value}", f"is a {type(value).__name__}, not a text", f'{key}: "{value}"')


def _to_be_given(where: str, options: Mapping[object, object]) -> None:
    """An option without a value would be handed over as the word None."""
    for key, value in options.items():
        if value is None:
            refuse(f"{where}: {key}", "has no value", do="leave it out")
        if not isinstance(key, str):
            refuse(f"{where}: {key}", "is no name of an option", do="leave it out")


def _check_keys(where: str, values: Mapping, known: Collection[str], needed: Collection[str] = ()) -> None:
    for key in values:
        if key not in known:
            refuse(f"{where}: {key}", "unknown key", do=nearest_key(str(key), list(known)))
    for key in needed:
        if values.get(key) is None:
            refuse(where, f"{key} is missing", f"a line `{key}: …`")


def _check(recipe: Recipe) -> None:
    """What holds for every recipe, whatever its model."""
    where = recipe.name
    if recipe.method not in METHODS:
        refuse(f"{where}: method={recipe.method}", f"not one of {', '.join(METHODS)}")
    if recipe.script not in CONFIG_CLASSES:
        known = ", ".join(filter(None, CONFIG_CLASSES))
        refuse(f"{where}: script={recipe.script}", f"not one of {known}", do="leave it out for a script of your own")
    if recipe.shape is not None and not (_models() / f"{recipe.shape}.json").is_file():
        refuse(f"{where}: shape={recipe.shape}", "no such model", do=f"{', '.join(shapes())} are here")
    if "per_device_train_batch_size" not in recipe.arguments:
        refuse(where, "the batch is missing", "arguments: {per_device_train_batch_size: 1}")
    length = recipe.arguments.get("max_length")
    if length not in (None, recipe.seq):
        refuse(f"{where}: tokens_per_row={recipe.seq}", f"max_length is {length}", f"tokens_per_row: {length}")
    if recipe.arguments.get("gradient_checkpointing", recipe.script is not None):
        why = "the layout's activation_checkpointing says what is recomputed; TRL's own default is true"
        refuse(f"{where}: gradient_checkpointing", why, "gradient_checkpointing: false")
    recipe.hardware.cluster  # noqa: B018 - names that the catalogue does not have are refused


def shipped_config(shape: str) -> PretrainedConfig:
    """The config of one of the models in `recipes/models`."""
    from transformers import AutoConfig

    values = json.loads((_models() / f"{shape}.json").read_text(encoding="utf-8"))
    return AutoConfig.for_model(**{key: value for key, value in values.items() if key not in ("source", "model")})


def _models() -> Traversable:
    return importlib.resources.files("hf_parallel") / "recipes" / "models"


def shapes() -> list[str]:
    """The models whose sizes come with this package."""
    return sorted(file.name.removesuffix(".json") for file in _models().iterdir() if file.name.endswith(".json"))

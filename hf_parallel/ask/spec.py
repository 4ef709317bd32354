"""A spec as text: `key=value,…` or a YAML file, read into a mapping; values by the type of their key.

The YAML is a local file, a recipe that comes with this package (by name), or a file of a repository of the Hub:
`owner/repo[:file][@revision]`. Of a recipe the layout is what its key `parallel` says.
"""

from __future__ import annotations

import difflib
import functools
import importlib.resources
import os
import re
from collections.abc import Hashable, Mapping
from typing import TYPE_CHECKING, NoReturn

import yaml

from hf_parallel.ask import hub

if TYPE_CHECKING:
    from importlib.abc import Traversable

#: The keys of a recipe; `parallel` is its layout.
RECIPE_KEYS = (
    *("about", "model", "shape", "method", "hardware", "parallel", "script", "arguments", "script_arguments"),
    *("data", "expect"),
)
#: The file of a repository that is meant where none is named.
HUB_FILE = "recipe.yaml"
_HUB = re.compile(
    r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(:(?P<file>[\w.-]+(/[\w.-]+)*))?(@(?P<revision>[\w.-]+(/[\w.-]+)*))?"
)


class Told(Exception):
    """An error whose message is all that a person needs: one line, the same on all ranks."""


class SpecError(ValueError):
    """A specification that is not understood or cannot hold. Its message is one line, written for people."""

    alone = False  # this rank's own: no other one will say it


def refuse(
    what: object,
    why: object,
    works: object = None,
    *,
    do: str | None = None,
    cause: Exception | None = None,
    alone: bool = False,
) -> NoReturn:
    """Stop with the one form that every refusal has: `tp_size=3: does not divide 8 heads; tp_size=2 works`.

    Args:
        what: the key and the number that was asked for, or the thing that cannot be used.
        why: what it runs against.
        works: what can be written instead.
        do: what to do, where no value works.
        cause: the error of another library that says so.
        alone: other ranks have nothing to refuse.
    """
    advice = do if works is None else f"{works} works"
    error = SpecError(f"{what}: {why}" + (f"; {advice}" if advice else ""))
    error.alone = alone
    raise error from cause


def refuse_with(refusal: str) -> NoReturn:
    """Stop with a line that was made before: the first problem of a plan, or what another rank ran into."""
    raise SpecError(refusal)


def read_spec(text: str) -> Mapping[str, object]:
    """Read the keys and values of a spec, or of the YAML file or recipe that it names.

    Raises:
        SpecError: not `key=value,…`, a key given twice, or a file that is no mapping or cannot be had.
    """
    path = locate_spec_file(text)
    if path is None:
        return _split_pairs(text)
    values = read_yaml(path)
    return layout_of(values, path) if "parallel" in values else values


def layout_of(recipe: Mapping[str, object], where: str) -> Mapping[str, object]:
    """Return the layout of a recipe, as a mapping.

    Raises:
        SpecError: a key that recipes do not have.
    """
    for key in recipe:
        if key not in RECIPE_KEYS:
            refuse(f"{where}: {key}", "unknown key of a recipe", do=suggest_key(str(key), list(RECIPE_KEYS)))
    layout = recipe["parallel"]
    return layout if isinstance(layout, dict) else _split_pairs(str(layout))


def get_first_line(error: BaseException) -> str:
    """Return the first line of another library's error."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


# ---- files -------------------------------------------------------------------------------------------------------


def locate_spec_file(text: str) -> str | None:
    """Return the file that a text names: local, of this package, or of the Hub; None for `key=value`.

    Raises:
        SpecError: it names a file that is not there, or that the Hub does not give.
    """
    if os.path.isfile(text):
        return text
    if text in list_shipped_recipes():
        return str(list_shipped_recipes()[text])
    is_yaml = text.endswith((".yaml", ".yml"))
    named = None if is_yaml and ":" not in text else _HUB.fullmatch(text)
    if named is None:
        return text if is_yaml else None
    repo, file, revision = named["repo"], named["file"] or HUB_FILE, named["revision"]
    name = f"{repo}:{file}" + (f"@{revision}" if revision else "")
    works = "`hf-parallel recipe list` names those that are here"
    from huggingface_hub import constants, hf_hub_download

    # Under HF_HUB_OFFLINE huggingface_hub itself answers at once, from its cache.
    reason = None if constants.HF_HUB_OFFLINE else hub.why_missing(repo, (file,), revision=revision)
    if reason is not None:
        refuse(name, reason, do=works)
    try:
        return hf_hub_download(repo, file, revision=revision)
    except (OSError, ValueError) as error:  # huggingface_hub's own errors are among these
        refuse(name, f"not to be had from the Hub ({get_first_line(error)})", do=works)


@functools.cache
def list_shipped_recipes() -> dict[str, Traversable]:
    """Return the file of each recipe of this package by name: `configs/recipes` of a checkout is the same folder."""
    folder = importlib.resources.files("hf_parallel") / "recipes" / "shipped"
    files = {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}
    return dict(sorted(files.items()))


#: `from_pretrained` reads one of these first: of a model, of an adapter.
MODEL_FILES = ("config.json", "adapter_config.json")


def check_model_name(
    name: object,
    otherwise: str,
    *,
    files: tuple[str, ...] = MODEL_FILES,
    offline: str | None = None,
    needs_weights: bool = True,
    **where: object,
) -> None:
    """Refuse the name of a model that is not on this machine while no Hub answers.

    Args:
        name: what `from_pretrained` is given; anything but a name of the Hub passes.
        otherwise: what works instead.
        files: the model is on this machine if one of them is in the cache.
        offline: why the Hub is not to be asked.
        needs_weights: else a file with the sizes of the model does as well.
        where: other arguments of `from_pretrained`, of which `cache_dir` and `revision` are read.

    Raises:
        SpecError: nothing could be loaded. It names models that may have been meant.
    """
    if not hub.is_name(name):
        return
    assert isinstance(name, str)
    reason = hub.why_missing(name, files, offline=offline, **where)
    if reason is None:
        return
    sizes = None if needs_weights else hub.list_models_with_sizes().get(name)
    refuse(name, reason, sizes, do=hub.suggest_model(name) or otherwise)


class _StrictLoader(yaml.SafeLoader):
    """A loader that refuses equal keys, of which YAML lets the last one win, and reads no numbers with colons."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        keys = [self.construct_object(key, deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                refuse(key, "given twice", do="give it once")
        for _, value in node.value:  # YAML 1.1 reads `3:2` as a number in base 60
            if isinstance(value, yaml.ScalarNode) and ":" in value.value:
                value.tag = yaml.resolver.BaseResolver.DEFAULT_SCALAR_TAG
        return super().construct_mapping(node, deep)


def read_yaml(path: str) -> dict:
    """Read a file's mapping; safe YAML only, no key twice.

    Raises:
        SpecError: no such file, or it is none.
    """
    if not os.path.isfile(path):
        refuse(path, "no such spec file", do=suggest_file(path) or "a spec is key=value,… or the path of a YAML file")
    try:
        with open(path, encoding="utf-8-sig") as file:  # editors of Windows begin a file with a mark
            values = yaml.load(file, Loader=_StrictLoader)
    except OSError as error:
        refuse(path, f"cannot be read ({error.strerror})", cause=error)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        said = (f"line {mark.line + 1}: " if mark else "") + (problem or str(error).splitlines()[0])
        refuse(path, f"not a YAML file ({said})", cause=error)
    if not isinstance(values, dict):
        held = "nothing" if values is None else f"a {type(values).__name__}, not a mapping"
        refuse(path, f"holds {held}", "a line such as `tp_size: 2`")
    return values


def _split_pairs(text: str) -> dict[str, str]:
    """Split `a=1,b=[2,3]` into {"a": "1", "b": "[2,3]"}; commas inside brackets do not separate."""
    pairs: dict[str, str] = {}
    parts, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    for part in filter(None, (p.strip() for p in parts)):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and (close := suggest_recipes(part)):
            refuse(part, "neither key=value nor a recipe", do=f"did you mean {' or '.join(close)}?")
        if not key or not equals or not value:
            refuse(part, "expected key=value, for example tp=2")
        if key in pairs:
            refuse(key, f"given twice ({pairs[key]} and {value})", do="give it once")
        pairs[key] = value
    return pairs


def suggest_recipes(text: str) -> list[str]:
    """Return the names of recipes that may have been meant."""
    return difflib.get_close_matches(text, list(list_shipped_recipes()), n=3, cutoff=0.75)


def suggest_file(path: str) -> str | None:
    """Ask for a file beside this one whose name is close to it; None: there is none."""
    folder, name = os.path.split(path)
    beside = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
    close = difflib.get_close_matches(name, beside, n=2, cutoff=0.75)
    return f"did you mean {' or '.join(os.path.join(folder, one) for one in close)}?" if close else None


#: The complaint about a value that cannot be read.
_WANTED = {"bool": "neither true nor false", "int": "not a whole number", "float": "not a number"}


def convert(name: str, annotation: object, value: object, works: str) -> object:
    """Convert a value to the type of its key's field.

    Args:
        works: the key's default as it stands in a spec. It is what an error suggests, because it holds on any layout.

    Raises:
        SpecError: it is none.
    """
    spelled = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    kind, optional = spelled.replace(" | None", ""), "None" in spelled
    if optional and (value is None or str(value).lower() in ("none", "null")):
        return None
    text = "" if value is None else str(value).strip()
    if kind == "str" and value is False:  # YAML reads the word `off` so
        text = "off"
    try:
        if kind == "bool":
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
        if kind.startswith("tuple"):
            if kind.endswith("| str") and (text == "auto" or ":" in text):
                return text
            items = value if isinstance(value, (list, tuple)) else text.strip("[]").split(",")
            return tuple(int(item) for item in items)
    except (KeyError, ValueError) as error:
        wanted = _WANTED.get(kind, "not a list of whole numbers, as [2,2] is")
        why = "a comma separates keys" if "=" in text else wanted
        mended = re.sub(r"[;\s]+", ",", text) if "=" in text else works
        refuse(f"{name}={text}", why, f"{name}={works if mended == text else mended}", cause=error)
    return text


def spell(value: object) -> str:
    """Return a value as it stands in a spec."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


#: Key -> what other programs call it.
_ELSEWHERE = {
    "dp_replicate": "ddp data_parallel data_parallel_size",
    "dp_shard": "dp dp_size fsdp fsdp_size hsdp",
    "zero_stage": "zero stage",
    "tp": "mp tensor_parallel tensor_parallel_size tensor_model_parallel_size",
    "pp": "pipeline pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size",
    "cp": "context_parallel_size sequence_parallel_size sp_size ulysses ring",
    "ep": "expert_parallel expert_parallel_size expert_model_parallel_size",
    "sequence_parallel": "sp",
    "pipeline_schedule": "schedule",
    "pipeline_microbatches": "micro_batches microbatches num_microbatches",
    "activation_checkpointing": "gradient_checkpointing recompute",
    "attention": "attn attn_implementation",
    "compile": "torch_compile",
}


def suggest_key(key: str, known: list[str], short: tuple[str, ...] = ()) -> str:
    """Suggest the key that may have been meant by an unknown one."""
    lower = key.lower().lstrip("-").replace("-", "_")
    names = [*known, *short]
    elsewhere = [name for name, others in _ELSEWHERE.items() if lower in others.split() and name in names]
    begins = [name for name in (*short, *known) if lower and (name.startswith(lower) or name.endswith(f"_{lower}"))]
    close = elsewhere or difflib.get_close_matches(lower, names, n=1) or begins
    return f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"

"""A spec as text: `key=value,…` or a YAML file, read into a mapping; values by the type of their key."""

from __future__ import annotations

import difflib
import os
from typing import Any, NoReturn

import yaml


class SpecError(ValueError):
    """A specification that is not understood or cannot hold. Its message is one line, written for people."""


def refuse(
    what: object, why: object, works: object = None, *, do: str | None = None, cause: Exception | None = None
) -> NoReturn:
    """Stop with the one form that every refusal has: `tp_size=3: does not divide 8 heads; tp_size=2 works`.

    Args:
        what: the key and the number that was asked for, or the thing that cannot be used.
        why: what it runs against.
        works: what can be written instead.
        do: what to do, where no value works.
        cause: the error of another library that says so.
    """
    advice = do if works is None else f"{works} works"
    raise SpecError(f"{what}: {why}" + (f"; {advice}" if advice else "")) from cause


def read(text: str) -> dict[str, Any]:
    """The keys and values of a spec, or of the YAML file that it names.

    Raises:
        SpecError: not `key=value,…`, a key given twice, or a file that is no mapping.
    """
    return _read_yaml(text) if text.endswith((".yaml", ".yml")) or os.path.isfile(text) else _split_pairs(text)


class _StrictLoader(yaml.SafeLoader):
    """YAML itself lets the last of two equal keys win in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                refuse(key, "given twice", do="give it once")
        return super().construct_mapping(node, deep)


def _read_yaml(path: str) -> dict[str, Any]:
    if not os.path.isfile(path):
        refuse(path, "no such spec file", do="a spec is key=value,… or the path of a YAML file")
    with open(path, encoding="utf-8") as file:
        try:
            values = yaml.load(file, Loader=_StrictLoader)
        except yaml.YAMLError as error:
            refuse(path, f"not a YAML file ({str(error).splitlines()[0]})", cause=error)
    if not isinstance(values, dict):
        refuse(path, f"holds a {type(values).__name__}, not a mapping", "a line such as `tp_size: 2`")
    return values


def _split_pairs(text: str) -> dict[str, str]:
    """`a=1,b=[2,3]` -> {"a": "1", "b": "[2,3]"}; commas inside brackets do not separate."""
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
        if not key or not equals or not value:
            refuse(part, "expected key=value, for example tp=2")
        if key in pairs:
            refuse(key, f"given twice ({pairs[key]} and {value})", do="give it once")
        pairs[key] = value
    return pairs


def convert(name: str, annotation: Any, value: Any) -> Any:
    """The value of a key whose field has this type.

    Raises:
        SpecError: it is none.
    """
    spelled = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    kind, optional = spelled.replace(" | None", ""), "None" in spelled
    if optional and (value is None or str(value).lower() in ("none", "null")):
        return None
    text = "" if value is None else str(value).strip()
    try:
        if kind == "bool":
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
        if kind.startswith("tuple"):
            items = value if isinstance(value, (list, tuple)) else text.strip("[]").split(",")
            return tuple(int(item) for item in items)
    except (KeyError, ValueError) as error:
        example = {"bool": "true", "int": "2", "float": "1.5"}.get(kind, "[2,2]")
        refuse(f"{name}={text}", "not a value of this key", f"{name}={example}", cause=error)
    return text


def spell(value: Any) -> str:
    """As it stands in a spec."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def unknown_key(key: str, known: list[str]) -> str:
    """What to tell of a key that is not known."""
    names = known + [n.removesuffix("_size") for n in known if n.endswith("_size")]
    close = difflib.get_close_matches(key, names, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"
    return f"{key}: unknown key; {hint}"

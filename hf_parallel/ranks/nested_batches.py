"""Batches of batches: one of examples to forget beside one of examples to keep, or a tuple of tensors.

Their tensors are looked at by path, as those of a batch that is one dictionary. The script gets them as it has them:

    {"forget": {"input_ids": a, "labels": b}, "retain": {…}}  <->  {"/forget/input_ids": a, "/forget/labels": b, …}
    ([a, b], [c, d])                                          <->  {"/0/0": a, "/0/1": b, "/1/0": c, "/1/1": d}
    ({"input_ids": a}, [0, 2, 5])                             <->  {"/0/input_ids": a, "/1/0": 0, "/1/1": 2, …}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

#: Before each name of a path.
BETWEEN = "/"


def is_nested(batch: object) -> bool:
    """Return whether the batch has batches in it, or is a sequence of tensors rather than a dictionary.

    A list in a dictionary is no batch: it holds one thing per example, such as a text. Beside a dictionary in a
    sequence may be anything, such as where the rows of each example begin.
    """
    if isinstance(batch, Mapping):
        return any(isinstance(value, Mapping) for value in batch.values())
    if not isinstance(batch, (list, tuple)) or not batch:
        return False
    return any(isinstance(value, Mapping) for value in batch) or all(_is_part(value) for value in batch)


def _is_part(value: object) -> bool:
    return torch.is_tensor(value) or is_nested(value)


def _map_values(batch: Any, change: Callable[[str, Any], Any], path: str = "") -> Any:
    """Return a batch of the same form with `change(path, value)` for each of its values."""
    if isinstance(batch, Mapping):
        named = [(key, isinstance(value, Mapping), value) for key, value in batch.items()]
    else:
        named = [(i, isinstance(value, (Mapping, list, tuple)), value) for i, value in enumerate(batch)]
    changed = {}
    for name, has_values, value in named:
        place = f"{path}{BETWEEN}{name}"
        changed[name] = _map_values(value, change, place) if has_values else change(place, value)
    if isinstance(batch, Mapping):
        return changed
    return tuple(changed.values()) if isinstance(batch, tuple) else list(changed.values())


def is_path(key: object) -> bool:
    """Return whether this is the path of a value in a batch of batches, rather than a name in a plain batch."""
    return str(key).startswith(BETWEEN)


def open_batches(batch: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return a batch as one dictionary, and a function that gives such a dictionary the form that the script has."""
    if not is_nested(batch):
        return batch, lambda part: part
    flat: dict[str, Any] = {}
    form = _map_values(batch, flat.__setitem__)
    return flat, lambda part: _map_values(form, lambda path, _: part[path])

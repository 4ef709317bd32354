"""Prove a recipe here: its keys, its model, does it fit by the planner and by a dry run, is `expect` so.

Nothing is downloaded for a recipe that names the `shape` of its model, and no GPU is needed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import yaml

from hf_parallel.config import SpecError
from hf_parallel.recipes.expect import dry_memory, expected, plan
from hf_parallel.recipes.recipe import Recipe, load

#: How far a written number may be from a new one: three digits were kept, and the planner's formulas move a little.
TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What became of a recipe: what was found, in a line, and what is wrong with it."""

    name: str
    found: str = ""
    wrong: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "\n".join([f"{self.name}: {self.found or 'not read'}", *(f"  wrong: {line}" for line in self.wrong)])


def check(name: str, dry: bool = True) -> Verdict:
    """A recipe's verdict.

    Args:
        dry: run its first and last pipeline rank on tensors without memory, too, for a few seconds.
    """
    try:
        return _verdict(load(name), dry)
    except SpecError as error:
        return Verdict(name, wrong=(str(error),))


def _verdict(recipe: Recipe, dry: bool) -> Verdict:
    planned = plan(recipe)
    room, written = f"{planned.room_gib:.1f} GiB of a GPU", recipe.expect
    found = [f"planner {planned.memory_gib:.1f} of {room}, {planned.tokens_per_s:,.0f} tokens/s"]
    wrong = _off("planner", written, planned.to_dict())
    if not planned.fits:
        wrong.append(f"needs {planned.memory_gib:.1f} GiB by the planner, of {room}")
    memory = dry_memory(recipe) if dry else (written.get("dry_run") or {}).get("memory_gib", 0.0)
    if dry:
        found.append(f"dry run {memory:.1f} GiB of tensors")
        wrong += _off("dry_run", written, {"memory_gib": memory})
    if memory > planned.room_gib:
        wrong.append(f"needs {memory:.1f} GiB in a dry run, of {room}")
    return Verdict(recipe.name, ", ".join(found), tuple(wrong))


def _off(source: str, written: dict[str, dict], new: Mapping[str, object]) -> list[str]:
    """Numbers of `expect` that are no longer so."""
    old, again = written.get(source) or {}, "`hf-parallel recipe check --write` makes it anew"
    if not old:
        return [f"expect has no {source}; {again}"]
    return [
        f"expect: {source}: {key} is {old.get(key)}, now {value:.3g}; {again}"
        for key, value in new.items()
        if isinstance(value, (int, float)) and abs(value - old.get(key, 0)) > TOLERANCE * abs(value)
    ]


def write(name: str) -> Recipe:
    """Write the section `expect` of a recipe's file anew; the rest stays as it is.

    Raises:
        SpecError: it cannot be read, or its layout cannot hold.
    """
    recipe = load(name)
    path = Path(recipe.path)
    kept = path.read_text(encoding="utf-8").partition("\nexpect:")[0].rstrip("\n")
    lines = ["expect:  # by `hf-parallel recipe check --write`; nothing here was measured unless it says so"]
    for source, values in expected(recipe).items():
        text = yaml.safe_dump(values, sort_keys=False, default_flow_style=True, width=1000).strip()
        lines.append(f"  {source}: {text}")
    path.write_text("\n".join([kept, *lines]) + "\n", encoding="utf-8")
    return load(name)

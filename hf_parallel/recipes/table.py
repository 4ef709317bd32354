"""Recipes in rows: for a terminal, for docs/recipes.md, for the card of a repository."""

from __future__ import annotations

from hf_parallel.recipes.recipe import Recipe

_HEADINGS = ("recipe", "model", "method", "machines", "layout", "tokens per step", "GiB per GPU", "tokens/s")


def cells(recipe: Recipe) -> tuple[str, ...]:
    """One recipe's row: memory by the planner and the dry run, speed by the planner, or both as measured."""
    planner, dry = recipe.expect.get("planner", {}), recipe.expect.get("dry_run", {})
    measured = recipe.expect.get("measured", {})
    memory = f"{planner.get('memory_gib', '?')}, {dry.get('memory_gib', '?')}"
    speed = f"{planner.get('tokens_per_s', 0):,.0f}"
    return (
        recipe.name,
        recipe.model,
        recipe.method,
        str(recipe.hardware),
        recipe.layout.to_spec(),
        f"{recipe.tokens_per_step:,}",
        f"{measured['memory_gib']} measured" if "memory_gib" in measured else memory,
        f"{measured['tokens_per_s']:,} measured" if "tokens_per_s" in measured else speed,
    )


def markdown(recipes: list[Recipe]) -> str:
    """The table of docs/recipes.md."""
    lines = [_HEADINGS, ("---",) * len(_HEADINGS), *(_marked(cells(recipe)) for recipe in recipes)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _marked(row: tuple[str, ...]) -> tuple[str, ...]:
    name, model, method, machines, layout, *rest = row
    return (f"`{name}`", model, method, machines, f"`{layout}`", *rest)


def plain(recipes: list[Recipe]) -> str:
    """Name and one line for each, for a terminal."""
    width = max((len(recipe.name) for recipe in recipes), default=0)
    return "\n".join(f"{recipe.name:{width}}  {recipe.about}" for recipe in recipes)

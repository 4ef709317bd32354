"""Recipes: one YAML with model, method, machines, layout, the Trainer's arguments, and what to expect of them."""

from hf_parallel.recipes.recipe import Recipe, load, names

__all__ = ["Recipe", "load", "names"]

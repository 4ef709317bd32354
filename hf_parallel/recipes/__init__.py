"""Recipes: one YAML with a model, a method, machines, a layout, the Trainer's arguments, and what to expect of them."""

from hf_parallel.recipes.recipe import Recipe, load, names

__all__ = ["Recipe", "load", "names"]

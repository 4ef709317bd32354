"""The data-parallel axes: who stores which slice, and how gradients are summed and measured."""

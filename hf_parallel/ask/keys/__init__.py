"""Spec keys, by axis: name, default, choices, a line of documentation, and the checks that need no model."""

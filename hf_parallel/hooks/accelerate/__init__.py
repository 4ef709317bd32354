"""Accelerator: loops of the script's own, data, states."""

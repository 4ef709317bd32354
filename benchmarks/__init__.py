"""Measurements: each module is a command, `python benchmarks/NAME.py`; `python -m benchmarks.gpu` is for GPUs."""

"""The axes of parallelism: one axis, one module."""

"""Watching of a training: its time and memory, where ranks wait, and where a number went bad."""

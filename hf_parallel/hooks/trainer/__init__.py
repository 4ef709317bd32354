"""Trainer: steps, losses, evaluation, checkpoints."""

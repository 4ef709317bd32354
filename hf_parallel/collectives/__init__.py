"""Differentiable collectives: each names what it does forward and backward."""

from hf_parallel.collectives.differentiable import copy_to_group, gather_last_dim, reduce_from_group

__all__ = ["copy_to_group", "gather_last_dim", "reduce_from_group"]

"""Reading and writing: weights in the Hub's format, each rank only its slices."""

from hf_parallel.checkpoint.load import load_weights
from hf_parallel.checkpoint.names import names_in_order
from hf_parallel.checkpoint.resume import has_optimizer, load_optimizer, save_optimizer
from hf_parallel.checkpoint.save import full_state_dict, save_pretrained

__all__ = [
    "full_state_dict",
    "has_optimizer",
    "load_optimizer",
    "load_weights",
    "names_in_order",
    "save_optimizer",
    "save_pretrained",
]

"""Reading and writing: weights in the Hub's format, each rank only its slices."""

from hf_parallel.checkpoint.load import load_weights
from hf_parallel.checkpoint.save import full_state_dict, save_pretrained

__all__ = ["full_state_dict", "load_weights", "save_pretrained"]

"""Reading and writing: weights in the Hub's format, each rank only its slices."""

from hf_parallel.checkpoint.folder import LAYOUT, Checkpoint, Lock, by_step, candidates, flaws, put_back_former, remove
from hf_parallel.checkpoint.hub_format import names_in_order
from hf_parallel.checkpoint.manifest import damages, has_manifest
from hf_parallel.checkpoint.resume import has_optimizer, load_optimizer, save_optimizer, write_refusal
from hf_parallel.checkpoint.saving import CheckpointError, DamagedCheckpoint, Saving, current, going_on, start_writer
from hf_parallel.checkpoint.weights import (
    full_state_dict,
    load_weights,
    parameter_groups,
    parameters,
    save_pretrained,
    streamed,
)

__all__ = [
    "LAYOUT",
    "Checkpoint",
    "CheckpointError",
    "DamagedCheckpoint",
    "Lock",
    "Saving",
    "by_step",
    "candidates",
    "current",
    "damages",
    "flaws",
    "full_state_dict",
    "going_on",
    "has_manifest",
    "has_optimizer",
    "load_optimizer",
    "load_weights",
    "names_in_order",
    "parameter_groups",
    "parameters",
    "put_back_former",
    "remove",
    "save_optimizer",
    "save_pretrained",
    "start_writer",
    "streamed",
    "write_refusal",
]

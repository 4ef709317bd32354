"""Reading and writing: weights in the Hub's format, each rank only its slices."""

from hf_parallel.checkpoint.folder import (
    LAYOUT,
    Checkpoint,
    Lock,
    find_flaws,
    list_by_step,
    list_whole_checkpoints,
    put_back_former,
    remove,
)
from hf_parallel.checkpoint.hub_format import list_names_in_order
from hf_parallel.checkpoint.manifest import find_damages, has_manifest
from hf_parallel.checkpoint.resume import (
    gather_plain_state,
    has_optimizer,
    list_names_of_groups,
    load_optimizer_state,
    refuse_unsavable_states,
    save_optimizer_state,
    set_plain_state,
    write_refusal,
)
from hf_parallel.checkpoint.saving import (
    CheckpointError,
    DamagedCheckpoint,
    Saving,
    join_current_save,
    make_save_current,
    start_writer,
)
from hf_parallel.checkpoint.weights import (
    gather_state_dict,
    list_local_parameters,
    load_weights,
    make_parameter_groups,
    save_pretrained_model,
    stream_tensors,
)

__all__ = [
    "LAYOUT",
    "Checkpoint",
    "CheckpointError",
    "DamagedCheckpoint",
    "Lock",
    "Saving",
    "list_by_step",
    "list_whole_checkpoints",
    "join_current_save",
    "find_damages",
    "find_flaws",
    "gather_state_dict",
    "gather_plain_state",
    "make_save_current",
    "has_manifest",
    "has_optimizer",
    "load_optimizer_state",
    "load_weights",
    "list_names_in_order",
    "list_names_of_groups",
    "make_parameter_groups",
    "list_local_parameters",
    "put_back_former",
    "refuse_unsavable_states",
    "remove",
    "save_optimizer_state",
    "save_pretrained_model",
    "set_plain_state",
    "start_writer",
    "stream_tensors",
    "write_refusal",
]

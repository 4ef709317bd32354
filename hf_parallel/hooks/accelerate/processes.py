"""Which process is this? Everything that shards, seeds or cuts by it means the data rank; what is done once does not.

    tp=2,dp_shard=2      rank 0   rank 1   rank 2   rank 3
    num_processes          2        2        2        2
    process_index          0        0        1        1
    is_main_process       yes       no       no       no
    is_last_process        no       no       no      yes

The states of accelerate are where all others ask, its `Accelerator` and transformers' `TrainingArguments` among them.
They go on keeping the numbers of torch: a property of the class answers in their place.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch.distributed as dist

from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch, replace

if TYPE_CHECKING:
    from accelerate import PartialState
    from transformers import Trainer, TrainingArguments


@replace("accelerate.state:{PartialState,AcceleratorState}.num_processes", "counts all processes", adds=True)
def num_processes(original: object) -> property:
    """The number of data ranks."""
    return _instead_of("num_processes", lambda: runtime.mesh().data_size)


@replace("accelerate.state:{PartialState,AcceleratorState}.process_index", "counts all processes", adds=True)
def process_index(original: object) -> property:
    """The data rank."""
    return _instead_of("process_index", lambda: runtime.mesh().data_rank)


def _instead_of(name: str, answer: Callable[[], int]) -> property:
    def keep(state: PartialState, value: int) -> None:
        vars(state)[name] = value

    return property(lambda state: answer(), keep)


@replace("accelerate.state:PartialState.is_main_process", "is one of all, not one of each data rank 0")
def is_main(original: object) -> property:
    """Rank 0 of all."""
    return property(lambda state: dist.get_rank() == 0)


@replace(
    "accelerate.{state:PartialState,accelerator:Accelerator}.is_last_process",
    "is one of all, not one of each last data rank",
)
def is_last(original: object) -> property:
    """The last rank of all."""
    return property(lambda state: dist.get_rank() == dist.get_world_size() - 1)


@replace("accelerate.state:PartialState.use_distributed", "one data rank may be several processes")
def several(original: object) -> property:
    """There are other processes, also where they are of one data rank."""
    return property(lambda state: True)


@patch("accelerate.state:PartialState.on_process", "runs on all ranks of that index")
def on_process(
    original: Callable, self: PartialState, function: Callable | None = None, process_index: int | None = None
) -> object:
    """Once for each index: on the first of the ranks that have it."""
    if function is None:
        return functools.partial(self.on_process, process_index=process_index)
    first = not any(runtime.mesh().index(axis) for axis in ("pp", "cp", "tp"))
    return function if first and self.process_index == process_index else lambda *args, **kwargs: None


@replace("transformers.training_args:TrainingArguments.{should_save,should_log}", "goes by data rank")
def one_of_all(original: property) -> property:
    """Rank 0 of all, or of each node where `save_on_each_node` or `log_on_each_node` is on."""
    assert original.fget is not None
    setting = original.fget.__name__.removeprefix("should_") + "_on_each_node"
    return property(lambda args: args.local_process_index == 0 if getattr(args, setting) else dist.get_rank() == 0)


@patch("transformers.trainer:Trainer.is_world_process_zero", "goes by data rank")
def is_world_process_zero(original: Callable, self: Trainer) -> bool:
    """Rank 0 of all."""
    return dist.get_rank() == 0


@patch("transformers.training_args:TrainingArguments.main_process_first", "one data rank may be several")
@contextlib.contextmanager
def main_process_first(
    original: Callable, self: TrainingArguments, local: bool = True, desc: str = "work"
) -> Iterator[None]:
    """The others wait, also where all are of one data rank."""
    state = self.distributed_state
    first = state.is_local_main_process if local else state.is_main_process
    if not first:
        dist.barrier()
    try:
        yield
    finally:
        if first:
            dist.barrier()


@replace("accelerate.accelerator:PROFILE_PATTERN_NAME", "one file for several ranks")
def name_by_rank(original: str) -> str:
    """A file for each rank: `{suffix}` is filled in by the index."""
    return original.replace("{suffix}", str(dist.get_rank() if dist.is_initialized() else 0))

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
from typing import Any

import torch.distributed as dist

from hf_parallel.config import SpecError
from hf_parallel.hooks import runtime


def num_processes(original: Any) -> Any:
    """The number of data ranks."""
    return _instead_of("num_processes", lambda: runtime.mesh().data_size)


def process_index(original: Any) -> Any:
    """The data rank."""
    return _instead_of("process_index", lambda: runtime.mesh().data_rank)


def _instead_of(name: str, answer: Callable[[], int]) -> property:
    def keep(state: Any, value: int) -> None:
        vars(state)[name] = value

    return property(lambda state: answer(), keep)


def is_main(original: Any) -> Any:
    """Rank 0 of all."""
    return property(lambda state: dist.get_rank() == 0)


def is_last(original: Any) -> Any:
    """The last rank of all."""
    return property(lambda state: dist.get_rank() == dist.get_world_size() - 1)


def several(original: Any) -> Any:
    """There are other processes, also where they are of one data rank."""
    return property(lambda state: True)


def on_process(original: Callable) -> Callable:
    """Once for each index: on the first of the ranks that have it."""

    def replacement(self: Any, function: Callable | None = None, process_index: int | None = None) -> Any:
        if function is None:
            return functools.partial(self.on_process, process_index=process_index)
        first = not any(runtime.mesh().index(axis) for axis in ("pp", "cp", "tp"))
        return function if first and self.process_index == process_index else lambda *args, **kwargs: None

    return replacement


def one_of_all(each_node: str) -> Callable:
    """`should_save` or `should_log`: rank 0 of all, or of each node where this setting is on."""
    return lambda original: property(
        lambda args: args.local_process_index == 0 if getattr(args, each_node) else dist.get_rank() == 0
    )


def is_world_process_zero(original: Callable) -> Callable:
    """Rank 0 of all."""
    return lambda self: dist.get_rank() == 0


def main_process_first(original: Callable) -> Callable:
    """The others wait, also where all are of one data rank."""

    @contextlib.contextmanager
    def replacement(self: Any, local: bool = True, desc: str = "work") -> Iterator[None]:
        state = self.distributed_state
        first = state.is_local_main_process if local else state.is_main_process
        if not first:
            dist.barrier()
        try:
            yield
        finally:
            if first:
                dist.barrier()

    return replacement


def name_by_rank(original: str) -> str:
    """A file for each rank: `{suffix}` is filled in by the index."""
    return original.replace("{suffix}", str(dist.get_rank() if dist.is_initialized() else 0))


def search(original: Callable) -> Callable:
    """Refuse trials that process 0 draws for all, where several ranks are process 0."""

    def replacement(self: Any, *args: Any, **kwargs: Any) -> Any:
        mesh = runtime.mesh()
        if mesh.config.world_size > mesh.data_size:
            raise SpecError("hyperparameter_search: ranks of one model would draw other trials; a launch each works")
        return original(self, *args, **kwargs)

    return replacement

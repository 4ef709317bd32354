"""The order in which a loader reads its rows: with several data ranks that of one process.

For several processes accelerate gives a shuffling sampler without a generator a seed of its own; in one process the
sampler draws from the process's random numbers. Here it goes on doing so, from the stream that all ranks share.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from hf_parallel.arguments import by_name

if TYPE_CHECKING:
    from accelerate.data_loader import DataLoaderShard
    from torch.utils.data import DataLoader

#: On samplers that group rows of like length: for batches of all data ranks already.
_GROUPED = "_hf_parallel_grouped"


def as_in_one_process(prepare: Callable, dataloader: DataLoader, *args: object, **kwargs: object) -> DataLoaderShard:
    """`prepare` the loader and leave the drawing of its order to its sampler."""
    sampler = _innermost(dataloader)
    if is_seeded(by_name(prepare, (dataloader, *args), kwargs)) or getattr(sampler, "generator", 0) is not None:
        return prepare(dataloader, *args, **kwargs)
    sampler.generator = torch.Generator()  # so that no number is drawn for one
    try:
        prepared = prepare(dataloader, *args, **kwargs)
    finally:
        sampler.generator = None
    if getattr(prepared, "synchronized_generator", None) is not None:
        prepared.synchronized_generator = None
        prepared.rng_types = [kind for kind in prepared.rng_types or () if kind != "generator"]
    return prepared


def is_seeded(given: dict[str, object]) -> bool:
    """Does accelerate order rows by a seed and the epoch, as for Trainer? Then loaders draw nothing for it."""
    return bool(given.get("use_seedable_sampler", False))


def group_for_all(dataloader: DataLoader, data_ranks: int) -> None:
    """Rows of like length for each batch of all data ranks together, not of one."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    sampler = _innermost(dataloader)
    if isinstance(sampler, LengthGroupedSampler) and not hasattr(sampler, _GROUPED):
        sampler.batch_size *= data_ranks
        setattr(sampler, _GROUPED, True)


def _innermost(dataloader: DataLoader) -> Any:
    """The sampler that says which rows come next, below those that make and share out batches."""
    part: object = dataloader
    while True:
        inner = [getattr(part, name, None) for name in ("batch_sampler", "sampler")]
        inner = [sampler for sampler in inner if sampler is not None]  # not all of them have a length to be true by
        if not inner:
            return part
        part = inner[0]

"""Shares of the batch of all data ranks: which examples a rank reads, and how much they weigh.

The global batch, filled with repeated examples where the data set ends, is the same whatever the shares are. Each data
rank reads consecutive examples of it:

    per_device_train_batch_size=8, even            rank 0: 0-7     rank 1: 8-15    rank 2: 16-23   rank 3: 24-31
    the same with batch_shares=3:3:2:1             rank 0: 0-10    rank 1: 11-21   rank 2: 22-28   rank 3: 29-31
    a last batch of 20 examples and 12 repeats     rank 0: 0-10    rank 1: 11-19   rank 2: none    rank 3: none

A mean over the examples of a rank weighs `n D / N` in the average over D data ranks, where the rank has n of N.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from hf_parallel.ask.keys.data import MEASURED
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.pipeline.schedules import can_run_micro_batches
from hf_parallel.axes.pipeline.script_loss import can_cut_alike
from hf_parallel.hooks import runtime
from hf_parallel.hooks.accelerate.token_batches import TokenBatches
from hf_parallel.hooks.patching import patch
from hf_parallel.ranks.shares import Shares, SharesOfPass, compute_enough_examples, cut_examples

if TYPE_CHECKING:
    from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
    from accelerate.state import GradientState
    from torch.utils.data import DataLoader


# ---- Which examples a data rank reads -------------------------------------------------------------------------------


@patch("accelerate.data_loader:BatchSamplerShard.__iter__", "gives each data rank as many examples")
def read_batches(original: Callable, self: BatchSamplerShard) -> Iterator[list]:
    """Yield this data rank's part of each batch of all data ranks."""
    measured, shares = _get_measured_shares(), _find_shares_of(self)
    if shares is None:
        return original(self)
    if measured is not None and measured.sampler is self:
        return _read_parts(self, measured.of_pass.draw_all())
    return _read_parts(self, itertools.repeat(shares))


def _get_measured_shares() -> runtime.MeasuredShares | None:
    current = runtime.current()
    return None if current is None else current.measured


def _find_shares_of(sampler: object) -> Shares | None:
    """Return the shares of what the loader of this sampler hands out; None: they are even, or it deals by tokens."""
    if isinstance(getattr(sampler, "batch_sampler", None), TokenBatches):  # for one data rank after another
        return None
    measured = _get_measured_shares()
    if measured is None:
        return runtime.mesh().config.shares
    return measured.of_pass.in_hand if measured.sampler is sampler else measured.first


def _cut_by_shares(examples: int, shares: Shares) -> tuple[int, ...]:
    """Return the number of examples of each data rank; shares that were measured leave none without."""
    return cut_examples(examples, shares, 0 if _get_measured_shares() is None else 1)


def _read_parts(sampler: BatchSamplerShard, shares: Iterator[Shares]) -> Iterator[list]:
    """Yield this data rank's part of each batch, by the shares of each."""
    size, rank = count_examples_of(sampler), sampler.process_index
    first: list = []
    filled = False
    each, batches = 1 if sampler.split_batches else sampler.num_processes, iter(sampler.batch_sampler)
    while together := list(itertools.islice(batches, each)):
        examples = [example for batch in together for example in batch]  # of all data ranks; the last may have fewer
        if filled:
            what = f"batch_shares={runtime.mesh().config.batch_shares}"
            refuse(what, f"{type(sampler.batch_sampler).__name__} makes batches of unlike sizes", "batch_shares=even")
        first, filled = first or examples, len(examples) < size
        if filled:
            if sampler.drop_last:
                return
            examples = [*examples, *itertools.islice(itertools.cycle(first), size - len(examples))]
        cut = _cut_by_shares(size, next(shares))
        yield examples[sum(cut[:rank]) : sum(cut[: rank + 1])]


def count_examples_of(sampler: BatchSamplerShard) -> int:
    """Return the number of examples of a full batch of all data ranks."""
    return sampler.batch_size * (1 if sampler.split_batches else sampler.num_processes)


def part_of_stream(loader: DataLoaderDispatcher, examples: int) -> slice | None:
    """Return which examples of a batch that rank 0 has read are this data rank's; None: as many as all others'.

    The last batch of a stream, which may be too small for a part for everyone, is shared out evenly.
    """
    shares = runtime.mesh().config.shares
    if shares is None:
        return None
    size = _count_stream_size(loader)
    if examples < size:
        return None
    if examples > size:
        what = f"batch_shares={runtime.mesh().config.batch_shares}"
        refuse(what, "examples of a stream that have several rows are shared out by rows", "batch_shares=even")
    cut, rank = cut_examples(size, shares), runtime.mesh().data_rank
    return slice(sum(cut[:rank]), sum(cut[: rank + 1]))


def _count_stream_size(loader: DataLoaderDispatcher) -> int:
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if size is None:
        what = f"batch_shares={runtime.mesh().config.batch_shares}"
        refuse(what, f"{type(loader.batch_sampler).__name__} does not say its batch_size", "batch_shares=even")
    return size * (1 if loader.split_batches else runtime.mesh().data_size)


def list_notes_on_workers(loader: DataLoader | None) -> list[str]:
    """Return what to tell of a stream that rank 0 reads by several workers: a data rank's batch is of one of them."""
    from accelerate.data_loader import DataLoaderDispatcher

    if not isinstance(loader, DataLoaderDispatcher) or loader.split_batches or loader.num_workers < 2:
        return []
    return [
        f"dataloader_num_workers={loader.num_workers}: each worker reads its own part of the stream, and the batches "
        "of data ranks come from several, so a step has other examples than in one process; dataloader_num_workers=1 "
        'works, and so does accelerator_config={"dispatch_batches": False}'
    ]


# ---- What follows for a loader --------------------------------------------------------------------------------------


def check_loader(prepared: DataLoader, of_loop: bool) -> None:
    """Refuse a loader that cannot be shared out unevenly, where that is asked for.

    Args:
        of_loop: there is no Trainer, so that all loaders may be trained on.
    """
    from accelerate.data_loader import DataLoaderDispatcher

    config = runtime.mesh().config
    if not config.shares_batches:
        return
    what, auto = f"batch_shares={config.batch_shares}", config.batch_shares == MEASURED
    if auto and (of_loop or isinstance(prepared, DataLoaderDispatcher)):
        why = "a loop without a Trainer says nothing of its steps" if of_loop else "streams are not cut anew"
        refuse(what, why, "batch_shares=" + ":".join(["2"] * (config.data_parallel_size - 1) + ["1"]))
    if isinstance(prepared, DataLoaderDispatcher):
        examples = _count_stream_size(prepared)
        check_batch_size(
            examples, "batch_size", examples // (1 if prepared.split_batches else config.data_parallel_size)
        )
        return check_micro_batches(examples) if of_loop else None
    sampler = _find_sampler_of(prepared)
    if sampler is None:
        refuse(what, "a stream that each process reads by itself is shared out evenly", "dispatch_batches=True")
    if isinstance(sampler.batch_sampler, TokenBatches):
        return None
    if sampler.batch_size is None:
        refuse(what, f"{type(sampler.batch_sampler).__name__} makes batches of no fixed size", "batch_shares=even")
    check_batch_size(count_examples_of(sampler), "batch_size", sampler.batch_size)
    return check_micro_batches(count_examples_of(sampler)) if of_loop else None


def check_batch_size(examples: int, name: str, value: int) -> None:
    """Refuse a batch of all data ranks that leaves one of them without an example.

    Args:
        name: the script's setting that makes it so large.
    """
    config = runtime.mesh().config
    if config.shares is None:
        return
    cut = cut_examples(examples, config.shares)
    if min(cut) == 0:
        fits = compute_enough_examples(config.shares) * value * config.data_parallel_size // examples
        refuse(
            f"batch_shares={config.batch_shares}",
            f"{name}={value} gives data ranks {' '.join(map(str, cut))} of {examples} examples, and each needs one",
            f"{name}={fits}",
        )


def check_micro_batches(examples: int) -> None:
    """Refuse a batch to train on whose parts are cut into unlike numbers of micro-batches that meet at experts."""
    config = runtime.mesh().config
    if not config.shares_batches or config.pp_size == 1 or config.ep_size <= config.cp_size * config.tp_size:
        return
    if config.shares is None:
        why = f"micro-batches meet at experts (ep_size={config.ep_size}), and their numbers would change"
        refuse(f"batch_shares={config.batch_shares}", why, "batch_shares=even")
    cut = cut_examples(examples, config.shares)
    if can_cut_alike(cut, config):
        return
    common = math.gcd(*cut)
    counts = (n for n in range(config.pp_size, common + 1) if common % n == 0 and can_run_micro_batches(config, n))
    fits = max((n for n in counts if n <= 4 * config.pp_size), default=None)
    why = f"{' '.join(map(str, cut))} examples are unlike numbers of micro-batches, which meet at experts"
    works = "batch_shares=even" if fits is None else f"pipeline_microbatches={fits}"
    refuse(f"batch_shares={config.batch_shares}", f"{why} (ep_size={config.ep_size})", works)


def _find_sampler_of(dataloader: Any) -> BatchSamplerShard | None:
    """Return what shares out the batches of a prepared loader; None where nothing does by examples."""
    from accelerate.data_loader import BatchSamplerShard

    for name in ("batch_sampler", "sampler"):
        part = getattr(dataloader, name, None)
        while part is not None:
            if isinstance(part, BatchSamplerShard):
                return part
            part = getattr(part, "batch_sampler", None)
    return None


def cut_of(gradient_state: GradientState | OneLoader) -> tuple[int, ...] | None:
    """Return how many examples each data rank has of a full batch of the loader that is read.

    None where all have as many: in the last batch of a stream, too.
    """
    from accelerate.data_loader import DataLoaderDispatcher

    loader = gradient_state.active_dataloader
    if not runtime.mesh().config.shares_batches:
        return None
    sampler = None if isinstance(loader, DataLoaderDispatcher) else _find_sampler_of(loader)
    shares = _find_shares_of(sampler)
    if isinstance(loader, DataLoaderDispatcher) and shares is not None:
        size = _count_stream_size(loader)
        last = gradient_state.end_of_dataloader and gradient_state.remainder != size
        return None if last else _cut_by_shares(size, shares)
    return None if sampler is None or shares is None else _cut_by_shares(count_examples_of(sampler), shares)


def take_batch(gradient_state: GradientState | OneLoader) -> None:
    """The next batch of a Trainer's loader is trained on."""
    measured, loader = _get_measured_shares(), gradient_state.active_dataloader
    if measured is not None:
        measured.of_pass.take(getattr(loader.batch_sampler, "skip_batches", 0))


def follow_trainer(loader: object) -> None:
    """Cut the batches of this loader anew when that is worth it, under `batch_shares=auto`."""
    measured = _get_measured_shares()
    if measured is not None:
        measured.sampler, measured.of_pass = _find_sampler_of(loader), SharesOfPass(measured.of_pass.latest)
        measured.speeds.forget()


# ---- What is real of a batch, and how much it weighs ----------------------------------------------------------------


@dataclass(frozen=True)
class OneLoader:
    """A loader's part of accelerate's gradient state, which tells of the loader that was begun last.

    A script may have begun a second one in the meantime, such as one of other examples for each step.
    """

    active_dataloader: Any

    @property
    def end_of_dataloader(self) -> bool:
        """Return whether its last batch has been read."""
        return self.active_dataloader is not None and self.active_dataloader.end_of_dataloader

    @property
    def remainder(self) -> int:
        """Return how many examples of its last batch are not repeated."""
        return -1 if self.active_dataloader is None else self.active_dataloader.remainder


def is_ragged(gradient_state: GradientState | OneLoader) -> bool:
    """Return whether this is a last batch that is filled with repeated rows. All data ranks say the same."""
    if not gradient_state.end_of_dataloader or gradient_state.remainder <= 0 or runtime.mesh().data_size == 1:
        return False
    # A batch sampler may leave out a last batch that is not full, which accelerate does not look at.
    return not does_drop_last(gradient_state.active_dataloader)


def have_unlike_rows(gradient_state: GradientState) -> bool:
    """Return whether data ranks may have unlike numbers of rows. All say the same.

    A Trainer that has read a stream to its end computes with the last batch when accelerate has forgotten it.
    """
    active = runtime.current()
    in_ragged_batch = active is not None and active.real_rows is not None
    return in_ragged_batch or runtime.mesh().config.shares_batches or is_ragged(gradient_state)


def does_drop_last(dataloader: DataLoader) -> bool:
    """Return whether the loader leaves out a last batch that is not full."""
    return bool(getattr(getattr(dataloader, "batch_sampler", None), "drop_last", False))


def count_real_rows(gradient_state: GradientState | OneLoader, rows: int) -> int:
    """Return how many rows of this rank's batch are not repeated to fill a ragged last batch.

    The `rows` of a data rank follow those of the rank before it. The first `remainder` rows of the batch are new.
    """
    if not is_ragged(gradient_state):
        return rows
    rank, cut = runtime.mesh().data_rank, cut_of(gradient_state)
    before = rank * rows if cut is None else sum(cut[:rank])
    return max(0, min(rows, gradient_state.remainder - before))


def share_of_rows(gradient_state: GradientState | OneLoader, rows: int) -> float:
    """Return how much the mean over this rank's real rows weighs in the data ranks' average.

    1 where all data ranks have as many.
    """
    if is_ragged(gradient_state):
        return count_real_rows(gradient_state, rows) * runtime.mesh().data_size / gradient_state.remainder
    return compute_full_share(gradient_state)


def compute_full_share(gradient_state: GradientState | OneLoader) -> float:
    """Return how much the mean over all rows of this rank's batch weighs, repeated ones included."""
    cut = cut_of(gradient_state)
    return 1.0 if cut is None else cut[runtime.mesh().data_rank] * len(cut) / sum(cut)


def weigh_loss(loss: torch.Tensor, factor: torch.Tensor | float) -> torch.Tensor:
    """Multiply a loss by its weight, where a mean over nothing, which is not a number, counts nothing."""
    if torch.is_tensor(factor):
        return (torch.where(factor == 0, 0.0, loss.float()) * factor).to(loss.dtype)
    return loss if factor == 1 else (loss if factor else torch.nan_to_num(loss)) * factor

"""Who is a process? For everything that counts data, a *data rank*: the ranks of one model see the same batches.

`num_processes` and `process_index` are a pair, the number of data ranks and this one's: scripts and libraries shard,
seed and cut by them. The main process, the last one and names of files go by global rank: each is one of all.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import BatchSampler, IterableDataset
from transformers.utils import ModelOutput

from hf_parallel.ask.spec import refuse
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.accelerate.processes import (
    CountedBatch,
    Place,
    RandomStream,
    read_global_state,
    read_loader_from,
)
from hf_parallel.hooks.accelerate.shares import (
    check_loader,
    does_drop_last,
    have_unlike_rows,
    list_notes_on_workers,
    part_of_stream,
)
from hf_parallel.hooks.patching import patch
from hf_parallel.hooks.trainer.rows import (
    PerExample,
    count_examples,
    find_lists_per_example,
    has_encoder_outputs,
)
from hf_parallel.model.calls import bind_by_name
from hf_parallel.ranks import desync, messages

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard
    from torch.utils.data import DataLoader


# ---- The order in which a loader reads its rows: with several data ranks that of one process ------------------------
# For several processes accelerate gives a shuffling sampler without a generator a seed of its own; in one process the
# sampler draws from the process's random numbers. Here it goes on doing so, from the stream that all ranks share.


#: On samplers that group rows of like length: for batches of all data ranks already.
_GROUPED = "_hf_parallel_grouped"


@patch("accelerate.data_loader:prepare_data_loader", "draws orders on each rank", copies=True)
def prepare_data_loader(original: Callable, dataloader: DataLoader, *args: object, **kwargs: object) -> object:
    """Shard by data rank; let every rank of one model draw the same random numbers while it reads data."""
    from transformers.trainer_pt_utils import LengthGroupedSampler

    from hf_parallel.hooks.trainer.token_budget import check_loop

    check_loop()
    mesh, inner = runtime.mesh(), cast(Any, dataloader)
    while inner is not None:  # the innermost sampler says which rows come next
        sampler, parts = inner, [getattr(inner, name, None) for name in ("batch_sampler", "sampler")]
        inner = next((part for part in parts if part is not None), None)  # not all have a length to be true by
    if isinstance(sampler, LengthGroupedSampler) and not hasattr(sampler, _GROUPED):
        sampler.batch_size *= mesh.data_size
        setattr(sampler, _GROUPED, True)
    given = bind_by_name(original, (dataloader, *args), kwargs)
    if given.get("even_batches") is False and not does_drop_last(dataloader) and mesh.data_size > 1:
        refuse(f"even_batches=False with {mesh.data_size} data ranks", "they would run out apart", "True")
    # Where accelerate orders rows by a seed and the epoch, as for Trainer, loaders draw nothing for it.
    is_seeded = bool(given.get("use_seedable_sampler", False))
    if is_seeded or getattr(sampler, "generator", 0) is not None:
        prepared = original(dataloader, *args, **kwargs)
    else:  # its sampler goes on drawing the order
        sampler.generator = torch.Generator()  # so that no number is drawn for one
        try:
            prepared = original(dataloader, *args, **kwargs)
        finally:
            sampler.generator = None
        if getattr(prepared, "synchronized_generator", None) is not None:
            prepared.synchronized_generator = None
            prepared.rng_types = [kind for kind in prepared.rng_types or () if kind != "generator"]
    _refuse_batches_without_size(dataloader, prepared)
    check_loader(prepared, of_loop := runtime.is_loop())
    if of_loop and mesh.data_size > 1:
        for note in list_notes_on_workers(prepared):
            report.say(note)
    # A loader that draws its order advances the numbers of the next one, and even one in order draws a seed.
    return _shard_by_data_rank(prepared, mesh.config.world_size > mesh.data_size or not is_seeded)


def _refuse_batches_without_size(dataloader: DataLoader, prepared: Any) -> None:
    from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard

    ranks, has_batches = runtime.mesh().data_size, dataloader.batch_sampler is not None
    if ranks == 1 or has_batches or isinstance(dataloader.sampler, BatchSampler):
        return
    by_rank = isinstance(prepared.dataset, IterableDatasetShard) or not isinstance(prepared.dataset, IterableDataset)
    if by_rank and not isinstance(prepared, DataLoaderDispatcher):
        why = "each example is a batch, which they cannot share out by themselves"
        refuse(f"batch_size=None with {ranks} data ranks", why, "dispatch_batches=True")


def _shard_by_data_rank(prepared: DataLoaderShard, shared: bool) -> object:
    from accelerate.data_loader import DataLoaderDispatcher, IterableDatasetShard

    if isinstance(prepared, DataLoaderDispatcher):
        _dispatch_by_data_rank(prepared)
        return prepared
    shard = prepared.dataset
    if isinstance(shard, IterableDatasetShard) and not isinstance(shard.dataset, CountedStream):
        shard.dataset = stream = CountedStream(shard.dataset, shard)
        if prepared.num_workers > 0 and not shard.drop_last:
            prepared.base_dataloader.collate_fn = CountingCollator(prepared.base_dataloader.collate_fn, stream)
    if desync.is_rank_0_alone("preparing a loader", by_line=True):
        place = Place(prepared, RandomStream(read_global_state()) if shared else None, is_of_rank_0=True)
    else:
        place = Place(prepared, RandomStream.here() if shared else None)
    read_loader_from(prepared, place)
    return prepared


@patch("accelerate.data_loader:skip_first_batches", "forgets shares, the remainder, the order", copies=True)
def skip_first_batches(original: Callable, dataloader: DataLoader, num_batches: int = 0) -> object:
    """Skip batches of an epoch. The rest keeps its data ranks, and the repeats of its last batch are known."""
    from accelerate.data_loader import SkipBatchSampler
    from transformers.trainer_utils import has_length

    read = num_batches
    if hasattr(dataloader, "slice_fn") and not isinstance(dataloader.dataset, IterableDataset):
        # Rank 0 reads a batch of the sampler for each data rank, and accelerate skips batches of the sampler.
        read *= 1 if getattr(dataloader, "split_batches", False) else runtime.mesh().data_size
    rest, place = original(dataloader, read), getattr(dataloader, "_place", None)
    for name in ("_drop_last", "_non_blocking"):
        if hasattr(dataloader, name):
            setattr(rest, name, getattr(dataloader, name))
    if place is None:
        return _shard_by_data_rank(rest, False) if hasattr(dataloader, "slice_fn") else rest
    samplers = (getattr(rest, "batch_sampler", None), getattr(rest, "sampler", None))
    sampler = next((one for one in samplers if isinstance(one, SkipBatchSampler)), None)
    if sampler is not None:
        # accelerate looks on it for what the one inside has: batch sizes and the epoch's seed.
        inner = sampler.batch_sampler
        for name in ("batch_size", "drop_last", "num_processes", "split_batches"):
            if hasattr(inner, name):
                setattr(sampler, name, getattr(inner, name))

        def set_epoch(epoch: int) -> None:
            part = inner
            while part is not None:
                if hasattr(part, "set_epoch"):
                    part.set_epoch(epoch)
                inside = (getattr(part, name, None) for name in ("batch_sampler", "sampler"))
                # Some have no length to be true by.
                part = next((found for found in inside if found is not None), None)

        sampler.set_epoch = set_epoch
    read_loader_from(rest, place, empty=has_length(dataloader) and num_batches >= len(dataloader))
    return rest


@patch("accelerate.data_loader:DataLoaderShard.set_epoch", "tells a shared-out sampler, not a script's, nor data sets")
def set_epoch_of_loader(original: Callable, self: DataLoaderShard, epoch: int) -> None:
    """Tell the epoch to what is told it in one process, where data ranks do not share out the batches of a sampler."""
    from accelerate.data_loader import BatchSamplerShard

    sampler: Any = self.batch_sampler
    if not isinstance(sampler, BatchSamplerShard):
        return original(self, epoch)
    self.iteration = epoch
    told = types.SimpleNamespace(iteration=epoch, batch_sampler=sampler.batch_sampler, dataset=self.dataset)
    return original(told, epoch)


@patch("accelerate.data_loader:DataLoaderStateMixin.begin", "takes the length of the data set for its sampler's")
def begin_pass(original: Callable, self: Any) -> None:
    """Count what the last batch has of the rows that the sampler draws, which may be fewer or more than there are."""
    from accelerate.state import GradientState

    self.gradient_state = GradientState()  # a copy of a loader has a copy of the state, which nobody asks
    original(self)
    self.remainder_by_length = self.remainder  # where one process cuts what it gathers from the last batch
    sampler: Any = getattr(self, "batch_sampler", None)
    while getattr(sampler, "batch_sampler", None) is not None:
        sampler = sampler.batch_sampler
    if self.remainder >= 0 and type(sampler) is BatchSampler and isinstance(sampler.sampler, Sized):
        self.remainder = len(sampler.sampler) % self.total_batch_size


@dataclass(eq=False)
class CountedStream(IterableDataset):
    """A stream that each data rank reads as a whole: tells the loader how many rows are new in its last batch."""

    dataset: Any
    shard: Any  # accelerate's, which held the data set
    new: int = 0  # in a worker process, once the stream has ended

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "dataset":  # while it is pickled for a worker process
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator:
        from accelerate.state import GradientState

        shard, count, self.new = self.shard, 0, 0
        for example in self.dataset:
            count += 1
            yield example
        full = shard.batch_size * (1 if shard.split_batches else shard.num_processes)
        self.new = count % full
        loader: Any = GradientState().active_dataloader
        if not shard.drop_last and getattr(loader, "dataset", None) is shard:
            loader.remainder = self.new


@dataclass
class CountingCollator:
    """Makes batches in a worker process, and counts the new rows of its last one."""

    collate: Callable
    stream: CountedStream

    def __call__(self, examples: list) -> CountedBatch:
        return CountedBatch(self.collate(examples), self.stream.new)


class _DataRanks(int):
    """Their number, an object of its own: a slice that ends at it is what completes the last batch of a stream."""


def _dispatch_by_data_rank(dataloader: DataLoaderDispatcher) -> None:
    """Rank 0 reads for everybody; each rank then takes the slice of its data rank."""
    mesh = runtime.mesh()
    reads = mesh.rank == 0
    # The dispatcher asks its state who reads (process 0) and how many batches make a step.
    ranks = _DataRanks(mesh.data_size)
    dataloader.state = types.SimpleNamespace(
        num_processes=ranks,
        process_index=0 if reads else mesh.data_rank or -1,
        device=mesh.device,
    )
    inner = dataloader.slice_fn

    def slice_fn(
        data: object, wanted: slice, process_index: int | None = None, num_processes: int | None = None
    ) -> object:
        part = None if wanted.stop is ranks else part_of_stream(dataloader, count_examples(cast(dict, data)) or 0)
        if part is not None:
            wanted = part
        elif wanted.start is not None and wanted.start < 0:  # data rank 0 where the reader is another rank
            wanted = slice(0, -wanted.start)
        return inner(data, wanted, process_index=mesh.data_rank, num_processes=mesh.data_size)

    dataloader.slice_fn = slice_fn
    base = dataloader.base_dataloader
    base.collate_fn = CheckingCollator(base.collate_fn, base.batch_size or 0, count_sharing_ranks(dataloader))


@dataclass
class CheckingCollator:
    """Makes batches that rank 0 can send, maybe in a worker process that has neither the loader nor the layout.

    Attributes:
        batch_size: examples of a batch that is not the last one.
        ranks: data ranks over which rows of the last batch are shared out.
    """

    collate: Callable
    batch_size: int
    ranks: int

    def __call__(self, examples: list) -> object:
        batch = self.collate(examples)
        if any(isinstance(part, str) for part in tree_leaves(batch)):
            what, why = "an IterableDataset whose batches hold text", "rank 0 reads for all, and sends tensors alone"
            refuse(
                what,
                why,
                do='accelerator_config={"dispatch_batches": False} works, and so does a data set with a length',
            )
        if len(examples) < self.batch_size and len(examples) < (count_examples(batch) or 0):
            refuse_cut_examples(self.ranks)  # a whole stream of less than one batch: nothing told before
        return batch


def refuse_cut_examples(ranks: int) -> None:
    """Refuse examples of several rows where so many ranks share out the last batch of a stream row by row.

    Raises:
        SpecError: examples would be torn apart, because there are several ranks.
    """
    if ranks > 1:
        refuse(
            f"an IterableDataset whose examples have several rows, with {ranks} data ranks",
            "the last batch would be shared out by rows",
            do="dataloader_drop_last=True works, and so does a data set with a length",
        )


def count_sharing_ranks(dataloader: DataLoader) -> int:
    """Count the data ranks over which the rows of the last batch are shared out: 1 where it stays in one piece."""
    from accelerate.data_loader import DataLoaderDispatcher

    is_shared = isinstance(dataloader, DataLoaderDispatcher) and not dataloader._drop_last
    return runtime.mesh().data_size if is_shared else 1


@patch("accelerate.utils.operations:gather", "gathers over all processes", copies=True)
def gather(original: Callable, tensor: object) -> object:
    """Gather one entry per data rank, in their order; data ranks may have unlike numbers of rows."""
    from accelerate.state import GradientState
    from accelerate.utils.operations import recursively_apply

    if isinstance(tensor, PerExample):
        return gather_examples(tensor)
    if has_encoder_outputs(tensor):
        return tuple(
            gather_outputs(part) if isinstance(part, ModelOutput) else gather(original, part) for part in tensor
        )
    if (lists := find_lists_per_example(tensor)) and runtime.mesh().data_size > 1:
        batch = cast(dict, tensor)
        return type(batch)({key: gather(original, lists.get(key, value)) for key, value in batch.items()})

    gather_tensors = functools.partial(recursively_apply, _gather_unlike_tensors, error_on_other_type=True)
    may_differ = have_unlike_rows(GradientState())
    return (gather_tensors if may_differ else _check_shapes_first(original, gather_tensors))(tensor)


def _check_shapes_first(original: Callable, replacement: Callable) -> Callable:
    """Let `ACCELERATE_DEBUG_MODE` compare shapes, as it does before the `original`."""
    from accelerate.utils.operations import verify_operation

    return verify_operation(functools.wraps(original)(replacement))


def gather_examples(examples: PerExample) -> list:
    """Gather the examples of all data ranks, in their order, with tensors on this rank's device."""
    host = [] if runtime.is_absent() else tree_map_only(torch.Tensor, torch.Tensor.cpu, examples)
    found = [item for part in messages.gather_objects(host, runtime.mesh().data_group) for item in part]
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(runtime.mesh().device), found)


def gather_outputs(outputs: ModelOutput) -> ModelOutput:
    """Join an encoder's outputs of all data ranks, in their order.

    Data ranks have unlike numbers of images, so that nothing here has a row per example. Layers are joined one by
    one; any other tuple, such as the features of each image, becomes one long tuple.
    """
    found = [(kind, part) for kind, part in gather_examples(PerExample([(type(outputs), dict(outputs))])) if part]
    if not found:
        return outputs
    parts = [part for _, part in found]
    return found[0][0](**{key: _join_parts(key, [part[key] for part in parts]) for key in parts[0]})


def _join_parts(key: str, parts: list) -> object:
    if torch.is_tensor(parts[0]):
        return torch.cat(parts)
    if not isinstance(parts[0], tuple | list):
        return parts[0]
    if key.endswith(("hidden_states", "attentions")):
        return tuple(_join_parts("", list(layer)) for layer in zip(*parts, strict=True))
    return tuple(item for part in parts for item in part)


@patch("accelerate.utils.operations:pad_across_processes", "takes things of examples for rows", copies=True)
def pad_across_processes(original: Callable, tensor: object, *args: object, **kwargs: object) -> object:
    """Pad rows. Lists of one thing per example and outputs of encoders stay, as they are gathered whole."""
    if has_encoder_outputs(tensor):
        return tuple(part if isinstance(part, ModelOutput) else original(part, *args, **kwargs) for part in tensor)
    return tensor if isinstance(tensor, PerExample) else original(tensor, *args, **kwargs)


def _gather_unlike_tensors(tensor: torch.Tensor) -> torch.Tensor:
    from accelerate.state import GradientState

    mesh = runtime.mesh()
    tensor = (tensor.clone()[None] if tensor.ndim == 0 else tensor).detach().contiguous()
    if runtime.is_absent():
        tensor = tensor[:0]
    sizes = [tensor.shape[0]] * mesh.data_size
    if have_unlike_rows(GradientState()):
        own = torch.tensor([tensor.shape[0]], device=tensor.device)
        found = [torch.empty_like(own) for _ in range(mesh.data_size)]
        dist.all_gather(found, own, group=mesh.data_group)
        sizes = [int(size) for size in found]
    padded = tensor
    if tensor.shape[0] < max(sizes):
        padded = torch.cat([tensor, tensor.new_zeros(max(sizes) - tensor.shape[0], *tensor.shape[1:])])
    gathered = [torch.empty_like(padded) for _ in range(mesh.data_size)]
    dist.all_gather(gathered, padded, group=mesh.data_group)
    return torch.cat([part[:size] for part, size in zip(gathered, sizes, strict=True)])


@patch("accelerate.accelerator:Accelerator.gather_for_metrics", "takes numbers per rank for rows")
def gather_for_metrics(
    original: Callable, self: Accelerator, input_data: object, use_gather_object: bool = False
) -> object:
    """A number per data rank is no row: none of them is a repeat to be dropped. Nor are an encoder's outputs.

    Lists of one tensor per example are joined as lists; Accelerate would gather tensors of unlike sizes. What is
    gathered as objects has one process's form: a tensor is no list of its rows, a tuple no list of all its parts.
    """
    several = runtime.mesh().data_size > 1
    if use_gather_object and several and torch.is_tensor(input_data) and input_data.ndim:
        joined: Any = original(self, PerExample(row.clone() for row in input_data), True)
        return torch.stack(joined) if len({row.shape for row in joined}) == 1 else joined
    if torch.is_tensor(input_data) and input_data.ndim == 0 and not use_gather_object:
        return self.gather(input_data)
    if has_encoder_outputs(input_data):
        return tuple(
            gather_outputs(part) if isinstance(part, ModelOutput) else gather_for_metrics(original, self, part)
            for part in input_data
        )
    if (
        use_gather_object
        and several
        and type(input_data) is tuple
        and all(map(torch.is_tensor, tree_leaves(input_data)))
    ):
        return tuple(gather_for_metrics(original, self, part, True) for part in input_data)
    if (lists := find_lists_per_example(input_data)) and several and not use_gather_object:
        batch = cast(dict, input_data)
        parts = {key: lists.get(key, value) for key, value in batch.items()}
        return type(batch)({key: gather_for_metrics(original, self, part) for key, part in parts.items()})
    return original(self, input_data, use_gather_object or isinstance(input_data, PerExample))


@patch("accelerate.utils.operations:gather_object", "gathers over all processes", copies=True)
def gather_object(original: Callable, object: Any) -> Any:
    """Join the lists of all data ranks in their order; one data rank has what came, as accelerate in one process."""
    if isinstance(object, PerExample):
        return gather_examples(object)
    if runtime.mesh().data_size == 1:
        return object
    return [item for part in messages.gather_objects(object, runtime.mesh().data_group) for item in part]


@patch("accelerate.utils.operations:reduce", "reduces over all processes", copies=True)
def reduce(original: Callable, tensor: object, reduction: str = "mean", scale: float = 1.0) -> object:
    """Sum, mean or maximum over data ranks."""
    from accelerate.utils.operations import recursively_apply

    mesh = runtime.mesh()

    def reduce_one(value: torch.Tensor, reduction: str = reduction, scale: float = scale) -> torch.Tensor:
        value = value.clone()
        operation = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
        dist.all_reduce(value, operation, group=mesh.data_group)
        return value / mesh.data_size if reduction == "mean" else value

    reduce_all = functools.partial(recursively_apply, reduce_one, error_on_other_type=True)
    return _check_shapes_first(original, reduce_all)(tensor)

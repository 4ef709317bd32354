"""Process numbers as data ranks: whatever shards, seeds or cuts by them means these; what is done once does not.

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
import os
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist

from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.patching import patch, replace, replacing
from hf_parallel.ranks import desync, messages, requests

if TYPE_CHECKING:
    from accelerate import PartialState
    from accelerate.data_loader import DataLoaderShard
    from transformers import Trainer, TrainingArguments


# ---- The random numbers of reading data, on layouts whose ranks share a model
# In one process the loaders and the model draw from the same generators in turn. Here ranks of one model must read the
# same batches, and do not all draw what the model draws: so data has a stream of its own, which goes on from loader to
# loader. Where the model draws nothing, orders and masks are those of one process. As long as a rank has drawn nothing
# else, its generators go on with the stream, so that the model then draws what it would in one process. At each epoch
# of a Trainer, and after that of a loop, the stream goes on from generators that a loss has drawn from, and so do
# those of ranks that have not.


def read_global_state() -> tuple:
    """Return the states of this process's generators of torch on the host, numpy and Python."""
    return torch.get_rng_state(), np.random.get_state(), random.getstate()


def set_global_state(state: tuple) -> None:
    """Set the states of these generators."""
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


@dataclass(eq=False)
class RandomStream:
    """A random stream that all ranks share."""

    latest: ClassVar[RandomStream | None] = None

    state: tuple
    left: tuple | None = field(default_factory=read_global_state)  # None: this rank has drawn something else since
    is_aside: bool = False  # an epoch is started once more, from another state

    @classmethod
    def here(cls) -> RandomStream:
        """Return the latest one as it goes on here. Collective."""
        if cls.latest is None:
            cls.latest = cls(messages.send_from_one(read_global_state))
        else:
            cls.latest.rejoin()
        return cls.latest

    def __deepcopy__(self, memo: object) -> RandomStream:
        """Let a copy of a loader draw from the same numbers as the loader, as in one process."""
        return self

    def rejoin(self) -> None:
        """Go on from the generators that have drawn something else since, as one process does. Collective.

        Of several ranks that have, the first counts: a pipeline's last stage draws what its loss draws.
        """
        known = self.left is not None and _is_equal_state(self.left, read_global_state())
        drawn = [not one for one in messages.gather_objects(known or runtime.mesh().data_rank > 0)]
        if any(drawn):
            self.state = messages.send_from_one(read_global_state, source=drawn.index(True))
            if known:
                set_global_state(self.state)
            self.left = read_global_state()

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Draw from this stream inside the block."""
        outside = read_global_state()
        together = not self.is_aside and _is_equal_state(outside, self.state)
        set_global_state(self.state)
        try:
            yield
        finally:
            self.state = read_global_state()
            if not together:
                set_global_state(outside)
            if not self.is_aside:
                self.left = self.state if together else None


def make_plain_state(state: tuple) -> tuple:
    """Return a state as numbers and tensors, which can be read without running pickled code."""
    kind, keys, *rest = state[1]
    return state[0], (kind, np.asarray(keys).tolist(), *rest), state[2]


def continue_stream(state: tuple | None) -> None:
    """Let the latest stream go on from `state`, which is the same on all ranks, or from rank 0's generators.

    As of a run in one process, where data and model draw from the same ones. Collective.
    """
    if RandomStream.latest is None:
        return
    stream, own = RandomStream.latest, read_global_state()
    stream.state = messages.send_from_one(read_global_state) if state is None else state
    stream.left = own if _is_equal_state(own, stream.state) else None


def _is_equal_state(one: tuple, other: tuple) -> bool:
    (torch_one, numpy_one, python_one), (torch_other, numpy_other, python_other) = one, other
    same = torch.equal(torch_one, torch_other) and python_one == python_other
    return same and all(np.array_equal(a, b) for a, b in zip(numpy_one, numpy_other, strict=True))


# ---- Where prepared loaders are: what a state must hold so that the next process reads the rows that this one would
# accelerate saves neither a loader's epoch nor the generator of its sampler. A loader in the middle of an epoch starts
# that one again, in the same order, for `skip_first_batches` to leave out what was read:
#
#     saved in epoch 2, after 3 batches   generators and stream as they were when epoch 2 started; and as they are now
#     loaded                              the epoch starts from the former, and all else goes on from the latter


#: Of a loader, as numbers and tensors.
State: TypeAlias = dict
#: In the folder of a state.
FILE = "data_order.pt"


@dataclass(eq=False)
class Place:
    """The place of one loader in its data, and of what `skip_first_batches` makes of it."""

    loader: DataLoaderShard
    stream: RandomStream | None
    started: State | None = None  # what the epoch that is going on has started from
    ended: int | None = None  # the epoch after the one that was read to its end
    again: State | None = None  # what the next epoch starts from: a former process has begun it
    rejoins: bool = False  # do all ranks start the next epoch together?
    is_of_rank_0: bool = False  # rank 0 has made the loader alone
    is_alone: bool = False  # rank 0 reads the next epoch, or a part of it, alone
    was_alone: bool = False  # it has read so, of which the others do not know yet
    request: int | None = None

    def __post_init__(self) -> None:
        if not self.is_of_rank_0:
            self.request = requests.take_requests(self, Place.follow_rank_0)

    def follow_rank_0(self) -> None:
        """Go on from what rank 0 has drawn when it read alone. Collective."""
        if self.stream is not None:
            self.stream.rejoin()
            if runtime.mesh().data_rank == 0:  # ranks of one model draw alike
                set_global_state(self.stream.state)
                self.stream.left = read_global_state()
        own = _list_generators(self.loader)
        for generator, state in zip(own, messages.send_from_one(lambda: [g.get_state() for g in own]), strict=True):
            generator.set_state(state)
        self.was_alone = False

    def state(self) -> State:
        """Return the place as numbers and tensors."""
        now = self._read_now()
        epoch = self.loader.iteration if self.ended is None else self.ended
        parts = _list_loader_parts(self.loader)
        seeds = [sampler.initial_seed for sampler in parts if hasattr(sampler, "initial_seed")]
        return {"epoch": epoch, "seeds": seeds, "now": now, "started": self.started}

    def _read_now(self) -> dict[str, object]:
        generators = [generator.get_state() for generator in _list_generators(self.loader)]
        stream = None if self.stream is None else make_plain_state(self.stream.state)
        return {"generators": generators, "stream": stream}

    def load(self, saved: State) -> None:
        """Go on from there at the next epoch."""
        self.loader.iteration, self.again, self.ended = saved["epoch"], saved["started"], None
        samplers = [sampler for sampler in _list_loader_parts(self.loader) if hasattr(sampler, "initial_seed")]
        for sampler, seed in zip(samplers, saved["seeds"], strict=False):
            sampler.initial_seed = seed
        self._set_generators(saved["now"] if self.again is None else self.again)
        if self.stream is not None and saved["now"]["stream"] is not None:
            self.stream.state = saved["now"]["stream"]

    def _set_generators(self, state: State) -> None:
        own = _list_generators(self.loader)
        if len(own) == len(state["generators"]):  # another layout may draw in another way
            for generator, values in zip(own, state["generators"], strict=True):
                generator.set_state(values)

    # ---- one epoch -----------------------------------------------------------------------------------------------

    def batches(self, loader: DataLoaderShard, iterate: Callable[[], Iterator], empty: bool) -> Iterator:
        """An epoch of `loader`, which is this place's own or skips batches of it; all of them if `empty`."""
        if self.rejoins and self.stream is not None and self.again is None:
            self.stream.rejoin()
        self.rejoins = False
        before, epoch = self._read_now(), loader.iteration
        stream, self.is_alone = RandomStream(read_global_state()) if self.is_alone else self.stream, False
        draw = contextlib.nullcontext if stream is None else stream.active
        again, self.again = self.again, None
        self.started, self.ended = again or before, None
        aside: State | None = before if empty else again
        # An epoch is started once more aside: what goes on has drawn for it already.
        if aside is None:
            drawing: contextlib.AbstractContextManager = contextlib.nullcontext()
        elif self.stream is None:
            drawing = torch.random.fork_rng([])
        else:
            state = self.stream.state if aside["stream"] is None else aside["stream"]
            drawing = replacing(self.stream, state=state, is_aside=True)
        try:
            with drawing, draw():
                batches = iterate()
                batch = next(batches, batches)  # it draws the order
            while batch is not batches:
                yield batch
                with draw():
                    batch = next(batches, batches)
            self.ended = epoch if empty else epoch + 1
            if loader is not self.loader and not empty:
                self.loader.iteration = self.ended
        finally:
            self.started = None
            if empty:
                self._set_generators(before)


class CountedBatch(NamedTuple):
    """A batch of a stream as a worker process gives it. `new`: if it is the worker's last, how many of the sequences

    of all data ranks do not only fill it; else 0.
    """

    batch: Any
    new: int


def read_loader_from(loader: DataLoaderShard, place: Place, empty: bool = False) -> None:
    """Read `loader` from `place` on."""
    base: Any = loader.base_dataloader
    # Copied and pickled with the loader: a function would go on to read the loader that it was made for.
    base.__iter__ = functools.partial(_iterate_from, loader, place, empty)
    loader._place = place


def _iterate_from(loader: DataLoaderShard, place: Place, empty: bool) -> Iterator:
    base = loader.base_dataloader
    return place.batches(loader, lambda: _count_batches(loader, type(base).__iter__(base)), empty)


def read_alone(loader: DataLoaderShard, iterate: Callable) -> Iterator | None:
    """Return an iterator of the batches that rank 0 reads alone, such as to show one; None where all ranks read."""
    place: Place | None = getattr(loader, "_place", None)
    if place is None:
        return None
    if place.was_alone and place.request is not None:
        desync.ask_other_ranks("reading a loader", place.request, "read it on all ranks, or put a barrier after it")
        place.follow_rank_0()
    if not place.is_of_rank_0 and not desync.is_rank_0_alone("reading a loader", by_line=True):
        return None
    place.is_alone = place.was_alone = True
    return _iterate_alone(loader, iterate)


def _iterate_alone(loader: DataLoaderShard, iterate: Callable) -> Iterator:
    batches = iterate(loader)
    with replacing(loader, rng_types=None):  # accelerate would send the state of a generator to the others
        batch = next(batches, batches)
    while batch is not batches:
        yield batch
        batch = next(batches, batches)


def rejoin_after_epoch() -> None:
    """After the last step of a loop's epoch, go on from what its losses have drawn. Collective: all ranks step."""
    from accelerate.state import GradientState

    state: Any = GradientState()
    place = getattr(state.active_dataloader, "_place", None)
    if state.end_of_dataloader and runtime.is_loop() and place is not None and place.stream is not None:
        place.stream.rejoin()


def _count_batches(loader: DataLoaderShard, batches: Iterator) -> Iterator:
    """Tell the loader how many sequences of its last batch are new, where worker processes count them."""
    new, told = 0, loader.iteration > 0
    for batch in batches:
        if isinstance(batch, CountedBatch):
            if new and not told:
                told = True
                report.say(
                    f"dataloader_num_workers={loader.num_workers}: each worker has its own last batch, and all but "
                    "the very last count sequences twice that only fill them; dataloader_num_workers=1, or "
                    "dataloader_drop_last=True, leaves them out"
                )
            batch, new = batch
            loader.remainder = new
        yield batch


def _list_loader_parts(loader: DataLoaderShard) -> list[object]:
    """Return the loader's samplers, from the outside in, and its data set."""
    found: list[object] = []
    waiting = [loader.base_dataloader]
    while waiting:
        part = waiting.pop(0)
        if part is not None and not any(part is known for known in found):
            found.append(part)
            waiting += [getattr(part, "__dict__", {}).get(name) for name in ("batch_sampler", "sampler", "dataset")]
    return found


def _list_generators(loader: DataLoaderShard) -> list[torch.Generator]:
    """Return the generators that orders are drawn from; a sampler that seeds its own in each epoch needs none."""
    parts = [part for part in _list_loader_parts(loader) if not hasattr(part, "initial_seed")]
    held = [getattr(part, "__dict__", {}).get("generator") for part in parts]
    return list({id(one): one for one in held if isinstance(one, torch.Generator)}.values())


# ---- in a state's folder ------------------------------------------------------------------------------------------


def save_loader_places(loaders: list[object], folder: str) -> None:
    """Write where all of them are."""
    places = [loader._place.state() if hasattr(loader, "_place") else None for loader in loaders]
    latest = RandomStream.latest
    left = None if latest is None or latest.left is None else make_plain_state(latest.left)
    torch.save({"loaders": places, "left": left}, os.path.join(folder, FILE))


def load_loader_places(loaders: list[object], folder: str) -> None:
    """Go on from what a layout has saved; else from the random states that were loaded. Collective."""
    path = os.path.join(folder, FILE)
    if not os.path.isfile(path):
        return continue_stream(None)
    saved = torch.load(path, weights_only=True)
    if RandomStream.latest is not None:
        RandomStream.latest.left = saved["left"]
    for loader, place in zip(loaders, saved["loaders"], strict=False):
        if place is not None and hasattr(loader, "_place"):
            loader._place.load(place)


def load_alone(folder: str) -> None:
    """In one process, where orders are drawn from the generators that all draw from: as the first loader goes on."""
    path = os.path.join(folder, FILE)
    if not os.path.isfile(path):
        return
    first = next(iter(torch.load(path, weights_only=True)["loaders"]), None)
    state = first and (first["started"] or first["now"])["stream"]
    if state is not None:
        set_global_state(state)


@replace("accelerate.state:{PartialState,AcceleratorState}.num_processes", "counts all processes", adds=True)
def num_processes(original: object) -> property:
    """Return the number of data ranks."""
    return property(
        lambda state: runtime.mesh().data_size, lambda state, value: vars(state).update(num_processes=value)
    )


@replace("accelerate.state:{PartialState,AcceleratorState}.process_index", "counts all processes", adds=True)
def process_index(original: object) -> property:
    """Return the data rank."""
    return property(
        lambda state: runtime.mesh().data_rank, lambda state, value: vars(state).update(process_index=value)
    )


_ALONE = "rank 0 may go on alone from here"
#: Frames from a function that is called in another's place to who has called that.
_ASKER = 2


@replace("accelerate.state:PartialState.is_main_process", "is one of all, not one of each data rank 0")
def is_main(original: object) -> property:
    """Rank 0 of all."""

    def read(state: PartialState) -> bool:
        desync.note_question(sys._getframe(1))
        return desync.is_main_process(dist.get_rank() == 0)

    return property(read)


@replace(
    "accelerate.{state:PartialState.is_local_main_process,accelerator:Accelerator.is_local_main_process,"
    "accelerator:Accelerator.is_main_process}",
    _ALONE,
)
def is_main_by_script(original: property) -> property:
    """Note that the script has asked: the model's next call without gradients may be rank 0's alone."""

    def read(owner: object) -> bool:
        desync.note_question(sys._getframe(1))
        return desync.is_main_process(original.__get__(owner))

    return property(read)


@replace("accelerate.accelerator:Accelerator.{process_index,local_process_index}", _ALONE)
@replace("transformers.training_args:TrainingArguments.{process_index,local_process_index}", _ALONE)
def index_by_script(original: property) -> property:
    """Note that the script has asked which process this is, as before `== 0`."""

    def read(owner: object) -> int:
        desync.note_question(sys._getframe(1))
        return original.__get__(owner)

    return property(read)


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

    def read(args: TrainingArguments) -> bool:
        desync.note_question(sys._getframe(1))
        return desync.is_main_process((args.local_process_index if getattr(args, setting) else dist.get_rank()) == 0)

    return property(read)


@patch("transformers.trainer:Trainer.is_world_process_zero", "goes by data rank")
def is_world_process_zero(original: Callable, self: Trainer) -> bool:
    """Rank 0 of all."""
    desync.note_question(sys._getframe(_ASKER))
    return desync.is_main_process(dist.get_rank() == 0)


@patch("torch.distributed:get_rank", _ALONE)
def rank_by_script(original: Callable, group: dist.ProcessGroup | None = None) -> int:
    """Return the rank; note that the script has asked."""
    if not torch.compiler.is_compiling():
        desync.note_question(sys._getframe(_ASKER))
    return original(group)


@patch("transformers.trainer:Trainer.is_local_process_zero", _ALONE)
def is_local_process_zero(original: Callable, self: Trainer) -> bool:
    """Rank 0 of each node; note that the script has asked."""
    desync.note_question(sys._getframe(_ASKER))
    return original(self)


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
    """Return a file for each rank: `{suffix}` is filled in by the index."""
    return original.replace("{suffix}", str(dist.get_rank() if dist.is_initialized() else 0))

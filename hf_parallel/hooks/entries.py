"""Calls that all ranks make together, and seldom: each first asks whether all of them are there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.ask.spec import refuse
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.patching import patch
from hf_parallel.model.calls import bind_by_name
from hf_parallel.model.families import LIBRARIES
from hf_parallel.ranks import assert_all_ranks, desync

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from transformers import Trainer

#: What to do where ranks end a training after different steps.
ENDED = "decide alike on all ranks when to stop: control.should_training_stop of one rank stops that one alone"


@patch("transformers.trainer:Trainer.{evaluate,predict}", "waits for ranks that will not come")
def attended(original: Callable, self: Trainer, *args: object, **kwargs: object) -> object:
    """The others come too, and the first batches of the loader that follows are compared."""
    begin(self.model, f"trainer.{original.__name__}")
    return original(self, *args, **kwargs)


@patch("torch.distributed:destroy_process_group", "rank 0 can no longer ask for parts of what it saves alone")
def end_groups(original: Callable, group: ProcessGroup | None = None) -> None:
    """The other ranks stay until rank 0 ends its own: it may save before."""
    if group in (None, dist.group.WORLD):
        desync.part()
    original(group)


@patch("torch.distributed.distributed_c10d:barrier", "rank 0 cannot ask those who wait for it", copies=True)
def wait_for_all(original: Callable, *args: object, **kwargs: object) -> object:
    """At a barrier of all ranks the others take part in what rank 0 does alone, until it comes, too."""
    given = bind_by_name(original, args, kwargs)
    if given.get("group") in (None, dist.group.WORLD) and not given.get("async_op"):
        desync.wait_for_rank_0()
    return original(*args, **kwargs)


@patch("accelerate.accelerator:Accelerator.{gather,reduce,pad_across_processes}", "waits where rank 0 cannot ask")
def come_after_rank_0(original: Callable, *args: object, **kwargs: object) -> object:
    """Before what all ranks do together the others take part in what rank 0 does alone, until it comes, too."""
    desync.come_to_call()
    return original(*args, **kwargs)


@patch("torch.distributed.distributed_c10d:init_process_group", "the layout has connected the processes", copies=True)
def connect_again(original: Callable, *args: object, **kwargs: object) -> None:
    """Let a script that connects the processes itself go on in the layout's group."""
    if not dist.is_initialized():
        original(*args, **kwargs)
        return
    given = bind_by_name(original, args, kwargs)
    world_size, asked = dist.get_world_size(), given.get("world_size")
    if asked not in (None, -1, world_size):
        refuse(f"init_process_group(world_size={asked})", f"the layout has {world_size} processes", world_size)
    if given.get("timeout") is not None:
        runtime.change_time_out(given["timeout"])
    report.say(f"init_process_group: the layout has connected the {world_size} processes, over {dist.get_backend()}")


@patch("torch.nn.parallel.distributed:DistributedDataParallel.__init__", "a second layout over ranks of one model")
def refuse_replicas(original: Callable, self: nn.Module, *args: object, **kwargs: object) -> None:
    """Refuse torch's own replicas, which count every process as a data rank."""
    do = "accelerator.prepare(model, loader) works, or without Accelerate hf_parallel.parallelize(model, SPEC)"
    refuse("DistributedDataParallel", "a second layout beside --parallel", do=do)


@patch(
    "torch.distributed.distributed_c10d:{all_gather,all_gather_into_tensor}",
    "each example would count once per rank of its model",
    copies=True,
)
@patch(
    "torch.distributed._functional_collectives:all_gather_tensor_autograd",
    "each example would count once per rank of its model",
    copies=True,
)
def gather_by_process(original: Callable, *args: object, **kwargs: object) -> Any:
    """Gather as torch does; refuse it with gradients, or for a queue, where an example would be there twice."""
    current = runtime.current()
    shares_batches = current is not None and current.mesh.data_size != dist.get_world_size()
    if torch.is_grad_enabled() or shares_batches:
        given = bind_by_name(original, args, kwargs)
        part: Any = given["tensor"] if "tensor" in given else given.get("input_tensor", given.get("self"))
        is_of_all = given.get("group") in (None, dist.group.WORLD)
        if is_of_all and torch.is_grad_enabled() and part.requires_grad:
            check_gathered_examples()
            if original.__module__ == dist.distributed_c10d.__name__:
                _tell_of_lost_gradients()
        elif is_of_all and shares_batches and part.ndim > 1 and part.is_floating_point() and _is_in_training_pass():
            check_gathered_examples()
    return original(*args, **kwargs)


def _is_in_training_pass() -> bool:
    """Return whether a script gathers in the forward pass of a module that trains, as for a queue of negatives."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("hf_parallel.hooks."):
        frame = frame.f_back
    if frame is None or frame.f_globals.get("__name__", "").partition(".")[0] in LIBRARIES:
        return False
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "_call_impl" else None
        if isinstance(module, nn.Module) and module.training:
            return True
        frame = frame.f_back
    return False


@patch("torch.distributed.nn.functional:all_gather", "reads gradients that are not contiguous wrongly", copies=True)
def gather_parts_with_gradients(original: Callable, *args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
    """Gather as `gather_by_process` does, and hand back gradients as torch's own backward pass can receive them.

    It receives into tensors with the strides of the gradients, and gloo writes them in order of memory: what einsum
    leaves transposed would be mixed up.
    """
    parts = gather_by_process(original, *args, **kwargs)
    for part in parts:
        if part.requires_grad:
            part.register_hook(torch.Tensor.contiguous)
    return parts


def check_gathered_examples() -> None:
    """Refuse the gather of a loss that compares examples, where some are there twice.

    Contrastive losses (SimCSE, DPR, Tevatron, FlagEmbedding, ColPali), and queues of keys (MoCo), take
    `dist.get_world_size()` batches for different ones: with every negative there twice, a loss is larger by log(2).
    Those of a ragged last batch take them for batches of one size, too: repeated examples fill it, or are missing.
    """
    from accelerate.state import GradientState

    from hf_parallel.hooks.accelerate.shares import does_drop_last

    mesh, processes, state = runtime.mesh(), dist.get_world_size(), GradientState()
    if mesh.data_size != processes:
        sizes = {f"{axis}_size": mesh.config.sizes[axis] for axis in ("tp", "pp", "cp")}
        keys = ", ".join(f"{key}={size}" for key, size in sizes.items() if size > 1)
        why = f"a loss gathers {processes} batches, of which only {mesh.data_size} differ: examples count twice"
        works = f"dp_shard_size={processes}, or a loss that does not gather,"
        refuse(f"{keys} with torch.distributed.all_gather", why, works)
    if processes > 1 and state.remainder > 0 and not does_drop_last(state.active_dataloader):
        what = f"dataloader_drop_last=False with torch.distributed.all_gather over {processes} data ranks"
        why = (
            f"a loss compares the examples that it gathers, and only {state.remainder} of the last batch's "
            f"{state.active_dataloader.total_batch_size} are real"
        )
        refuse(what, why, "dataloader_drop_last=True, or drop_last=True of a loader of the script's own,")


def _tell_of_lost_gradients() -> None:
    """Say once that a gather without autograd leaves a loss 1/n of its gradients, as under DDP."""
    current = runtime.current()
    if current is not None and not current.loop.told_of_gathers and current.mesh.data_size > 1:
        current.loop.told_of_gathers = True
        ranks = current.mesh.data_size
        report.say(
            f"torch.distributed.all_gather hands no gradients on, and {ranks} data ranks average theirs: those of a "
            f"loss that compares gathered examples are 1/{ranks} of one process's, unless it is multiplied by the "
            "number of data ranks; torch.distributed.nn.functional.all_gather gives the whole gradients"
        )


def begin(model: nn.Module, call: str) -> None:
    """All ranks of the model are here, and compare their first batches once more."""
    assert_all_ranks(call)
    state = None if model is None else runtime.find_parallel_state(model)
    if state is not None:
        state.batches.begin()

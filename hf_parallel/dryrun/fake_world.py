"""A process group of any size in one process, and a model's weights as fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.spec import refuse


def materialise(model: nn.Module, device: torch.device | str = "cpu") -> None:
    """Memory for meta weights, fake in a dry run; modules that shared a parameter share one again."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    model.to_empty(device=device)
    for first, *others in names.values():
        for other in others:
            owner, _, leaf = other.rpartition(".")
            model.get_submodule(owner)._parameters[leaf] = model.get_parameter(first)


@contextlib.contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """This process as one of `size`, with collectives that leave tensors as they are.

    Raises:
        SpecError: it is part of a real world.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        refuse("dry run", "this process has a process group", do="run it in one that has none")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def fake_tensors_pass_as_real() -> Iterator[None]:
    """Let Transformers run what it runs on real tensors.

    It takes fake tensors for a traced graph and makes masks there that a training step does not need. And torch knows
    the shapes of grouped products in bf16 only: experts in fp32 take Transformers' own operation, which keeps as much.
    """
    from transformers.integrations import moe
    from transformers.utils import import_utils

    is_fake, can_group = import_utils.is_fake_tensor, moe._can_use_grouped_mm
    import_utils.is_fake_tensor = lambda tensor: False
    moe._can_use_grouped_mm = lambda tokens, weight, ends: weight.dtype == torch.bfloat16
    try:
        yield
    finally:
        import_utils.is_fake_tensor, moe._can_use_grouped_mm = is_fake, can_group

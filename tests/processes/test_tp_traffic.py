"""What tensor parallelism sends and copies: 16 bits under autocast, and nothing around a collective."""

import sys
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hf_parallel import parallelize
from hf_parallel.axes.tensor import region
from tests import models
from tests.counting import CountCollectives
from tests.distributed import run

_PLACES = ("hf_parallel/ranks/", "hf_parallel/axes/tensor/overlap.py")
_COPIES = {torch.ops.aten.clone.default, torch.ops.aten.copy_.default, torch.ops.aten.cat.default}


class CountCopies(TorchDispatchMode):
    """`counts`: copies that code of `ranks/` and overlapped products make, by function."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in _COPIES:  # but in `wait`: those of gloo
            frame: Any = sys._getframe(1)
            while frame is not None and torch.__path__[0] in frame.f_code.co_filename:
                frame = frame.f_back
            ours = any(place in frame.f_code.co_filename for place in _PLACES)
            if ours and frame.f_code.co_name != "wait":
                self.counts[frame.f_code.co_name] += 1
        return func(*args, **(kwargs or {}))


def step(rows: int, mode: Any, autocast: bool = False, spec: str = "tp=2") -> torch.Tensor:
    """The loss of a step whose forward and backward run inside `mode`."""
    model = parallelize(models.build("qwen3").train(), spec)
    ids = torch.arange(rows * 34).view(rows, 34) % models.VOCABULARY
    with mode:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
    return loss.detach()


def copies(rows: int, spec: str = "tp=2") -> dict[str, int]:
    counter = CountCopies()
    step(rows, counter, spec=spec)
    return dict(counter.counts)


def lowered() -> tuple[torch.Tensor, torch.Tensor, float]:
    """The loss with inputs as they are and cast first, and what of the bytes is sent of the second."""
    plain, cast = CountCollectives(), CountCollectives()
    with mock.patch.object(region, "cast_as_autocast", lambda tensor: tensor):
        before = step(3, plain, autocast=True)
    after = step(3, cast, autocast=True)
    return before, after, cast.sent / plain.sent


@pytest.mark.parametrize("rows", [1, 3])
def test_nothing_is_copied_around_collectives(rows):
    """But the split after the embedding, and what all-reduces of weights and of the loss must not change."""
    for found in run(copies, 2, rows):
        assert found == {"split_sequence": 1, "all_reduce": run(copies, 2, 1)[0]["all_reduce"]}


def test_products_are_summed_in_their_own_memory():
    """Without sequence parallelism gradients alone are copied, and two numbers per token of the loss."""
    layers = models.build("qwen3").config.num_hidden_layers
    of_gradients = layers * (2 + 2) + 1  # what enters attention and the MLP, two norms of heads; what enters the head
    for found in run(copies, 2, 3, "tp=2,sequence_parallel=false"):
        assert found == {"all_reduce": of_gradients + 2}


def test_halves_are_joined_for_gradients_of_weights_alone():
    """`tp_overlap`: one copy per row-parallel matrix and step, of the gradient that its weight's product reads."""
    joined = {"_gather_and_multiply": 2 * models.build("qwen3").config.num_hidden_layers}
    for plain, found in zip(run(copies, 2, 3), run(copies, 2, 3, "tp=2,tp_overlap=true"), strict=True):
        assert found.pop("all_reduce") <= plain.pop("all_reduce")
        assert found == {**plain, **joined}


def test_inputs_of_products_travel_as_these_read_them():
    """The forward pass is the same to the bit."""
    for before, after, share in run(lowered, 2):
        assert before == after
        assert share < 0.8, share

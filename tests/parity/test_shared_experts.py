"""Shared experts run while tokens travel to the others, and the model gets what they made."""

from typing import Any

import pytest
import torch.distributed as dist

from tests import models
from tests.context import batch
from tests.distributed import run
from tests.training import axes


def order_of_calls(spec: str) -> list[str]:
    """What happens in one forward and backward of a layer with experts."""
    import hf_parallel

    model = models.build("deepseek_moe", num_hidden_layers=2)
    hf_parallel.parallelize(model.train(), spec)
    happened: list[str] = []
    original = dist.all_to_all_single

    class Watched:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            happened.append("arrived")
            self.work.wait()

    def noted(*args: Any, **kwargs: Any) -> Any:
        happened.append("leave" if kwargs.get("async_op") else "exchange")
        work = original(*args, **kwargs)
        return Watched(work) if kwargs.get("async_op") else work

    dist.all_to_all_single = noted
    shared = model.model.layers[1].mlp.shared_experts
    shared.down_proj.register_forward_hook(lambda *_: happened.append("shared"))
    shared.gate_proj.register_full_backward_hook(lambda *_: happened.append("gradient of shared"))
    model(**batch("plain")).loss.backward()
    dist.all_to_all_single = original
    return happened


EXPECTED = [
    *("exchange", "leave", "shared", "arrived", "exchange"),  # counts, tokens, results
    *("exchange", "leave", "gradient of shared", "arrived"),
]


@pytest.mark.parametrize("spec", ["dp_shard=2,ep=2", "tp=2,ep=2,sequence_parallel=false"])
def test_meanwhile(spec):
    """Forward and backward, once each."""
    for happened in run(order_of_calls, axes(spec)["world"], spec):
        assert happened == EXPECTED


def kept_after_a_step(spec: str) -> list[bool]:
    """Of each layer: does it hold anything that nobody asked for?"""
    import hf_parallel

    model = models.build("deepseek_moe", num_hidden_layers=2)
    hf_parallel.parallelize(model.train(), spec)
    model(**batch("plain")).loss.backward()
    return [layer.mlp.shared_experts.done is not None for layer in model.model.layers if hasattr(layer.mlp, "experts")]


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_second_run_that_is_stopped_keeps_nothing(kind):
    """torch stops it once it has what the backward needs, before the model asks for what shared experts made."""
    for kept in run(kept_after_a_step, 2, f"dp_shard=2,ep=2,activation_checkpointing={kind}"):
        assert kept
        assert not any(kept)

"""Inputs of checkpointed layers kept in parts by tp ranks: the numbers of one process, and 1/tp of the bytes."""

import math
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from hf_parallel.ask.config import ParallelConfig, SpecError
from tests import activations, models
from tests.distributed import run
from tests.parity.test_recompute import trained
from tests.training import check_alone

SPECS = (
    "tp=2,sequence_parallel=false",
    "tp=2,pp=2,sequence_parallel=false,pipeline_schedule=1f1b",
    "tp=2,pp=2,sequence_parallel=false,pipeline_schedule=zbv_zero_bubble",
    "tp=2,dp_shard=2,sequence_parallel=false",
    "tp=2",
)
WAYS = ("full", "selective", "every:2")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("spec", SPECS)
def test_numbers_of_one_process(spec, way):
    if "zbv" in spec and way != "full":
        pytest.skip("recomputes in parts")
    check_alone(trained, f"{spec},activation_checkpointing={way},partition_activations=true", "llama")


def kept(spec: str) -> int:
    """Bytes that are there for the backward pass of a bf16 model whose layers are checkpointed."""
    from hf_parallel import parallelize

    model = models.build("llama", **activations.SIZES).to(torch.bfloat16).train()
    parallelize(model, f"{spec},activation_checkpointing=full")
    tokens = torch.arange(activations.BATCH * activations.LENGTH).view(activations.BATCH, -1) % models.VOCABULARY
    with activations.Alive() as alive:
        output = model(input_ids=tokens)
        found = min(_polled(lambda: alive.bytes))
    assert output.logits.requires_grad  # read last: gathering lets go of its buffers in its own time
    return found


def _polled(read: Callable[[], int], times: int = 20) -> Iterator[int]:
    """What `read` gives during one second: threads of gloo let go of a buffer some time after its collective."""
    for _ in range(times):
        time.sleep(0.05)
        yield read()


@pytest.mark.clock
@pytest.mark.parametrize("tp", [2, 4])
def test_kept_bytes(tp):
    """Of each layer's input, and nothing else is kept of a layer, a rank has its part."""
    specs = [f"tp={tp},sequence_parallel=false{more}" for more in ("", ",partition_activations=true")]
    whole, parts = (run(kept, tp, spec) for spec in specs)
    inputs = 2 * math.prod((activations.BATCH, activations.LENGTH, activations.SIZES["hidden_size"]))
    saved = activations.SIZES["num_hidden_layers"] * inputs * (1 - 1 / tp)
    assert [one - other for one, other in zip(whole, parts, strict=True)] == [saved] * tp


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("partition_activations=true", ["tp_size=1", "tp_size=2"]),
        ("tp=2,partition_activations=true", ["activation_checkpointing=none", "activation_checkpointing=full"]),
        ("tp=2,sequence_parallel=true,activation_checkpointing=full", ["sequence_parallel=true"]),
        ("tp=2,activation_checkpointing=full,activation_offload=true", ["activation_offload=true"]),
        ("tp=2,activation_checkpointing=full,compile=regional", ["compile=regional"]),
    ],
)
def test_refused_by_name(spec, words):
    asked = spec if "partition" in spec else f"{spec},partition_activations=true"
    with pytest.raises(SpecError) as caught:
        ParallelConfig.parse(asked)
    for word in ("partition_activations=true", *words):
        assert word in str(caught.value)

"""Layers compiled by themselves: equal ones once, without breaks, with the numbers of one process without."""

import pytest
import torch
from torch._dynamo.utils import counters

from hf_parallel import parallelize
from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.axes import compile as compiling
from hf_parallel.ranks.mesh import stored
from tests import models
from tests.distributed import run, run_alone

ROWS, LENGTH = 4, 33


def trained(spec: str | None, rank: int = 0, **changes) -> tuple[float, int, int]:
    """The loss after two steps, how many graphs there are, and how many breaks."""
    compiling.BACKEND = "aot_eager"  # graphs as inductor gets them, without a compiler
    model = models.build("llama", **changes).train()
    if spec is not None:
        parallelize(model, spec)
    mesh = model._hf_parallel.mesh if spec is not None else None
    size, place = (1, 0) if mesh is None else (mesh.data_size, mesh.data_rank)
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH).mul(7) % models.VOCABULARY
    own = ids.chunk(size)[place]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        model(input_ids=own, labels=own).loss.backward()
        optimizer.step()
    norm = next(
        stored(p) for name, p in model.named_parameters() if "layers." in name and name.endswith("norm.weight")
    )
    assert norm.isfinite().all()
    loss = model(input_ids=own, labels=own).loss.detach()
    if size > 1:
        torch.distributed.all_reduce(loss)
    return loss.item() / size, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


@pytest.mark.parametrize("spec", ["dp_shard=2", "pp=2", "dp_replicate=2,activation_checkpointing=full"])
def test_equal_layers_share_a_graph(spec):
    expected, _, _ = run_alone(trained, None)
    for loss, graphs, breaks in run(trained, 2, f"{spec},compile=regional"):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert (graphs, breaks) == (1, 0)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("tp=2,compile=regional", ("compile=regional", "tp_size=2", "tp_size=1 works")),
        (
            "pp=2,pipeline_schedule=zbv_zero_bubble,compile=regional",
            ("zbv_zero_bubble", "pipeline_schedule=1f1b works"),
        ),
    ],
)
def test_what_cannot_be_compiled_is_refused_by_name(spec, words):
    with pytest.raises(SpecError) as caught:
        ParallelConfig.parse(spec)
    assert [word for word in words if word not in str(caught.value)] == []


def prepared() -> tuple[bool, int]:
    """Is the model still the script's, where Accelerate was told to compile; and how many graphs one step makes."""
    from accelerate import Accelerator

    from hf_parallel.hooks import activation

    activation.activate("dp_shard=2", source="test")
    model = models.build("llama").train()
    accelerator = Accelerator(cpu=True, dynamo_backend="aot_eager")
    same = accelerator.prepare(model) is model
    ids = torch.arange(22).view(2, 11)
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    return same, counters["stats"]["unique_graphs"]


def test_accelerate_compiles_layers_and_not_the_model():
    """As for Trainer's `torch_compile=True`, which is a setting of its Accelerator."""
    assert run(prepared, 2, init=False) == [(True, 1)] * 2

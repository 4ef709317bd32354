"""`tp_overlap=true` of compiled layers: products and collectives become single operations, with one process's numbers.

Symmetric memory needs GPUs. Here torch's own stand-ins for the fused operations, a collective and products one after
another, run on the CPU, and inductor's pass believes that memory is shared.
"""

import contextlib
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop

from hf_parallel import parallelize
from hf_parallel.axes import compile as compiling
from hf_parallel.axes.graphs import FuseProducts, share_memory
from hf_parallel.ranks.mesh import get_stored
from tests import models
from tests.distributed import RankFailure, run, run_alone_once

LENGTHS = 33, 27, 20  # the second makes lengths symbols of the graph


@contextlib.contextmanager
def memory_as_if_shared():
    """Let the fused operations run, by torch's stand-ins, on tensors of the CPU."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric._fused_matmul_reduce_scatter_fallback, "CPU")
    nccl = mock.patch("torch.distributed.is_nccl_available", return_value=True)
    reach = mock.patch("hf_parallel.axes.tensor.axis.find_memory_obstacle", return_value=None)
    fresh = torch._inductor.config.patch(force_disable_caches=True)
    with symmetric._test_mode(), nccl, reach, fresh:
        yield


class FusedGraphs(FuseProducts):
    """Counts what each graph holds after the pass."""

    def __init__(self) -> None:
        self.graphs = []

    def __call__(self, graph) -> None:
        super().__call__(graph)
        found = Counter()
        for node in graph.nodes:
            kind = str(node.target)
            found["sent apart"] += kind.startswith(("_c10d_functional.all_gather", "_c10d_functional.reduce_scatter"))
            found["scatters"] += "fused_matmul_reduce_scatter" in kind
            if "fused_all_gather_matmul" in kind:
                found["gathers"] += 1
                found["products of gathers"] += len(node.args[1])
        self.graphs.append(dict(found))

    def compile(self, graph, inputs):
        """Compile as inductor does, up to the code."""
        self(graph.graph)
        graph.recompile()
        return boxed_nop(graph, inputs)


def trained(
    spec: str | None, kind: str, backend: str, lengths: tuple[int, ...] = LENGTHS
) -> tuple[list[float], list[dict]]:
    """Return the loss of each step and last the sum of a norm's weights; what each graph holds."""
    seen = FusedGraphs()
    steps = aot_autograd(fw_compiler=seen.compile, bw_compiler=seen.compile, keep_inference_input_mutations=True)
    compiling.BACKEND = steps if backend == "graphs" else backend
    model = models.build(kind).train()
    with memory_as_if_shared(), mock.patch("hf_parallel.axes.graphs.FuseProducts", return_value=seen):
        if spec is not None:
            parallelize(model, spec)
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
        for length in lengths:
            ids = torch.arange(4 * length).view(4, length).mul(7) % models.VOCABULARY
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        norm = next(p for name, p in model.named_parameters() if "norm" in name or "ln_" in name)
        return [*losses, get_stored(norm).double().sum().item()], seen.graphs


@pytest.mark.parametrize(
    ("kind", "products"),
    [
        ("llama", 5),  # q, k, v, gate, up
        ("gpt2", 2),  # of q, k and v at once; with biases
        ("qwen2", 5),
        ("phi3", 2),
    ],
)
def test_all_collectives_of_a_layer_are_fused_with_products(kind, products):
    """Its 4 of each pass: also sums of the gradients of what several layers read."""
    expected, _ = run_alone_once(trained, None, kind, "graphs")
    for numbers, graphs in run(trained, 2, "tp=2,compile=regional", kind, "graphs"):
        assert numbers == pytest.approx(expected, rel=1e-5)
        fixed, lengths = graphs[:2], graphs[2:]
        assert fixed == lengths  # in graphs of any length as in that of the first
        forward, backward = fixed
        both = {"sent apart": 0, "gathers": 2, "scatters": 2}
        assert forward == {**both, "products of gathers": products}
        assert backward == {**both, "products of gathers": 2}


@pytest.mark.parametrize("more", ["", ",activation_checkpointing=selective"])
def test_inductor_runs_fused_graphs(more):
    """It gathers inputs again for the gradients of weights, of which they are the second factor: sent apart."""
    expected, _ = run_alone_once(trained, None, "llama", "inductor", LENGTHS[:1] * 2)
    spec = f"tp=2,tp_overlap=true,compile=regional{more}"
    for numbers, graphs in run(trained, 2, spec, "llama", "inductor", LENGTHS[:1] * 2, timeout=500):
        assert numbers == pytest.approx(expected, rel=1e-5)
        assert graphs[0] == {"sent apart": 0, "gathers": 2, "scatters": 2, "products of gathers": 5}
        assert graphs[1] == {"sent apart": 2, "gathers": 2, "scatters": 2, "products of gathers": 2}


def refused(spec: str) -> None:
    parallelize(models.build("llama"), spec)


def share_on_first_rank() -> str:
    group, errors = torch.distributed.group.WORLD, [None, RuntimeError("no link")]
    fails = mock.patch.object(symmetric, "get_symm_mem_workspace", side_effect=errors[group.rank()])
    with fails, pytest.raises(NotImplementedError) as caught:
        share_memory(group, group)
    return str(caught.value)


def test_memory_that_one_rank_cannot_share_is_an_error_on_all():
    for message in run(share_on_first_rank, 2):
        assert [word for word in ("tp_overlap=true", "no link", "tp_overlap=false works") if word not in message] == []


def test_without_symmetric_memory_it_is_refused():
    with pytest.raises(RankFailure) as caught:
        run(refused, 2, "tp=2,tp_overlap=true,compile=regional")
    words = ("tp_overlap=true", "symmetric memory", "tp_overlap=false works")
    assert [word for word in words if word not in str(caught.value)] == []

"""Layers compiled by themselves: equal ones once, without breaks, with the numbers of one process without."""

import contextlib
from collections import Counter
from unittest import mock

import pytest
import torch
from torch._dynamo.utils import counters

from hf_parallel import parallelize
from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.axes import compile as compiling
from hf_parallel.axes.tensor import axis
from hf_parallel.ranks import observed
from hf_parallel.ranks.mesh import get_stored
from tests import activations, models
from tests.distributed import RankFailure, run, run_alone_once

ROWS, LENGTH = 4, 33


def trained(
    spec: str | None, kind: str = "llama", backend: str = "aot_eager", as_in_graphs: bool = False, **changes
) -> tuple[float, int, int, Counter]:
    """The loss after two steps, how many graphs there are, and how many breaks; collectives of the last step.

    `as_in_graphs`: gradients of small weights are summed over tp ranks one by one outside of a graph, too.
    """
    compiling.BACKEND = backend  # aot_eager: graphs as inductor gets them, without a compiler
    model = models.build(kind, **changes).train()
    if spec is not None:
        with mock.patch.object(axis, "sum_by_layer") if as_in_graphs else contextlib.nullcontext():
            parallelize(model, spec)
    mesh = model._hf_parallel.mesh if spec is not None else None
    size, place = (1, 0) if mesh is None else (mesh.data_size, mesh.data_rank)
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH).mul(7) % models.VOCABULARY
    own = ids.chunk(size)[place]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(2):
        optimizer.zero_grad()
        with heard() as calls:
            model(input_ids=own, labels=own).loss.backward()
        optimizer.step()
    norms = (get_stored(p) for name, p in model.named_parameters() if "norm" in name or "ln_" in name)
    assert next(norms).isfinite().all()
    loss = model(input_ids=own, labels=own).loss.detach()
    if size > 1:
        torch.distributed.all_reduce(loss, group=mesh.data_group)
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return loss.item() / size, graphs, breaks, calls


class Heard:
    """Counts collectives by kind."""

    def __init__(self) -> None:
        self.calls = Counter()

    def begin(self, call) -> None:
        self.calls[call.kind] += 1

    def end(self, call, work) -> None:
        pass

    def waiting(self, work) -> None:
        pass

    def waited(self, work) -> None:
        pass


@contextlib.contextmanager
def heard():
    listener = Heard()
    observed.listen(listener)
    yield listener.calls
    observed.unlisten(listener)


FAMILIES = ("gpt2", "opt", "qwen2", "qwen3", "phi3", "gemma2", "gpt_neox", "falcon", "bloom")


@pytest.mark.parametrize(
    ("spec", "ranks", "kind"),
    [
        ("dp_shard=2", 2, "llama"),
        ("pp=2", 2, "llama"),
        ("dp_replicate=2,activation_checkpointing=full", 2, "llama"),
        ("dp_shard=2,activation_checkpointing=selective", 2, "gpt2"),
        ("tp=2", 2, "llama"),
        ("tp=2,sequence_parallel=false", 2, "qwen2"),
        ("tp=2,activation_checkpointing=full", 2, "llama"),
        ("tp=2,activation_checkpointing=selective", 2, "llama"),
        ("tp=2,activation_checkpointing=selective,sequence_parallel=false", 2, "gemma2"),
        ("tp=4", 4, "gpt2"),
        ("tp=4", 4, "llama"),  # more ranks than key/value heads
        ("tp=2,dp_shard=2", 4, "llama"),
        ("tp=2,dp_shard=2,activation_checkpointing=selective", 4, "qwen3"),
        ("tp=2,pp=2", 4, "llama"),
        ("tp=2,pp=2,activation_checkpointing=selective", 4, "llama"),
        ("tp=2,dp_replicate=2,activation_checkpointing=every:2", 4, "qwen3"),
        *(("tp=2", 2, kind) for kind in FAMILIES),
    ],
)
def test_equal_layers_share_a_graph_that_sends_what_they_send_outside(spec, ranks, kind):
    """A graph may find that two layers gather the same input; a checkpoint runs a compiled layer to its end."""
    expected, *_ = run_alone_once(trained, None, kind)
    _, _, _, plain = run(trained, ranks, spec, kind, as_in_graphs=True)[0]
    again = 4 if "tp=" in spec and "activation_checkpointing" in spec and "selective" not in spec else 0
    ranks_found = run(trained, ranks, f"{spec},compile=regional", kind)
    for loss, graphs, breaks, _ in ranks_found:
        assert loss == pytest.approx(expected, rel=1e-5)
        assert (graphs, breaks) == (1, 0)
    calls = ranks_found[0][3]
    more = {name: calls[name] - plain[name] for name in plain | calls if calls[name] > plain[name]}
    assert more.keys() <= ({"reduce_scatter"} if again else set())
    assert sum(more.values()) <= again


def graphs_of_batches(spec: str, rows: tuple[int, ...]) -> tuple[list[float], int]:
    """The losses of batches of these numbers of sequences, and how many graphs they make."""
    compiling.BACKEND = "aot_eager"
    model, losses = models.build("llama").train(), []
    if spec:
        parallelize(model, spec)
    for number in rows:
        ids = torch.arange(number * LENGTH).view(number, LENGTH).mul(7) % models.VOCABULARY
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
    return losses, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("spec", ["tp=2", "tp=2,activation_checkpointing=selective"])
def test_batches_of_any_size_share_a_graph(spec):
    """One of the first size, one of all others: those of odd and of even sizes were two."""
    rows = (4, 3, 6, 5, 2)
    expected, _ = run_alone_once(graphs_of_batches, "", rows)
    for losses, graphs in run(graphs_of_batches, 2, f"{spec},compile=regional", rows):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert graphs == 2


def kept_in_graphs(way: str, backend: str = "aot_eager") -> float:
    """Bytes that a compiled layer of `tests.activations` keeps for the backward pass."""
    compiling.BACKEND = backend
    model = models.build("llama", **activations.SIZES).to(torch.bfloat16).train()
    parallelize(model, f"tp=2,compile=regional,lean_loss=false,activation_checkpointing={way}")
    rows, length = activations.BATCH, activations.LENGTH
    ids = torch.arange(rows * length).view(rows, length) % models.VOCABULARY
    model(input_ids=ids).logits.sum().backward()  # compiles
    saved, layers = activations.SavedBytes(list(model.parameters())), model.model.layers
    layers[0].register_forward_pre_hook(lambda *_: saved.__enter__() and None)
    layers[-1].register_forward_hook(lambda *_: saved.__exit__())
    model(input_ids=ids)
    return saved.total / len(layers)


def test_selective_graphs_keep_what_selective_layers_keep():
    """Products, attention and sums over ranks; a tenth is what two operations outside of a graph keep twice."""
    outside, everything = run(activations.kept_by_layers, 2, "tp=2", "selective")[0], run(kept_in_graphs, 2, "none")[0]
    kept = run(kept_in_graphs, 2, "selective")[0]
    assert 0.9 * outside <= kept <= outside
    assert kept < 0.8 * everything


@pytest.mark.parametrize(
    ("spec", "ranks", "kind"),
    [
        ("cp=2", 2, "llama"),
        ("cp=2,context_parallel=ulysses", 2, "qwen3"),
        ("cp=2,context_parallel=allgather,activation_checkpointing=full", 2, "gemma2"),
        ("tp=2,cp=2", 4, "llama"),
    ],
)
def test_attention_over_ranks_is_the_only_break(spec, ranks, kind):
    expected, *_ = run_alone_once(trained, None, kind)
    _, _, _, plain = run(trained, ranks, spec, kind, as_in_graphs=True)[0]
    loss, graphs, _, calls = run(trained, ranks, f"{spec},compile=regional", kind)[0]
    assert loss == pytest.approx(expected, rel=1e-5)
    assert graphs <= 8  # the parts of a frame at a break: of the layer, of its attention; of all layers together
    assert all(calls[name] <= count for name, count in plain.items())  # tp keeps what enters at a break, whole
    assert calls.keys() == plain.keys()


def check_experts_between_graphs(spec: str, ranks: int, kind: str) -> None:
    """Seven layers have as many graphs as three: one up to the router, one after the experts; a dense layer one."""
    expected, *_ = run_alone_once(trained, None, kind, num_hidden_layers=7)
    _, _, _, plain = run(trained, ranks, spec, kind, num_hidden_layers=7)[0]
    ran = run(trained, ranks, f"{spec},compile=regional", kind, timeout=500, num_hidden_layers=7)
    for loss, graphs, *_ in ran:
        assert loss == pytest.approx(expected, rel=1e-5)
        assert 2 <= graphs <= 7
    assert ran[0][3].get("all_to_all") == plain.get("all_to_all")
    assert ran[0][3].keys() == plain.keys()


def test_experts_run_between_graphs_that_layers_share():
    check_experts_between_graphs("dp_shard=2,ep=2", 2, "qwen3_moe")


@pytest.mark.parametrize(
    ("spec", "ranks", "kind"),
    [
        ("dp_shard=2", 2, "mixtral"),
        ("dp_shard=2,ep=2,activation_checkpointing=full", 2, "mixtral"),
        ("dp_shard=2,ep=2,activation_checkpointing=selective", 2, "qwen3_moe"),
        ("dp_shard=2,ep=2,activation_checkpointing=selective", 2, "deepseek_moe"),  # shared experts, a dense layer
        ("tp=2", 2, "mixtral"),
        ("tp=2,ep=2", 2, "qwen3_moe"),
        ("tp=2,dp_shard=2,ep=4,sequence_parallel=false", 4, "qwen3_moe"),
        ("pp=2,dp_shard=2,ep=2", 4, "qwen3_moe"),
    ],
)
def test_experts_run_between_graphs_on_other_layouts(spec, ranks, kind):
    check_experts_between_graphs(spec, ranks, kind)


@pytest.mark.parametrize("spec", ["tp=2,compile=regional", "tp=2,compile=regional,activation_checkpointing=selective"])
def test_inductor_takes_the_graph(spec):
    expected, *_ = run_alone_once(trained, None)
    for loss, graphs, breaks, _ in run(trained, 2, spec, "llama", "inductor", timeout=500):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert (graphs, breaks) == (1, 0)


@pytest.mark.parametrize(
    ("spec", "kind", "changes", "words"),
    [
        (
            "tp=2,sequence_parallel=false",
            "llama",
            {"attention_dropout": 0.1},
            ("compile=regional", "dropout", "a dropout of 0 works"),
        ),
    ],
)
def test_layers_that_no_graph_holds_are_refused(spec, kind, changes, words):
    with pytest.raises(RankFailure) as caught:
        run(trained, 2, f"{spec},compile=regional", kind, **changes)
    assert [word for word in words if word not in str(caught.value)] == []


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (
            "tp=2,tp_overlap=true,sequence_parallel=false,compile=regional",
            ("tp_overlap=true", "tp_overlap=false works"),
        ),
        ("tp=4,tp_mesh=2x2,compile=regional", ("tp_mesh=2x2", "tp=4 without tp_mesh works")),
        ("tp=2,precision=fp8,compile=regional", ("precision=fp8", "precision=auto works")),
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


def prepared(spec: str, backend: str) -> tuple[bool, int]:
    """Is the model still the script's, where Accelerate was told to compile; and how many graphs one step makes."""
    from accelerate import Accelerator

    from hf_parallel.hooks import activation

    activation.activate(spec, source="test")
    model = models.build("llama").train()
    accelerator = Accelerator(cpu=True, dynamo_backend=backend)
    same = accelerator.prepare(model) is model
    ids = torch.arange(22).view(2, 11)
    accelerator.backward(model(input_ids=ids, labels=ids).loss)
    return same, counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_shard=2,activation_checkpointing=selective"])
def test_accelerate_compiles_layers_and_not_the_model(spec):
    """As for Trainer's `torch_compile=True`, which is a setting of its Accelerator."""
    assert run(prepared, 2, spec, "aot_eager", init=False) == [(True, 1)] * 2


def test_a_compiler_that_cuts_graphs_by_itself_is_refused():
    with pytest.raises(RankFailure) as caught:
        run(prepared, 2, "dp_shard=2,activation_checkpointing=selective", "eager", init=False)
    words = ("activation_checkpointing=selective", "compiler eager", "activation_checkpointing=full works")
    assert [word for word in words if word not in str(caught.value)] == []

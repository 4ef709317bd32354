"""Which variant `context_parallel=auto` takes: by heads, links, length and documents, and what it says of it."""

import pytest

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.axes.context import packs
from hf_parallel.axes.context.choose import ContextFacts, choose_by_cost, choose_variants
from tests import models

LLAMA_8B, LLAMA_70B, GPT_7B = ((32, 8), 128), ((64, 8), 128), ((32, 32), 128)


def of(ranks, tokens, seen=None, model=LLAMA_8B, tp=1, node=8):
    return choose_by_cost(ranks, *model, tp, node).of(tokens, seen or tokens)


@pytest.mark.parametrize(
    ("ranks", "by_length"),
    [
        (2, {300: "ring", 131072: "ring"}),
        (4, {300: "allgather", 8192: "ring", 131072: "ring"}),
        (8, {100: "allgather", 8192: "ulysses", 131072: "ulysses"}),
        (64, {300: "allgather", 8192: "hybrid:8", 1048576: "hybrid:8"}),
    ],
)
def test_length_and_links(ranks, by_length):
    """Few messages for short rows, a ring behind the attention of long ones, unless its bytes slow that too much.

    Gradients of keys travel in fp32, so that on 8 ranks Ulysses sends a fifth of a ring's bytes. Heads are shared
    inside a node, rings lie between nodes.
    """
    assert {length: of(ranks, length) for length in by_length} == by_length


def test_documents_count_and_not_rows():
    """A row of 128 k in documents of 512 has little attention to hide a ring behind."""
    assert of(8, 131072, model=LLAMA_70B) == "ring"
    assert of(8, 131072, 512, model=LLAMA_70B) == "ulysses"
    rows = packs.find((1, 33), None, None, None) + [packs.Row(33, (20, 13))]
    assert packs.compute_mean_length(rows) == (33 * 33 + 20 * 20 + 13 * 13) / 66


def test_heads():
    """As many key heads as query heads are too much for a ring; heads that do not divide leave no other way."""
    assert {of(8, length, model=GPT_7B) for length in (300, 8192, 131072)} == {"ulysses"}
    assert "ulysses" not in choose_by_cost(4, (6, 3), 64, 1, 8).ways
    assert of(8, 131072, tp=8) == "ring"
    assert choose_by_cost(8, *LLAMA_8B, 8, 8).ways == choose_by_cost(8, (4, 1), 128, 1, 1).ways


def chosen(facts, **keys):
    found, why = choose_variants(ParallelConfig(**keys), facts)
    return found.ways, why


def test_what_it_says(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    facts = ContextFacts(None, (32, 8), True)
    ways, why = chosen(facts, cp_size=4)
    assert ways == ("ring", "ulysses", "allgather")
    assert why.startswith("allgather, from documents of 512 tokens ulysses, from documents of 2,048 tokens ring: ")
    assert chosen(facts, cp_size=8) == (("ulysses", "allgather"), "allgather, from documents of 256 tokens ulysses")
    assert chosen(facts, cp_size=8, context_parallel="ulysses") == (("ulysses",), None)
    ways, why = chosen(ContextFacts(None, (32, 8), True, windows=(4096,)), cp_size=8)
    assert ways == ("ring",)
    assert "4096 tokens" in why
    ways, why = chosen(ContextFacts(None, (32, 8), True, dense="attention_dropout=0.1"), cp_size=8)
    assert ways == ("ulysses",)
    assert "attention_dropout=0.1" in why
    with pytest.raises(SpecError, match=r"attention_dropout=0.1 .*cp_size=3"):
        chosen(ContextFacts(None, (3, 3), True, dense="attention_dropout=0.1"), cp_size=4)


def test_the_planner_reckons_with_the_same():
    from hf_parallel.planner.candidates import Goal, choose_context_of, make_config, to_layout
    from hf_parallel.planner.hardware import make_cluster
    from hf_parallel.planner.shape import shape_of

    for gpus, length in ((8, 8192), (8, 131072), (64, 8192)):
        goal = Goal(shape_of(models.LLAMA_8B), make_cluster("h100-80gb", gpus), length, 1)
        assert choose_context_of(make_config(cp_size=gpus), goal, 1) == of(gpus, length)
        assert choose_context_of(make_config(cp_size=gpus, context_parallel="ring"), goal, 1) == "ring"
        assert to_layout(make_config(cp_size=gpus, context_parallel="ulysses")).context == "ulysses"

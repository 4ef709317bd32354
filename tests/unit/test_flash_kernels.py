"""Rings, packs and windows through the flash kernels of a GPU, which stand-ins of the same signatures compute."""

import pytest
import torch

from hf_parallel.axes.context import packs
from hf_parallel.axes.context.flash import PACKAGES, TORCH
from hf_parallel.axes.context.kernels import Scores
from hf_parallel.axes.context.ring import pick
from hf_parallel.axes.context.tiled import TILES
from hf_parallel.axes.context.tiles import Span, make_tiles_of
from tests.flash_kernels import seen, standing_in
from tests.processes import test_context_attention as whole
from tests.refusals import pattern_of_refusal

LIMITS = [(0, float("inf")), (0, 3), (0, 20), (-4, 4), (-float("inf"), float("inf")), (-2, 2)]
PIECES = [(0, 9), (9, 4), (13, 30), (43, 5), (50, 1)]


def test_a_window_counted_from_the_ends_is_the_band():
    """Of any piece with any other: what the kernel lets a query see is what lies within the limits."""
    for low, high in LIMITS:
        for q in (Span(0, length, start) for start, length in PIECES):
            for k in (Span(0, length, start) for start, length in PIECES):
                wanted = torch.arange(q.start, q.start + q.length)[:, None] - torch.arange(k.start, k.start + k.length)
                wanted = (wanted >= low) & (wanted <= high)
                found = torch.zeros_like(wanted)
                for call in packs.make_calls(
                    [make_tiles_of(0, (q,), (k,), low, high, whole=True)], 1, 60, torch.device("cpu")
                ):
                    (left, right), (of_q, of_k) = call.window, call.ends
                    assert left >= -1
                    assert right >= -1
                    found[call.queries, call.keys] = seen(of_q, of_k, call.longest[1], call.causal, left, right)
                    assert found[call.queries].any(1).all()  # who sees nothing would have no log-sum-exp
                assert torch.equal(found, wanted), (q, k, low, high)


def test_documents_are_one_call():
    """Of a pack of any number of documents: own keys are one call, those of others too; with a window some more."""
    rows = whole.layout((700, 33, 1900, 260, 1204, 8, 77), 4)
    device = torch.device("cpu")
    assert [[len(rows.calls(q, k, 0, float("inf"), device)) for k in range(4)] for q in range(4)] == [[1] * 4] * 4
    assert len(rows.tiles(1, 1, 0, float("inf"))) == 7
    lone = whole.layout((4096,), 4)
    (call,) = lone.calls(2, 0, 0, float("inf"), device)
    assert (call.queries, call.keys, call.window) == (slice(0, 1024), slice(0, 512), packs.ALL)


def test_who_computes_what():
    """Here tiles; a package that is named and cannot is refused by name."""
    q = torch.empty(1, 2, 3, 8)
    assert pick(q, Scores(), "auto") is TILES
    with pytest.raises(
        NotImplementedError, match=pattern_of_refusal("attention=flash_attention_2", 8, works="attention=auto")
    ):
        pick(q, Scores(), "flash_attention_2")
    with standing_in():
        assert pick(q, Scores(), "sdpa") is TORCH
        assert pick(q, Scores(cap=2.0), "auto") is TILES
        assert pick(q, Scores(cap=2.0), "flash_attention_3") is PACKAGES["flash_attention_3"]

"""Attention over ranks against attention with a matrix of scores: outputs and gradients, for every kind of mask."""

import weakref

import pytest
import torch
import torch.distributed as dist

from hf_parallel.axes.context import packs, tiles
from hf_parallel.axes.context.attention import Cut, Exchanged, join, run_context_attention, take
from hf_parallel.axes.context.kernels import Scores
from hf_parallel.axes.context.layout import Layout, Shape, compute_local_length, deal_documents
from tests.distributed import run

ROWS, LENGTH, HEADS, KV_HEADS, WIDTH = 2, 33, 4, 2, 8
PACKS = ((5, 11, 2, 14, 1), (20, 13))


def padding(kind):
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    if kind == "holes":
        mask[0, 7:9] = 0
    else:
        mask[0, :5], mask[1, 20:] = 0, 0
    return mask


CAP = 1.5  # scores are of size 1
#: Packed? causal? window? sinks? which padding?
CASES = [
    (False, True, None, False, None),
    (False, False, None, False, None),
    (False, True, 5, True, None),
    (True, True, None, False, None),
    (True, True, 4, True, None),
    (False, True, None, False, "ends"),
    (False, True, 6, False, "ends"),
    (False, False, None, False, "ends"),
    (False, False, 4, False, None),
    (False, True, None, True, "holes"),
]


def groups(variant):
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if variant == "hybrid":
        rings, heads = ([dist.new_group(g) for g in pairs] for pairs in (([0, 2], [1, 3]), ([0, 1], [2, 3])))
        return Shape(2, 2), Exchanged(rings[rank % 2], heads[rank // 2], False)
    everyone = dist.group.WORLD
    if variant == "ulysses":
        return Shape(1, ranks), Exchanged(None, everyone, False)
    return Shape(ranks, 1), Exchanged(everyone, None, variant == "allgather")


def visible(case):
    packed, causal, window, _, padded = case
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    seen = torch.ones(ROWS, LENGTH, LENGTH, dtype=torch.bool)
    if causal:
        seen &= distance >= 0
    if window:
        seen &= distance.abs() < window
    if packed:
        number = torch.stack([torch.arange(len(p)).repeat_interleave(torch.tensor(p)) for p in PACKS])
        seen &= number[:, :, None] == number[:, None]
    real = torch.ones(ROWS, LENGTH, dtype=torch.bool) if padded is None else padding(padded).bool()
    return seen & real[:, None], real[..., None, None]


def attend_exactly(q, k, v, hidden, cap, sinks):
    """Attention with a matrix of scores, all of it in the dtype of the queries."""
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], 1) for one in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    scores = scores if cap is None else torch.tanh(scores / cap) * cap
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : k.shape[2]] @ v


def gap(case, shape, exchanged, cap):
    """The largest difference in outputs and gradients; a soft cap of scores is one more kind of each case."""
    packed, causal, window, sunk, padded = case
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(ROWS, LENGTH, n, WIDTH, generator=generator, requires_grad=True)
        for n in (HEADS, KV_HEADS, KV_HEADS)
    ]
    gradient = torch.randn(ROWS, LENGTH, HEADS, WIDTH, generator=generator)
    sinks = torch.randn(HEADS, generator=generator, requires_grad=True) if sunk else None
    seen, real = visible(case)
    exact = [t.detach().double().requires_grad_() for t in whole]  # in fp32 it would be as far off as what it judges
    exact_sinks = None if sinks is None else sinks.detach().double().requires_grad_()
    q, k, v = (t.transpose(1, 2) for t in exact)
    expected = attend_exactly(q, k, v, ~seen[:, None], cap, exact_sinks).transpose(1, 2)
    expected.backward(gradient.double() * real)

    positions = torch.stack([torch.cat([torch.arange(n) for n in p]) for p in PACKS]) if packed else None
    rows = packs.find((ROWS, LENGTH), None if padded is None else padding(padded), positions)
    layout = Layout(rows, shape, compute_local_length(LENGTH, shape.size))
    rank, everyone = dist.get_rank(), dist.group.WORLD
    own = [take(t.detach(), layout, rank).requires_grad_() for t in whole]
    own_sinks = sinks.detach().clone().requires_grad_() if sunk else None
    module = torch.nn.Module()
    module.is_causal = causal
    q, k, v = (t.transpose(1, 2) for t in own)
    out, _ = run_context_attention(
        module, q, k, v, Cut(layout, exchanged), s_aux=own_sinks, sliding_window=window, softcap=cap
    )
    out.backward(take(gradient * real, layout, rank))
    gaps = [((join(out.detach(), layout, everyone) - expected) * real).abs().max()]
    gaps += [(join(a.grad, layout, everyone) - b.grad).abs().max() for a, b in zip(own, exact, strict=True)]
    if sunk:
        dist.all_reduce(own_sinks.grad)
        gaps.append((own_sinks.grad - exact_sinks.grad).abs().max())
    return float(torch.stack(gaps).max())


def gaps(variants, square):
    tiles.SQUARE = square
    found = {}
    for variant in variants:
        shape, exchanged = groups(variant)
        for cap in (None, CAP):
            found.update({(variant, cap, case): gap(case, shape, exchanged, cap) for case in CASES})
    return found


def halves(dtype):
    """The gradients of 16-bit queries, keys and values by Ulysses and by a ring, a row of which has none."""
    found = []
    for variant in ("ulysses", "ring"):
        shape, exchanged = groups(variant)
        layout = Layout(packs.make_unpacked_rows(ROWS, LENGTH), shape, compute_local_length(LENGTH, shape.size))
        generator = torch.Generator().manual_seed(0)
        whole = [torch.randn(ROWS, LENGTH, HEADS, 16, generator=generator).to(dtype) for _ in range(4)]
        whole[3][0, 20:] = 0
        *own, gradient = (take(one, layout, dist.get_rank()) for one in whole)
        own = [one.requires_grad_() for one in own]
        q, k, v = (one.transpose(1, 2) for one in own)
        run_context_attention(torch.nn.Module(), q, k, v, Cut(layout, exchanged))[0].backward(gradient)
        found.append(torch.stack([join(one.grad, layout, dist.group.WORLD) for one in own]).float())
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_output_that_is_kept_once_is_as_good_in_16_bits(dtype):
    """A few of their steps apart: outputs are rounded, and so is what stands for them."""
    for ours, theirs in run(halves, 2, dtype):
        assert (ours - theirs).abs().max() <= 4 * torch.finfo(dtype).eps * theirs.abs().max()


def in_order(variant):
    """What one forward and backward does, in its order: starts to send, waits for keys, attends to a rank's keys."""
    from hf_parallel.axes.context import ring

    done, shape, exchanged = [], *groups(variant)

    class Noted(ring.Exchange):
        def __init__(self, *given):
            done.append("start")
            super().__init__(*given)

        def wait(self):
            done.append("wait")
            return super().wait()

    class Attended(ring.Ring):
        def tiles(self, keys):
            done.append(f"keys of {(self.rank - keys) % self.size} before")
            return super().tiles(keys)

    ring.Exchange = Noted
    rows = Layout(packs.make_unpacked_rows(1, 24), shape, 24 // shape.size)
    q, k, v = (torch.randn(1, 2, 24 // shape.size, 8, requires_grad=True) for _ in range(3))
    out = ring.RingAttention.apply(q, k, v, None, Scores(), Attended(rows, exchanged.ring, 0, float("inf")))
    forward = len(done)
    out.sum().backward()
    return done[:forward], done[forward:]


def test_the_next_keys_travel_while_these_are_used():
    """Forward; backward gradients go home besides, while the next block is computed."""
    steps = ["start", "keys of 0 before", "wait", "start", "keys of 1 before", "wait", "keys of 2 before"]
    for forward, backward in run(in_order, 3, "ring"):
        assert forward == steps
        assert [what for what in backward if what.startswith("keys")] == [steps[1], steps[4], steps[6]]
        first, last = backward.index(steps[1]), backward.index("keys of 2 before")
        assert backward[:first] == ["start"]
        # the keys of step 2 are asked for, then step 1's gradients are found and sent, then step 2 is computed
        assert backward[first + 1 : last] == ["wait", "start", "keys of 1 before", "start", "wait"]


def buffers(variant):
    """How many blocks of keys that have come, or are to come, there are at once in a forward pass."""
    from hf_parallel.axes.context import ring

    (shape, exchanged), known, most = groups(variant), [], [0]

    class Counted(ring.Exchange):
        def __init__(self, *given):
            super().__init__(*given)
            known.append(weakref.ref(self.received))
            most.append(sum(one() is not None for one in known))

    ring.Exchange = Counted
    rows = Layout(packs.make_unpacked_rows(1, 40), shape, 40 // shape.size)
    q, k, v = (torch.randn(1, 2, 40 // shape.size, 8) for _ in range(3))
    ring.RingAttention.apply(q, k, v, None, Scores(), ring.Ring(rows, exchanged.ring, 0, float("inf")))
    return len(known), max(most)


def test_two_buffers():
    """One is used while the next one comes. On CUDA a third would be waited for by nobody before it is used again.

    No stream is named in the ring: an exchange starts on NCCL's once what was computed before is done, so also what
    read the block whose memory it gets; its `wait` is before its block is read, and before what it sent is let go.
    """
    assert set(run(buffers, 5, "ring")) == {(4, 2)}


@pytest.mark.parametrize("square", [1024, 3])
@pytest.mark.parametrize(
    ("ranks", "variants"), [(2, ("ring", "ulysses")), (3, ("ring",)), (4, ("allgather", "hybrid", "ulysses"))]
)
def test_same_as_one_process(ranks, variants, square):
    """Bands of a window in one mask, and in strips of three queries."""
    for rank in run(gaps, ranks, variants, square):
        wrong = {case: size for case, size in rank.items() if not size < 2e-6}  # sums of 33 numbers of size 1, fp32
        assert not wrong


def layout(lengths, ring):
    total = sum(lengths)
    rows = packs.find((1, total), None, torch.cat([torch.arange(n) for n in lengths])[None])
    return Layout(rows, Shape(ring, 1), compute_local_length(total, ring))


def count_pairs(layout, rank, low, high):
    """The pairs of a query and a key that a ring rank looks at, in a batch of one row."""
    total = 0
    for tile in (tile for keys in range(layout.shape.ring) for tile in layout.tiles(rank, keys, low, high)):
        rows, columns = tile.q.stop - tile.q.start, tile.k.stop - tile.k.start
        behind, least, most = tile.band
        if tile.kind != "band":
            total += rows * columns if tile.kind == "full" else rows * (rows + 1) // 2
        for i in range(rows) if tile.kind == "band" else ():
            first, last = max(0, behind + i - most), min(columns - 1, behind + i - least)
            total += max(0, int(last - first) + 1)
    return total


@pytest.mark.parametrize("ring", [2, 4, 8])
@pytest.mark.parametrize(
    ("lengths", "most"), [((4097,), 1.05), ((700, 33, 1900, 260, 1204), 1.15), (tuple(range(90, 200, 7)), 1.15)]
)
def test_ranks_do_the_same_work(lengths, most, ring):
    """Of a single causal document 5 % apart at most, of packs 15 %."""
    work = [count_pairs(layout(lengths, ring), rank, 0, float("inf")) for rank in range(ring)]
    assert sum(work) == sum(n * (n + 1) // 2 for n in lengths)
    assert max(work) <= most * sum(work) / ring


@pytest.mark.parametrize("ring", [1, 2, 3, 5, 8])
def test_every_token_has_one_holder(ring):
    for lengths in ((1,), (33,), (5, 11, 2, 14, 1), (1, 1, 1, 1, 1, 1, 1)):
        table = layout(lengths, ring).table
        assert sorted(table[table >= 0].tolist()) == list(range(sum(lengths)))
        assert max(len(deal_documents([n], ring)[0][0]) for n in lengths) <= 2


def test_a_window_spares_what_nobody_sees():
    """With a window of an eighth of the row two of four ranks need nothing of each other."""
    rows = layout((4096,), 4)
    needed = [(q, k) for q in range(4) for k in range(4) if rows.tiles(q, k, 0, 511)]
    assert not {(0, 2), (3, 1), (0, 3)} & set(needed)
    assert sum(count_pairs(rows, rank, 0, 511) for rank in range(4)) == 512 * 513 // 2 + (4096 - 512) * 512

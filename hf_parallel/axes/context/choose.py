"""The variant: as the spec asks, or for each batch the one that is expected to wait the least for other ranks.

With U ranks of Ulysses inside rings of R = P / U (a ring: U = 1, Ulysses: U = P), per layer, forward and backward:

    Ulysses    4 exchanges of latency l, of (U - 1) / U of q, k, v and outputs, back and forth           waited for
    ring       R - 1 steps of l + bytes of a block of keys, backward twice l + 3 times the bytes,
               as gradients are summed in fp32                                       less attention to one block
    allgather  l + all keys, backward twice l + 3 times the bytes                                   waited for

and 0.384 of what hides behind attention, which it slows down. A block's attention grows with the square of the length
and what is sent in proportion, so short rows and packs of short documents want few messages, and from some length on a
ring waits for nothing. Numbers are those of an H100 by NVLink
and InfiniBand as the planner has them (its catalogue and fitted efficiencies); of other GPUs since the A100 bytes cost
about as many operations, which is what decides.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hf_parallel.ask.keys.axes import ALLGATHER, AUTO, RING, ULYSSES, compute_inner_size
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.context.flash import PACKAGES, WIDEST, find_reason_of_age
from hf_parallel.axes.context.ulysses import compute_key_repeats

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig

    from hf_parallel.ask.config import ParallelConfig


#: What `attention=` may say beside packages: torch's kernels, by what they compute with.
_OWN_KERNELS = ("auto", "sdpa", "torch_flash")
#: Ranks of a node where no launcher tells.
_NODE = 8
#: Attention's operations per second, bytes per number and per number of a gradient that ranks sum, and how much slower
#: a second of sending makes what hides it.
_FLOPS, _WIDTH, _SUMMED, _CONTENTION = 2.2e14, 2, 4, 0.384
#: Lengths of rows that are looked at, in tokens.
_LENGTHS = tuple(2**power for power in range(6, 25))


class Link(NamedTuple):
    """Seconds before the first byte of a message, bytes per second afterwards."""

    latency: float
    bandwidth: float


INSIDE, BETWEEN = Link(5e-6, 3.4e11), Link(12e-6, 3.8e10)


@dataclass(frozen=True)
class Choice:
    """The numbers that decide for a batch.

    Attributes:
        ranks: that share sequences.
        heads: of queries and of keys on one of them.
        width: of a head.
        node: how many of these ranks a node has.
        ways: the variants among which a batch chooses.
    """

    ranks: int
    heads: tuple[int, int]
    width: int
    node: int
    ways: tuple[str, ...] = ()

    def of(self, tokens: int, seen: float) -> str:
        """Return the variant for a batch of so many tokens, which see so many each: their document, as a rule."""
        if len(self.ways) == 1:
            return self.ways[0]
        return min(self.ways, key=lambda way: self.waiting(way, tokens / self.ranks, seen))

    def by_length(self) -> list[tuple[int, str]]:
        """(length of a single document from which it is the one, variant)."""
        found: list[tuple[int, str]] = []
        for length in _LENGTHS:
            way = self.of(length, length)
            if not found or found[-1][1] != way:
                found.append((length, way))
        return found

    def waiting(self, way: str, tokens: float, seen: float) -> float:
        """Return the seconds that a layer waits for other ranks, with so many tokens on each."""
        inner, at_once = compute_inner_size(way, self.ranks), way == ALLGATHER
        ring, (heads, keys) = self.ranks // inner, self.heads
        keys *= compute_key_repeats(heads, keys, inner)
        number = tokens * self.width * _WIDTH  # bytes of one head of this rank's tokens
        found = 0.0
        if inner > 1:
            link = INSIDE if inner <= self.node else BETWEEN
            sent = (inner - 1) / inner * 2 * (heads + keys) * number
            found += 2 * (2 * link.latency + sent / link.bandwidth)
        if ring > 1:
            link = INSIDE if self.ranks <= self.node else BETWEEN
            block = 2 * keys * number  # of as many tokens as heads are fewer
            attention = 2 * heads * self.width * tokens * seen / ring / _FLOPS  # causal: half of 4
            steps, blocks = (1, ring - 1) if at_once else (ring - 1, 1)
            # Forward; backward, which sends gradients, too, in fp32: twice the bytes of keys.
            for messages, sizes, work in ((1, 1, 1.0), (2, 1 + _SUMMED / _WIDTH, 2.5)):
                sent = messages * link.latency + sizes * blocks * block / link.bandwidth
                hidden = 0.0 if at_once else min(sent, work * attention)
                found += steps * (sent - hidden + _CONTENTION * hidden)
        return found


def choose_by_cost(ranks: int, heads: tuple[int, int], width: int, tp: int, node: int) -> Choice:
    """Among all variants that the heads allow; rings first, which win where nothing has to be waited for."""
    own = max(1, heads[0] // tp), max(1, heads[1] // tp)
    inside = max(1, node // tp)
    groups = [u for u in range(2, ranks) if ranks % u == 0 and u <= inside < ranks and own[0] % u == 0]
    exact = [RING, *(f"hybrid:{u}" for u in reversed(groups)), ALLGATHER]
    if own[0] % ranks == 0:
        exact.insert(1, ULYSSES)
    every = Choice(ranks, own, width, inside, tuple(exact))
    taken = {way for _, way in every.by_length()}
    return Choice(ranks, own, width, inside, tuple(way for way in exact if way in taken))


def choose_variants(config: ParallelConfig, facts: ContextFacts) -> tuple[Choice, str | None]:
    """Choose the variants; say why these, where the spec leaves it open.

    Raises:
        SpecError: nothing works, or not what the spec asks for.
    """
    size, way = config.cp_size, config.context_parallel
    if facts.obstacle is not None:
        refuse(f"cp_size={size}", facts.obstacle, "cp_size=1")
    # A package is there, as for one process (`attention_kernel.py`). Here it computes blocks, or is not asked at all.
    asked, works = f"attention={config.attention}", "attention=auto"
    if config.attention not in (*_OWN_KERNELS, *PACKAGES):
        known = ", ".join((*_OWN_KERNELS[1:], *PACKAGES))
        refuse(asked, f"cp_size={size} merges blocks of {known}", works)
    if config.attention in PACKAGES:
        if facts.dense is not None:
            refuse(asked, f"{facts.dense} needs a matrix of scores with cp_size={size}", works)
        old = find_reason_of_age(config.attention)
        if old is not None:
            refuse(asked, old, works)
        if facts.width > WIDEST:
            refuse(asked, f"heads of {facts.width} numbers are wider than {WIDEST}", works)
    heads, asked = max(1, facts.heads[0] // config.tp_size), f"context_parallel={way}"
    inner = size if way == AUTO else config.ulysses_size
    if way != AUTO and heads % inner:
        refuse(asked, f"{heads} heads are not divided by {inner} ranks", "context_parallel=ring")
    needs = f"{facts.dense} needs all keys of a head on one rank"
    if facts.dense is not None and (heads % inner or inner < size):
        fits = max(ranks for ranks in range(1, size + 1) if heads % ranks == 0)
        works = "context_parallel=ulysses" if fits == size else f"cp_size={fits}"
        refuse(f"cp_size={size}" if way == AUTO else asked, needs, works)
    why = None
    if way == AUTO and facts.dense is not None:
        way, why = ULYSSES, needs
    elif way == AUTO and facts.windows:
        way, why = RING, f"what is beyond a window of {facts.windows[0]} tokens is not sent"
    if way != AUTO:
        return Choice(size, facts.heads, facts.width, _NODE, (way,)), why
    node = int(os.environ.get("LOCAL_WORLD_SIZE") or _NODE)
    found = choose_by_cost(size, facts.heads, facts.width, config.tp_size, node)
    # `ulysses, from documents of 8,192 tokens ring`, with the reason of the last.
    by_length, (own, keys) = found.by_length(), found.heads
    later = [f"from documents of {length:,} tokens {name}" for length, name in by_length[1:]]
    hidden = f": blocks of {keys} heads of keys then travel behind attention" if by_length[-1][1] == RING else ""
    crossing = f", {size} ranks over nodes of {found.node}" if size > found.node else ""
    undivided = f"; {own} heads are not divided by {size} ranks" if own % size else ""
    return found, ", ".join([by_length[0][1], *later]) + hidden + crossing + undivided


# ---- What a model tells about cutting its sequences -----------------------------------------------------------------


#: Where models write how much of their scores they drop.
_DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")


@dataclass(frozen=True)
class ContextFacts:
    """The facts that cp needs of a model.

    Attributes:
        obstacle: why its sequences cannot be cut, or None.
        heads: of queries and of keys.
        causal: does a query see no later keys?
        width: of a head.
        windows: sliding windows of its layers, in tokens.
        dense: what no kernel over blocks can do, such as dropout of scores; Ulysses can.
        kernel: of its attention in one process.
    """

    obstacle: str | None
    heads: tuple[int, int]
    causal: bool
    width: int = 128
    windows: tuple[int, ...] = ()
    dense: str | None = None
    kernel: str = "sdpa"


def read_sliding_window(config: PretrainedConfig) -> int | None:
    """Return the window of the sliding layers in tokens, or None."""
    window = getattr(config, "sliding_window", None)
    return window if isinstance(window, int) and getattr(config, "use_sliding_window", True) else None


def read_score_dropout(config: PretrainedConfig) -> str | None:
    """`key=value` of the dropout of its scores, or None."""
    return next((f"{key}={value}" for key in _DROPOUTS if (value := getattr(config, key, 0.0))), None)


def can_use_registries(model: nn.Module) -> bool:
    """Return whether the model calls its attention, and makes its masks, through transformers' registries."""
    return bool(getattr(model, "_supports_attention_backend", False) and getattr(model, "_supports_flash_attn", False))

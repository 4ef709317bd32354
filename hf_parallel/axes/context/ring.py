"""Ring attention (Li et al., 2021; Liu et al., 2023): queries stay on their rank, blocks of keys and values travel.

    step i of ring rank r       computes with the keys of r - i
                                receives those of r - i - 1 meanwhile      (two buffers)
    and backward                returns the gradients of those keys to r - i, while the next step runs

Each rank receives keys from the rank that holds them. That is as many bytes as from neighbour to neighbour, and keys
that no query sees, for example beyond a sliding window, are not sent. `gathered` collects all keys at once (Llama 3's
variant, arXiv 2407.21783, section 3.3.2): one collective, and memory for all keys of one layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from hf_parallel.axes.context import flash, tiled
from hf_parallel.axes.context.kernels import Kernel, Scores
from hf_parallel.axes.context.layout import Ring
from hf_parallel.axes.context.packs import Call
from hf_parallel.axes.context.tiles import Tile
from hf_parallel.axes.context.ulysses import to_heads_with_output, to_tokens
from hf_parallel.ranks import start_all_gather, start_reduce_scatter
from hf_parallel.ranks.differentiable import Context, once_differentiable
from hf_parallel.ranks.observed import ATTENTION, keep_or_compute

# ---- Attention over keys that come block by block, with nothing kept but the output and one number per query --------
#     output = sum over blocks of exp(lse_block - lse) output_block,   lse = log sum exp(lse_block)        in fp32
#
# `layout.py` knows which rank holds which tokens, and so what a query sees of a block: no mask is needed. A kernel is
# `flat` if it takes many sequences in one call, as [b n, h, …]; the others take [b, h, n, …].

Part = Tile | Call
Place = slice | torch.Tensor | tuple[slice, slice, slice]  # the tokens, or rows, of a part


class Gradients:
    """The gradient of the queries [b, h, n, d] over the blocks so far."""

    def __init__(
        self,
        gradient: torch.Tensor,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        scores: Scores,
        kernel: Kernel,
    ) -> None:
        self.lse, self.scores, self.kernel = lse, scores, kernel
        self.dq = _make_room(q.shape, 0, lse, kernel)
        gradient = gradient if kernel.flat else gradient.contiguous()
        self._queries = [_arrange_for_kernel(tensor, kernel) for tensor in (gradient, q, out, lse)]
        self._dq = _arrange_for_kernel(self.dq, kernel)

    def add(self, pair: torch.Tensor, ring: Ring, keys: int) -> torch.Tensor:
        """Add the share of ring rank `keys`; return its keys' and values' gradients [2, b, h / g, m, d] in fp32."""
        found = _make_room((2 * pair.shape[1], *pair.shape[2:]), 0, self.dq, self.kernel).unflatten(0, (2, -1))
        of_k, of_v = (_arrange_for_kernel(tensor, self.kernel) for tensor in found)
        k, v = _arrange_for_kernel(pair[0], self.kernel), _arrange_for_kernel(pair[1], self.kernel)
        for part in self.kernel.parts(ring, keys, self.scores, self.lse.device):
            mine, theirs = _find_places(part)
            gradient, q, out, lse = (tensor[mine] for tensor in self._queries)
            shares = self.kernel.backward(gradient, q, k[theirs], v[theirs], out, lse, part, self.scores)
            for total, place, share in zip((self._dq, of_k, of_v), (mine, theirs, theirs), shares, strict=True):
                if isinstance(place, torch.Tensor):  # keys may be there several times
                    total.index_add_(0, place, share.to(total.dtype))
                else:
                    total[place] += share
        return found


def _make_room(shape: Sequence[int], value: float, like: torch.Tensor, kernel: Kernel) -> torch.Tensor:
    """Make a tensor [b, h, n, …] in the memory order of the kernel."""
    b, h, n, *rest = shape
    return (
        like.new_full((b, n, h, *rest), value).transpose(1, 2) if kernel.flat else like.new_full(tuple(shape), value)
    )


def _arrange_for_kernel(rows: torch.Tensor, kernel: Kernel) -> torch.Tensor:
    """Return [b, h, n, …] as the kernel takes it. [b n, h, …] is a view where the memory order is [b, n, h, …]."""
    return rows.transpose(1, 2).flatten(0, 1) if kernel.flat else rows


def _find_places(part: Part) -> tuple[Place, Place]:
    if isinstance(part, Call):
        return part.queries, part.keys
    rows = slice(None) if part.row is None else slice(part.row, part.row + 1)
    return (rows, slice(None), part.q), (rows, slice(None), part.k)


# ---- Blocks that travel around the ring -----------------------------------------------------------------------------


def pick(q: torch.Tensor, scores: Scores, asked: str) -> Kernel:
    """Choose the kernel for queries [b, h, n, d]. `asked`: the spec's `attention`.

    Raises:
        NotImplementedError: the spec names a package that does not compute such queries.
    """
    if asked in flash.PACKAGES:
        kernel = flash.PACKAGES[asked]
        if not flash.can_take_queries(q):
            raise NotImplementedError(
                f"hf_parallel: attention={asked}: heads of {q.shape[-1]} numbers in {q.dtype} on {q.device.type} are "
                "not computed; fp16 or bf16 on CUDA with heads of at most 256, or attention=auto, works"
            )
        return kernel
    return flash.TORCH if scores.cap is None and flash.can_take_queries(q) else tiled.TILES


class Exchange:
    """Send a tensor to one rank while another arrives from a second rank.

    On CUDA, NCCL's stream first waits for the kernels so far, also those that used the memory before. `wait` lets
    later kernels wait for the messages, not the process. The sent tensor is held until then: its memory cannot be
    reused too early, so nothing has to be recorded on NCCL's stream.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        out: torch.Tensor | None,
        to: int,
        like: torch.Tensor | None,
        source: int,
    ) -> None:
        self.out = None if out is None else out.contiguous()  # kept until it has been sent
        self.received = None if like is None else torch.empty_like(like, memory_format=torch.contiguous_format)
        operations = []
        if self.out is not None:
            operations.append(dist.P2POp(dist.isend, self.out, group=group, group_peer=to))
        if self.received is not None:
            operations.append(dist.P2POp(dist.irecv, self.received, group=group, group_peer=source))
        self.works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> torch.Tensor | None:
        """Wait for the exchange and return what was received."""
        for work in self.works:
            work.wait()
        self.out = None
        return self.received


def _receive_blocks(ring: Ring, own: torch.Tensor) -> Iterator[tuple[int, torch.Tensor | None]]:
    """Yield (ring rank, its keys and values [2, b, h, n, d], or None if no query here sees them), the own ones first.

    The next block travels while the caller uses the present one.
    """
    if ring.gathered and ring.size > 1:
        assert ring.group is not None
        started = start_all_gather(own, ring.group)
        yield ring.rank, own
        everything = started.wait()
        yield from ((keys, everything[keys]) for keys in range(ring.size) if keys != ring.rank)
        return
    arrived: torch.Tensor | None = own
    for step in range(ring.size):
        following = None
        if step + 1 < ring.size:
            to, source = (ring.rank + step + 1) % ring.size, (ring.rank - step - 1) % ring.size
            wanted, needed = ring.sees(to, ring.rank), ring.sees(ring.rank, source)
            following = Exchange(ring.group, own if wanted else None, to, own if needed else None, source)
        yield (ring.rank - step) % ring.size, arrived
        arrived = None if following is None else following.wait()


class RingAttention(torch.autograd.Function):
    """Attend with q [b, h, n, d], k and v [b, h / g, n, d] of this ring rank's tokens; return [b, h, n, d].

    With Ulysses, the result has all heads of this rank's own tokens.
    """

    @staticmethod
    def forward(
        ctx: Context,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        scores: Scores,
        ring: Ring,
    ) -> torch.Tensor:
        out, lse = keep_or_compute(lambda: _run_ring_forward(q, k, v, sinks, scores, ring), ATTENTION)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.scores, ctx.ring = scores, ring
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Context, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        if ctx.ring.heads is not None:
            gradient, out = to_heads_with_output(gradient, out, ctx.ring.heads)
        work = Gradients(gradient, q, out, lse, ctx.scores, pick(q, ctx.scores, ctx.ring.kernel))
        pair = _collect_key_gradients(work, torch.stack([k, v]), ctx.ring)
        of_sinks = None
        if sinks is not None:
            share = (sinks.to(lse.dtype)[None, :, None] - lse).exp()
            of_sinks = -(share * (gradient * out).to(share.dtype).sum(-1)).sum((0, 2)).to(sinks.dtype)
        return work.dq.to(q.dtype), pair[0].to(k.dtype), pair[1].to(v.dtype), of_sinks, None, None


def _run_ring_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, scores: Scores, ring: Ring
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of the queries over the blocks of all ring ranks, and the log-sum-exp of their scores."""
    kernel, wide = pick(q, scores, ring.kernel), torch.promote_types(q.dtype, torch.float32)
    b, h, n, d = q.shape  # in memory [b, n, h, d], as layers want it: nothing is copied, or kept twice
    whole_out = torch.zeros(b, n, h, d, dtype=wide, device=q.device).transpose(1, 2)
    whole_lse = _make_room((b, h, n), -torch.inf, whole_out, kernel)
    queries, outs, lses = (_arrange_for_kernel(tensor, kernel) for tensor in (q, whole_out, whole_lse))
    for keys, pair in _receive_blocks(ring, torch.stack([k, v])):
        if pair is None:
            continue
        block_k, block_v = _arrange_for_kernel(pair[0], kernel), _arrange_for_kernel(pair[1], kernel)
        for part in kernel.parts(ring, keys, scores, whole_lse.device):
            mine, theirs = _find_places(part)
            out, lse = kernel.forward(queries[mine], block_k[theirs], block_v[theirs], part, scores)
            former = lses[mine]
            total = torch.logaddexp(former, lse)
            outs[mine] = outs[mine] * (former - total).exp_()[..., None] + out * (lse - total).exp_()[..., None]
            lses[mine] = total
            del out, lse, former, total  # before the next part's are there
        del pair, block_k, block_v  # otherwise three blocks would be held while the next but one is received
    if sinks is not None:  # a further score per head [h] whose value is zero, as gpt-oss has
        with_sinks = torch.logaddexp(whole_lse, sinks.to(whole_lse.dtype)[None, :, None])
        whole_out *= (whole_lse - with_sinks).exp_()[..., None]
        whole_lse = with_sinks
    result = whole_out.to(q.dtype)
    return (result if ring.heads is None else to_tokens(result, ring.heads)), whole_lse


def _collect_key_gradients(work: Gradients, own: torch.Tensor, ring: Ring) -> torch.Tensor:
    """Return the gradients of this rank's keys and values, summed over all ranks that attended to them."""
    if ring.gathered and ring.size > 1:
        assert ring.group is not None
        everything = torch.empty(ring.size, *own.shape, dtype=work.dq.dtype, device=own.device)
        for keys, pair in _receive_blocks(ring, own):
            assert pair is not None  # whoever gathers has all
            everything[keys] = work.add(pair, ring, keys)
        return start_reduce_scatter(everything, ring.group).wait()
    total, returning = torch.zeros(0), None
    for keys, pair in _receive_blocks(ring, own):
        step, found = (ring.rank - keys) % ring.size, None if pair is None else work.add(pair, ring, keys)
        del pair  # as in the forward pass
        if step == 0:
            assert found is not None
            total = found
        else:
            _collect(total, returning)
            # Gradients go home the way the keys came.
            to, source = (ring.rank - step) % ring.size, (ring.rank + step) % ring.size
            like = total if ring.sees(source, ring.rank) else None
            returning = Exchange(ring.group, found, to, like, source)
    _collect(total, returning)
    return total


def _collect(total: torch.Tensor, returning: Exchange | None) -> None:
    arrived = None if returning is None else returning.wait()
    if arrived is not None:
        total += arrived

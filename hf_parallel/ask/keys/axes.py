"""Keys of tensor, context and expert parallelism, which cut layers, sequences and experts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hf_parallel.ask.keys.sizes import Sizes, key
from hf_parallel.ask.spec import refuse

#: The ranks of tp as rows and columns of a grid, columns innermost: another view of the axis.
TP_AXES = ("tp_row", "tp_col")


@dataclass(frozen=True)
class TensorKeys(Sizes):
    """Settings of `tp`."""

    sequence_parallel: bool | None = key(
        None,
        "norms and residual stream on 1/tp of the sequence, where the model allows it",
        shown="on with `tp`",
    )
    tp_overlap: bool = key(False, "communicate one half of each `tp` layer's output while the other is computed")
    tp_mesh: str | None = key(
        None, "ranks of `tp` as ROWSxCOLS, such as `8x2`: weights are cut along both dims, for `tp` of 16 and more"
    )

    def check_keys(self) -> None:
        """Reject settings of tp that need more than one rank, and grids that are none of its ranks."""
        if self.sequence_parallel and self.tp_size == 1:
            refuse("sequence_parallel=true", "tp_size=1 splits no sequence", "tp_size=2 or sequence_parallel=false")
        if self.tp_overlap and self.tp_size == 1:
            refuse("tp_overlap=true", "tp_size=1 communicates nothing", "tp_size=2 or tp_overlap=false")
        if self.tp_mesh is None:
            return
        asked = f"tp_mesh={self.tp_mesh}"
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", self.tp_mesh):
            refuse(asked, "is not ROWSxCOLS", "tp=4,tp_mesh=2x2")
        rows, cols, *deeper = map(int, self.tp_mesh.split("x"))
        if deeper:
            why = "a third dim cuts weights over ranks that read other rows of the batch, which is dp"
            refuse(asked, why, f"tp={rows * cols},tp_mesh={rows}x{cols},dp_shard={deeper[0]}")
        if rows == 1 < cols:
            refuse(asked, "cuts inputs alone, which sends more than any other shape", f"tp={cols},tp_mesh=none")
        if rows == cols == 1 != self.tp_size:
            refuse(asked, "is a grid of one rank", "tp_mesh=none")
        if self.tp_size not in (-1, rows * cols):
            refuse(
                asked,
                f"has {rows * cols} ranks, and tp_size={self.tp_size}",
                f"tp={rows * cols},tp_mesh={rows}x{cols}",
            )
        if cols > 1 and self.tp_overlap:
            refuse("tp_overlap=true", f"{asked} cuts products along both dims", "tp_overlap=false")

    @property
    def tp_row_size(self) -> int:
        """Rows of the grid; all ranks of tp where there is no other."""
        return int(self.tp_mesh.partition("x")[0]) if self.tp_mesh else self.tp_size

    @property
    def tp_col_size(self) -> int:
        """Columns of the grid, over which inputs of products are cut as well; 1: there is no grid."""
        return int(self.tp_mesh.partition("x")[2]) if self.tp_mesh else 1

    @property
    def grid_sizes(self) -> dict[str, int]:
        """Return the size of each mesh axis with tp's ranks as a grid, slow links first."""
        kept = {axis: size for axis, size in self.sizes.items() if axis != "tp"}  # the innermost
        return {**kept, "tp_row": self.tp_row_size, "tp_col": self.tp_col_size}


AUTO, RING, ULYSSES, ALLGATHER = "auto", "ring", "ulysses", "allgather"
_HYBRID = re.compile(r"hybrid:(\d+)")


def compute_inner_size(variant: str, ranks: int) -> int:
    """Return how many of the cp ranks share heads in attention; the others form rings."""
    hybrid = _HYBRID.fullmatch(variant)
    if hybrid:
        return int(hybrid[1])
    return ranks if variant == ULYSSES else 1


@dataclass(frozen=True)
class ContextKeys(Sizes):
    """Settings of `cp`."""

    context_parallel: str = key(
        AUTO, "how `cp` attends: `ring`, `ulysses`, `allgather`, `hybrid:U` (U ranks of Ulysses inside a ring)"
    )

    @property
    def ulysses_size(self) -> int:
        """Return how many cp ranks share heads in attention."""
        return compute_inner_size(self.context_parallel, self.cp_size)

    def check_keys(self) -> None:
        """Reject a variant that is not known, or does not fit the number of ranks."""
        variant, size = self.context_parallel, self.cp_size
        hybrid = _HYBRID.fullmatch(variant)
        if hybrid is None and variant not in (AUTO, RING, ULYSSES, ALLGATHER):
            what = f"context_parallel={variant}"
            refuse(what, "not one of auto, ring, ulysses, allgather, hybrid:U", "context_parallel=auto")
        inner = int(hybrid[1]) if hybrid else 1
        if inner < 1:
            refuse(f"context_parallel={variant}", "1 rank or more shares heads", "context_parallel=auto")
        if size == 1 and variant != AUTO:
            works = f"cp_size={max(2, inner)}"
            refuse(f"context_parallel={variant}", "cp_size=1 has no ranks to share sequences", works)
        if size > 1 and size % inner:
            refuse(f"context_parallel={variant}", f"cp_size={size} ranks do not divide so", "context_parallel=ring")


@dataclass(frozen=True)
class ExpertKeys(Sizes):
    """Size and settings of `ep`."""

    ep_size: int = key(1, "ranks of `dp_shard`, `cp` and `tp` that hold different experts")
    expert_capacity_factor: float | None = key(
        None,
        "room of an expert for tokens, times its even share; what comes after is dropped",
        shown="none dropped",
    )

    @property
    def expert_ranks(self) -> int:
        """Return the number of ranks that experts are shared out over. Needs a resolved config."""
        return self.dp_shard_size * self.cp_size * self.tp_size

    @property
    def ep_shard_size(self) -> int:
        """Ranks that share the experts that one of them would hold (FSDP2). Needs a resolved config."""
        return self.expert_ranks // self.ep_size

    @property
    def expert_sizes(self) -> dict[str, int]:
        """Return the size of each axis of the second view, slow links first. Needs a resolved config."""
        kept = {axis: size for axis, size in self.sizes.items() if axis not in ("dp_shard", "cp", "tp")}
        return {**kept, "ep_shard": self.ep_shard_size, "ep": self.ep_size}

    def check_keys(self) -> None:
        """Require whole groups of cp and tp, whose ranks have the same or neighbouring tokens."""
        size, inner, factor = self.ep_size, self.cp_size * self.tp_size, self.expert_capacity_factor
        ranks = self.expert_ranks  # below 0: not known yet
        if factor is not None and not factor > 0:
            refuse(f"expert_capacity_factor={factor:g}", "leaves no room for a token", "expert_capacity_factor=1.25")
        if size == -1:
            most = max(1, inner, ranks)
            refuse("ep_size=-1", "takes no processes of its own, but ranks of dp_shard, cp and tp", f"ep_size={most}")
        if size == 1 or inner < 1:
            return
        others = f"tp_size={self.tp_size}" if self.cp_size == 1 else f"cp_size x tp_size={inner}"
        if size % inner:
            refuse(f"ep_size={size}", f"is no multiple of {others}", f"ep_size={inner}")
        if ranks > 0 and ranks % size:
            works = max(n for n in range(inner, ranks + 1, inner) if ranks % n == 0 and (n < size or n == inner))
            shared = f"dp_shard_size={self.dp_shard_size} x {others}"
            refuse(f"ep_size={size}", f"does not divide {shared}", f"ep_size={works}")

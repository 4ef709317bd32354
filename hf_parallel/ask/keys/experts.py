"""Keys of expert parallelism: a second view of the ranks of dp_shard, cp and tp."""

from __future__ import annotations

from dataclasses import dataclass

from hf_parallel.ask.keys.sizes import Sizes, key
from hf_parallel.ask.spec import refuse


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

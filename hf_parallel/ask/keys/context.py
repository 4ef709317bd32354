"""Keys of context parallelism."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hf_parallel.ask.keys.sizes import Sizes, key
from hf_parallel.ask.spec import refuse

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

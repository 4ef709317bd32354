"""(a) Versions, links, NCCL: every group, every collective and point-to-point on two and on four ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.setting import Setting
from hf_parallel.check.report import Row

NEEDS_GPU = ("NCCL", "links between GPUs", "ranks that share a GPU")
#: Each axis has a group of two or more; four ranks have groups whose members are not neighbours.
LAYOUTS = {2: "tp=2", 4: "tp=2,pp=2"}
_SMALL = 1 << 16


def rows(setting: Setting) -> Iterator[Row]:
    """What `hf-parallel check` says without its tiny models."""
    for world, spec in LAYOUTS.items():
        payload = _SMALL if setting.small else None
        first, *_ = setting.on_ranks("benchmarks.gpu.links:rank", world, 240, spec=spec, payload=payload)
        for row in first:
            yield Row(**{**row, "what": f"{row['what']}, {world} ranks"})


def rank(spec: str, payload: int | None) -> list[dict[str, Any]]:
    """Rows of rank 0."""
    from hf_parallel.check import Wanted, check

    return check(Wanted(spec, parity=False, payload=payload)).to_dict()["rows"]

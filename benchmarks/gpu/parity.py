"""(b) Every axis and product against one process on the same GPU, in fp32 and bf16."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.gpu.setting import Setting
from hf_parallel.check.report import SKIPPED, Row

NEEDS_GPU = ("kernels of CUDA, fused and foreach optimizers there", "bf16 on tensor cores")
_PRODUCTS = {2: (), 4: ("tp=2,dp_shard=2", "pp=2,dp_shard=2", "dp_replicate=2,dp_shard=2")}


def layouts(world: int) -> list[str]:
    """Those of `hf-parallel check`, and the other products of two axes."""
    from hf_parallel.check.parity import list_default_layouts

    return list(dict.fromkeys([*list_default_layouts(world), *_PRODUCTS[world]]))


def rows(setting: Setting) -> Iterator[Row]:
    """One for each layout and precision."""
    for world in _PRODUCTS:
        specs = layouts(world)
        able = [spec for spec in specs if setting.can(spec, world)]
        for spec in specs:
            if spec not in able:
                yield Row("parity", spec, "needs NCCL, which does not run here", status=SKIPPED)
        first, *_ = setting.on_ranks("benchmarks.gpu.parity:rank", world, specs=able, dtypes=["fp32", "bf16"])
        yield from (Row(**row) for row in first)


def rank(specs: list[str], dtypes: list[str]) -> list[dict[str, Any]]:
    """Rows of rank 0."""
    from hf_parallel.check import Wanted, check

    wanted = [Wanted(spec, tuple(dtypes), links=False, limit_s=120) for spec in specs]
    return [row for one in wanted for row in check(one).to_dict()["rows"]]

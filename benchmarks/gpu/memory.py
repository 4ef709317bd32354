"""(e) Memory of a step by kind: as allocated, as the dry run has it, as the planner has it (within 5 %)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.share import ANY_VALUE, config_of, layout_of, loss_of, planned, share, tokens
from hf_parallel.check.report import FAILED, NOTE, OK, Row

NEEDS_GPU = ("CUDA's allocator", "workspaces of kernels", "1B and 8B shapes")
TARGET = 0.05
_GIB, _MIB = 2**30, 2**20


@dataclass(frozen=True)
class Case:
    """A rank of a layout, and its batch."""

    shape: str
    spec: str
    rows: int
    seq: int
    rank: int = 0


CASES = (
    Case("1B", "", 2, 2048),
    Case("1B", "dp_shard=8", 2, 4096),
    Case("8B", "tp=8", 1, 4096),
    Case("8B", "dp_shard=8,activation_checkpointing=full", 1, 4096),
    Case("8B", "tp=4,pp=2,pipeline_microbatches=4", 4, 2048),
    Case("8B", "tp=4,pp=2,pipeline_microbatches=4", 4, 2048, rank=4),
    Case("8B", "cp=8,activation_checkpointing=full", 1, 65536),
    Case("30B-A3B", "dp_shard=8,activation_checkpointing=full", 1, 4096),
)
SMALL = (Case("tiny", "tp=2,dp_shard=2", 2, 512),)
#: On a GPU too where sizes are small.
MORE = (Case("tiny-A", "dp_shard=2", 1, 512),)


def rows(setting: Setting) -> Iterator[Row]:
    """A line for each case as a whole, and one for each kind."""
    for case in CASES if not setting.small else SMALL + MORE if setting.devices else SMALL:
        found, *_ = setting.on_ranks("benchmarks.gpu.memory:measured", 1, **vars(case))
        yield from shown(case, found)


def shown(case: Case, found: dict[str, Any]) -> Iterator[Row]:
    """What was found of a case, in lines."""
    what = f"{case.shape} {case.spec or 'one process'}" + (f" rank {case.rank}" if case.rank else "")
    formulas, dry, seen = found["planned"], found["dry"], found["seen"]
    total, measured = sum(formulas.values()), found["allocated"] or sum(seen.values())
    gap = total / measured - 1
    held = f" of {_size(found['reserved'])}" if found["reserved"] else ""
    text = f"{_size(measured)} {'allocated' if found['allocated'] else 'of tensors'}{held}"
    expected = f"{_size(total)} planned ({gap:+.1%}), {_size(sum(dry.values()))} dry run"
    status = OK if abs(gap) <= TARGET else FAILED
    yield Row("memory", what, text, expected, status, found)
    for kind in seen:
        text = f"{_size(formulas.get(kind, 0))} planned, {_size(dry.get(kind, 0))} dry run"
        yield Row("memory", f"  {kind}", _size(seen[kind]), text, NOTE)


def _size(count: float) -> str:
    return f"{count / _GIB:.2f} GiB" if count >= _GIB else f"{count / _MIB:.1f} MiB"


def measured(shape: str, spec: str, rows: int, seq: int, rank: int) -> dict[str, Any]:
    """Bytes by kind three ways, and what the device's allocator says."""
    from hf_parallel.planner.dryrun import dry_run

    config, layout = config_of(shape), layout_of(spec)
    given = {"rank": rank, "rows": rows, "seq": seq}
    seen, allocated, reserved = observed(config, spec, **given)
    dry = dry_run(config, layout, **given)
    found = {"seen": seen, "allocated": allocated, "reserved": reserved, "dry": dict(dry.peak)}
    return {**found, "planned": by_formula(config, spec, **given)}


def observed(config: Any, spec: str, rank: int, rows: int, seq: int) -> tuple[dict[str, int], int, int]:
    """Of tensors by kind; the most allocated in a later step, and reserved (0 on a CPU, whose allocator is silent)."""
    from hf_parallel.planner.dryrun.recorder import observe

    with share(config, spec, rank) as model:
        batch = tokens(rows, seq)
        pipelined = layout_of(spec).pp_size > 1
        seen = dict(observe(model, [batch], scalars=ANY_VALUE if pipelined else None).peak)
        if not torch.accelerator.is_available():
            return seen, 0, 0
        module, optimizer = torch.get_device_module(), torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(2):
            module.reset_peak_memory_stats()
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.accelerator.synchronize()
        return seen, module.max_memory_allocated(), module.max_memory_reserved()


def by_formula(config: Any, spec: str, rank: int, rows: int, seq: int) -> dict[str, float]:
    """By the planner's formulas, in the kinds of the dry run."""
    from hf_parallel.planner.memory import predict_memory_of_ranks

    where, job, stages = planned(config, spec, rows, seq, rank)
    place = rank // (where.gpus // where.pp)
    kinds = predict_memory_of_ranks(stages, where, job)[place].kinds
    outside = ("context", "communication buffers")
    passing = kinds["activations"] + kinds["temporaries"]
    renamed = {"weights": "parameters"}
    left = (*outside, "activations", "temporaries")
    kept = {renamed.get(kind, kind): size for kind, size in kinds.items() if kind not in left}
    return {**kept, "activations": passing}

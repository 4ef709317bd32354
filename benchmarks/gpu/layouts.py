"""(h) Every layout of `tests/cuda/layouts.py` on GPUs: losses and norms of one process, waits of the host in a step.

Two more go over symmetric memory, which ranks that share a GPU may share, too. Layouts of one world size run one after
the other in the same processes. One that fails ends them: it is reported, and the rest go on in new ones. Where
several ranks share a GPU the numbers are as good, and the seconds say nothing.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.syncs import Watch
from hf_parallel.check.report import FAILED, NOTE, OK, SKIPPED, Row
from tests.cuda import steps
from tests.cuda.layouts import GROUPS, Layout
from tests.cuda.steps import Counted, Run

NEEDS_GPU = ("kernels of CUDA and their rounding", "NCCL's own order of collectives", "copies between host and GPU")
#: Layouts that pretended devices cannot run: tp_overlap in compiled layers goes over symmetric memory.
_FUSED = [Layout("tp=2,tp_overlap=true,compile=regional", dtype=dtype) for dtype in ("float32", "bfloat16")]
ALL_GROUPS = {**GROUPS, "symmetric": _FUSED}
ALL = {layout.name: layout for group in ALL_GROUPS.values() for layout in group}
#: Groups of layouts that run at a time, each in processes of its own.
LANES = 3
#: Seconds that a layout may take, beside the start of its processes.
_LAYOUT_S, _START_S = 40.0, 60.0
_IN_SMALL = ("tp2", "dp_shard2")


def rows(setting: Setting) -> Iterator[Row]:
    """A line per layout, group by group."""
    with ThreadPoolExecutor(LANES) as lanes:
        for found in lanes.map(lambda group: list(rows_of(setting, group)), _groups(setting)):
            yield from found


def _groups(setting: Setting) -> list[list[Layout]]:
    """Layouts that run in the same processes; on a CPU two. LAYOUTS="pipeline tp4 4" chooses groups, names, ranks."""
    if setting.small and not setting.devices:
        return [[ALL[name] for name in _IN_SMALL]]
    found, chosen = [], os.environ.get("LAYOUTS", "").split()
    for name, group in ALL_GROUPS.items():
        group = [one for one in group if not chosen or {name, one.name, str(one.ranks)} & set(chosen)]
        worlds = sorted({layout.ranks for layout in group})
        found += [[layout for layout in group if layout.ranks == world] for world in worlds]
    return sorted(found, key=lambda layouts: layouts[0].ranks)


def rows_of(setting: Setting, layouts: list[Layout]) -> Iterator[Row]:
    """Lines of layouts that take as many ranks."""
    world = layouts[0].ranks
    able = [layout for layout in layouts if setting.can(layout.spec.partition(",")[0], world)]
    for layout in layouts:
        if layout not in able:
            yield Row("layouts", layout.name, "needs NCCL, which does not run here", status=SKIPPED)
    with tempfile.TemporaryDirectory() as folder:
        alone, _ = _ended(setting, able, 1, f"{folder}/alone")
        while able:
            ranks, error = _ended(setting, able, world, f"{folder}/{able[0].name}")
            for layout in able[: len(ranks)]:
                yield described(layout, ranks[layout.name], alone.get(layout.name), setting.devices > 0)
            able = able[len(ranks) :]
            if able and error:
                yield Row("layouts", able[0].name, error, status=FAILED)
                able = able[1:]


def _ended(setting: Setting, layouts: list[Layout], world: int, folder: str) -> tuple[dict[str, list[Run]], str]:
    """What each rank did, of the layouts that came to their end on all of them; and why the next one did not."""
    Path(folder).mkdir()
    names, error = [layout.name for layout in layouts], ""
    try:
        limit_s = _START_S + _LAYOUT_S * len(names)
        setting.on_ranks("benchmarks.gpu.layouts:train", world, limit_s, names=names, folder=folder, alone=world == 1)
    except TimeoutError as over:
        return {}, str(over)
    except RuntimeError as raised:
        said = [path.read_text().strip().splitlines()[-1] for path in sorted(Path(folder).glob("*.error"))]
        error = " | ".join(dict.fromkeys(said)) or str(raised)
    files = {name: [Path(folder, f"{name}.{rank}.json") for rank in range(world)] for name in names}
    ended = {name: paths for name, paths in files.items() if all(path.exists() for path in paths)}
    return {name: [Run(**json.loads(path.read_text())) for path in paths] for name, paths in ended.items()}, error


def described(layout: Layout, ranks: list[Run], alone: list[Run] | None, on_gpu: bool) -> Row:
    """A layout beside one process."""
    if not alone:
        return Row("layouts", layout.name, "one process failed", status=FAILED)
    loss, norm = steps.gaps(layout, ranks[0], alone[0])
    waits = max(sum(run.waits.values()) for run in ranks)
    lines = max(ranks, key=lambda run: sum(run.waits.values())).waits
    equal = loss <= layout.gap and norm <= 10 * layout.gap and ranks[0].tokens == alone[0].tokens
    text = f"losses {loss:.0e}, norm {norm:.0e} off, {waits} waits ({sum(alone[0].waits.values())} of one process)"
    values = {"loss": loss, "norm": norm, "waits": lines, "waits_alone": alone[0].waits, "losses": ranks[0].losses}
    values["losses_alone"] = alone[0].losses
    status = (OK if on_gpu else NOTE) if equal else FAILED
    return Row("layouts", layout.name, text, f"at most {layout.gap:.0e}", status, values)


# ---- on ranks -------------------------------------------------------------------------------------------------------


class _Counter(Watch):
    """Counts lines that wait, as torch's own warnings tell them."""

    @property
    def counted(self) -> Counted:
        """What was counted until now."""
        return Counted(waits=dict(self.lines))


def train(names: list[str], folder: str, alone: bool) -> list[str]:
    """Train layouts one after the other, and write down what this rank did; `alone`: what one process does."""
    import torch

    kind = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
    rank, made = os.environ.get("RANK", "0"), {}  # type: ignore[var-annotated]
    for name in names:
        layout, began = ALL[name], time.monotonic()
        try:
            key = steps.reference_key(layout) if alone else name
            if key not in made:
                made[key] = _trained(layout, None if alone else layout.spec.replace("FOLDER", folder), kind)
            Path(folder, f"{name}.{rank}.json").write_text(json.dumps(asdict(made[key])))
        except BaseException as error:
            Path(folder, f"{name}.{rank}.error").write_text(_in_one_line(error))
            raise
        print(f"{name}: {time.monotonic() - began:.1f} s", flush=True) if rank == "0" else None
    return names


def _trained(layout: Layout, spec: str | None, kind: str) -> Run:
    import torch

    run = steps.train(layout, spec, kind, _Counter(kind != "cpu"))
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
        torch.get_device_module().empty_cache()
    return run


def _in_one_line(error: BaseException) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    said = " ".join(str(error).split())[-300:]
    return f"{type(error).__name__}: {said} ({frame.filename.rpartition('site-packages/')[2]}:{frame.lineno})"

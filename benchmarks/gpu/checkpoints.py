"""(c) Checkpoints: saved on one layout after two of four steps, resumed on another; losses as of one process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator

from benchmarks.gpu.setting import Setting
from hf_parallel.check.report import FAILED, OK, SKIPPED, Row

NEEDS_GPU = ("optimizer states in GPU memory", "fused AdamW's states")
#: Saved on the first, resumed on the second.
PAIRS = (("tp=2", "dp_shard=2"), ("dp_shard=2", "pp=2"), ("pp=2", "tp=2"))
STEPS, HALF = 4, 2
#: Relative: three steps of Adam feed rounding of 1e-7 back, divided by small numbers.
TOLERANCE = 1e-4


def rows(setting: Setting) -> Iterator[Row]:
    """One for each pair."""
    with tempfile.TemporaryDirectory() as folder:
        call = "benchmarks.gpu.checkpoints:train"
        alone, *_ = setting.on_ranks(call, 1, spec="", folder=folder, steps=STEPS)
        for saved, resumed in PAIRS[:1] if setting.small else PAIRS:
            what = f"{saved} -> {resumed}"
            if not (setting.can(saved, 2) and setting.can(resumed, 2)):
                yield Row("checkpoints", what, "needs NCCL, which does not run here", status=SKIPPED)
                continue
            place = os.path.join(folder, saved.replace("=", ""))
            setting.on_ranks(call, 2, spec=saved, folder=place, steps=HALF)
            found = setting.on_ranks(call, 2, spec=resumed, folder=place, steps=STEPS, resume=True)
            yield compared(what, found[0], alone[HALF:])


def compared(what: str, losses: list[float], alone: list[float]) -> Row:
    """Losses after the resume against those of one process that never stopped."""
    if len(losses) != len(alone):
        return Row("checkpoints", what, f"{len(losses)} steps", f"{len(alone)} steps", FAILED)
    gap = max(abs(a - b) / abs(b) for a, b in zip(losses, alone, strict=True))
    status = OK if gap <= TOLERANCE else FAILED
    values = {"losses": losses, "losses_alone": alone}
    return Row("checkpoints", what, f"losses {gap:.0e} off", f"at most {TOLERANCE:.0e}", status, values)


def train(spec: str, folder: str, steps: int, resume: bool = False) -> list[float]:
    """The losses of the steps of this run."""
    from benchmarks.gpu.training import trainer

    script = trainer(spec, folder, max_steps=steps, save_strategy="steps", save_steps=HALF)
    script.train(resume_from_checkpoint=resume or None)
    first = HALF if resume else 0
    return [entry["loss"] for entry in script.state.log_history if "loss" in entry and entry["step"] > first]

"""(f) Speed: plain Trainer against one rank's share under communication that moves nothing; overlap; the loss.

Of each: tokens per second, MFU (attention counted without a mask, as the planner does), kernels and host time, and
the share of the step in which the GPU does nothing. What a share loses to plain Trainer at the same work is what
this package costs; what links cost is in `links`.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.profiling import TIMED, WARM, Meter, measure, overlapped
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.share import (
    OtherStagesAnswer,
    cluster_of,
    config_of,
    fill,
    layout_of,
    loss_of,
    planned,
    share,
    tokens,
)
from hf_parallel.check.report import NOTE, SKIPPED, Row

NEEDS_GPU = ("kernels, MFU and idle share of a GPU", "overlap of NCCL with compute", "1B and 8B shapes")


@dataclass(frozen=True)
class Case:
    """A layout's first rank and its batch; without a layout plain Trainer."""

    shape: str
    spec: str
    rows: int
    seq: int
    layers: int | None = None


CASES = (
    Case("1B", "", 4, 2048),
    Case("1B", "dp_shard=8", 4, 2048),
    Case("1B", "dp_shard=8,compile=regional", 4, 2048),
    Case("1B", "tp=2", 4, 2048),
    Case("8B", "", 1, 2048, layers=8),
    Case("8B", "dp_shard=8", 1, 4096),
    Case("8B", "dp_shard=8,compile=regional", 1, 4096),
    Case("8B", "tp=8", 4, 4096),
    Case("8B", "tp=8,compile=regional", 4, 4096),
    Case("8B", "tp=4,pp=2,pipeline_microbatches=4", 4, 4096),
    Case("8B", "tp=4,pp=2,pipeline_microbatches=4,compile=regional", 4, 4096),
    Case("8B", "cp=8,activation_checkpointing=full", 1, 65536),
    Case("30B-A3B", "dp_shard=8", 1, 4096),
)
SMALL = (Case("tiny", "", 1, 33), Case("tiny", "tp=2,pp=2,pipeline_microbatches=2", 2, 33))
#: On a GPU too where sizes are small.
MORE = (
    Case("tiny", "cp=2,activation_checkpointing=full", 1, 64),
    Case("tiny-A", "dp_shard=2", 1, 33),
)
#: How the planner's kinds of seconds end that links cost.
SENT = ("communication", "reduction", "gathering updated weights", "bubble")
OVERLAPS = ("dp_shard=2", "tp=2", "tp=2,tp_overlap=true")


def rows(setting: Setting) -> Iterator[Row]:
    """Steps, then overlap, then the loss. SPEED="1B 8B,tp=8" takes the cases of a shape, or of its layout, alone."""
    small, chosen = setting.small, os.environ.get("SPEED", "").split()
    for case in CASES if not small else SMALL + MORE if setting.devices else SMALL:
        if chosen and not {case.shape, f"{case.shape},{case.spec}"} & set(chosen):
            continue
        call = "step_of_share" if case.spec else "step_of_trainer"
        found, *_ = setting.on_ranks(f"benchmarks.gpu.speed:{call}", 1, **vars(case))
        yield Row("speed", _name(case), *described(case, found), NOTE, found)
    if chosen:
        return
    yield from _overlap(setting)
    for spec in ("", "tp=2" if small else "tp=8"):
        shape, seq = ("tiny", 512) if small else ("8B", 8192)
        found, *_ = setting.on_ranks("benchmarks.gpu.speed:loss", 1, shape=shape, spec=spec, seq=seq)
        text = f"{found['ms']:.3g} ms, {found['bytes_per_logit']:.3g} bytes at the peak per logit of this rank"
        yield Row("speed", f"embedding, head and loss {spec or 'one process'}", text, status=NOTE, values=found)


def _name(case: Case) -> str:
    layers = f" ({case.layers} layers)" if case.layers else ""
    return f"{case.shape}{layers} {case.spec or 'plain Trainer'}, {case.rows} x {case.seq}"


def described(case: Case, found: dict[str, Any]) -> tuple[str, str]:
    """What a step does, in two columns."""
    per_rank = f"{found['tokens_per_s']:.0f} tokens/s, {found['wall_ms']:.1f} ms"
    mfu = "" if found["mfu"] is None else f", MFU {found['mfu']:.1%}"
    idle = "" if found["idle"] is None else f", idle {found['idle']:.0%}"
    alone = sum(ms for kind, ms in found["planned_ms"].items() if not kind.endswith(SENT))
    planned = f", {alone:.1f} ms planned without links"
    return per_rank + mfu, f"{found['kernels']} {found['counted']}, host {found['host_ms']:.1f} ms{idle}{planned}"


def _overlap(setting: Setting) -> Iterator[Row]:
    for spec in OVERLAPS:
        if setting.devices < 2:
            why = "needs two GPUs: ranks that share one compute instead of each other"
            yield Row("speed", f"overlap {spec}", why, status=SKIPPED)
            continue
        shape, seq = ("tiny", 128) if setting.small else ("1B", 2048)
        found, *_ = setting.on_ranks("benchmarks.gpu.speed:overlap", 2, shape=shape, spec=spec, rows=4, seq=seq)
        text = f"{found['hidden']:.0%} of {found['communication_ms']:.1f} ms of NCCL is behind compute"
        yield Row("speed", f"overlap {spec}", text, status=NOTE, values=found)


# ---- on ranks -----------------------------------------------------------------------------------------------------


def step_of_share(shape: str, spec: str, rows: int, seq: int, layers: int | None) -> dict[str, Any]:
    """A step of the first rank of a layout."""
    config = config_of(shape, **({"num_hidden_layers": layers} if layers else {}))
    with share(config, spec) as model:
        layout, step = layout_of(spec), _step(model, tokens(rows, seq))
        with OtherStagesAnswer() if layout.pp_size > 1 else contextlib.nullcontext():
            step()
        if layout.compile != "none":
            torch.compiler.reset()  # a layer that ran under a mode of ours would never be compiled
        found = measure(step)
    found["planned_ms"] = planned_ms(config, spec, rows, seq)
    return numbers(found, config, rows * seq, seq, layout.data_parallel_size / layout.world_size)


def _step(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)  # as Trainer makes it

    def step() -> None:
        loss_of(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def step_of_trainer(shape: str, spec: str, rows: int, seq: int, layers: int | None) -> dict[str, Any]:
    """A step of plain Trainer."""
    from transformers import AutoModelForCausalLM

    from hf_parallel.apply.parallelize import choose_default_device

    config = config_of(shape, **({"num_hidden_layers": layers} if layers else {}))
    with choose_default_device():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fill(model)
    found = timed_trainer(model, rows, seq)
    found["planned_ms"] = planned_ms(config, "dp_shard=1,lean_loss=false", rows, seq)
    return numbers(found, config, rows * seq, seq, 1.0)


def planned_ms(config: Any, spec: str, rows: int, seq: int) -> dict[str, float]:
    """Milliseconds of a step by kind, as the planner has them."""
    from hf_parallel.planner.predict import step_time

    where, job, stages = planned(config, spec, rows, seq)
    kinds = step_time(stages, where, job, cluster_of(layout_of(spec))).kinds
    return {kind: seconds * 1e3 for kind, seconds in kinds.items()}


def timed_trainer(model: Any, rows: int, seq: int, **told: Any) -> dict[str, Any]:
    """Steps of a Trainer as its callbacks see them: without the loader's own time.

    Args:
        told: other TrainingArguments.
    """
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from benchmarks.gpu.training import Rows

    meter = Meter()

    class Timing(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step >= WARM:
                meter.begin(profiled=state.global_step == WARM + TIMED)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step > WARM:
                meter.end()

    steps = WARM + TIMED + 1
    fixed = {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    fixed |= {"max_steps": steps, "per_device_train_batch_size": rows}
    with tempfile.TemporaryDirectory() as folder:
        data = Rows(rows * steps, seq, model.config.vocab_size)
        Trainer(model, TrainingArguments(folder, **fixed, **told), train_dataset=data, callbacks=[Timing()]).train()
    return meter.numbers()


def numbers(found: dict[str, Any], config: Any, count: int, seq: int, part: float) -> dict[str, Any]:
    """With tokens per second of this rank's batch and MFU; `part`: of the model's FLOPs, by this rank."""
    from hf_parallel.ask.config import SpecError
    from hf_parallel.planner import shape_of
    from hf_parallel.planner.detect import detect

    seconds = found["wall_ms"] / 1e3
    rate = 3 * shape_of(config).forward_flops(seq, full_attention=True) * part * count / seconds
    try:
        peak = detect().gpu.peak("bf16") if torch.accelerator.is_available() else None
    except SpecError:  # a GPU that the catalogue lacks
        peak = None
    return {**found, "tokens_per_s": count / seconds, "flops_per_s": rate, "mfu": peak and rate / peak}


def loss(shape: str, spec: str, seq: int) -> dict[str, Any]:
    """Of a model of one layer: milliseconds, and bytes at the peak, per logit of this rank."""
    config = config_of(shape, num_hidden_layers=1)
    with share(config, spec) as model:
        found = measure(_step(model, tokens(1, seq)))
        logits = seq * config.vocab_size / layout_of(spec).tp_size
        return {"ms": found["wall_ms"], "bytes_per_logit": _peak_beside_weights(model, seq) / logits}


def _peak_beside_weights(model: Any, seq: int) -> int:
    from hf_parallel.planner.dryrun.recorder import observe

    return max(peak["activations"] for peak in observe(model, [tokens(1, seq)], "sgd").peaks)


def overlap(shape: str, spec: str, rows: int, seq: int) -> dict[str, Any]:
    """Of a real layout on two GPUs: how much of its communication is behind compute."""
    from hf_parallel.apply.parallelize import choose_default_device, parallelize_model
    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.model.anatomy import build_on_meta
    from hf_parallel.planner.dryrun.world import materialise_weights
    from hf_parallel.ranks.mesh import ParallelMesh

    device = choose_default_device()
    model = build_on_meta(config_of(shape)).to(torch.bfloat16).train()
    parallelize_model(model, mesh=ParallelMesh.create(ParallelConfig.parse(spec).resolve(2), device))
    materialise_weights(model, device)
    fill(model)
    return overlapped(_step(model, tokens(rows, seq)))

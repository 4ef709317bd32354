"""Who is watched while it trains, and where what is seen goes: Trainer's logs, `hf_parallel.metrics()`, a file."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import statistics
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hf_parallel.ask.config import SpecError
from hf_parallel.ask.launched import read_local_world_size
from hf_parallel.ask.session import of_session
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.pipeline.schedules import can_be_cut, count_micro_batches
from hf_parallel.hooks import hangs, report, runtime
from hf_parallel.hooks.accelerate import loop_losses, processes
from hf_parallel.hooks.patching import patch
from hf_parallel.hooks.tracing import Trace
from hf_parallel.hooks.trainer import auto_shares
from hf_parallel.monitor.meter import COMPUTE, DATA, PREFIX, round_to_significant
from hf_parallel.monitor.noise import GradientNoise
from hf_parallel.monitor.session import Reading, Record, Session
from hf_parallel.ranks import desync
from hf_parallel.ranks.shares import cut_examples
from hf_parallel.ranks.steps import skip_inner_steps

if TYPE_CHECKING:
    from accelerate import Accelerator
    from accelerate.data_loader import DataLoaderShard
    from torch import nn
    from transformers import (
        PreTrainedModel,
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )

    from hf_parallel.apply.parallelize import ParallelState
    from hf_parallel.monitor.expected import GroupPlan

_LEFT_OUT = (
    "monitor=noise: steps whose batches no schedule of the pipeline can cut, or that are not finished, are left out"
)
#: Readings after which steps are what they will be, and compared with the plan.
WARM = 2
LOOP = "loop"


class Watched:
    """The session of a model, and what has been said and written of it."""

    def __init__(self, model: PreTrainedModel, state: ParallelState) -> None:
        self.model, self.state = model, state
        self.session = Session(state, getattr(model, "config", None), state.config.parts_waits)
        self.noise = GradientNoise(model, state) if state.config.measures_noise else None
        self.meter = self.session.meter
        self.computes = False  # has the open step of a loop run a backward pass?
        self.read_in_loop: list[tuple[torch.Tensor, float]] = []  # batches whose backward pass is to come
        self.record: Record | None = None
        self.plans: list[GroupPlan] = []  # of each kind of GPU, that of the slowest first
        self.trace: Trace | None = None
        self.readings = 0
        self.steps: list[float] = []  # seconds, of each reading
        self.batch: dict[str, Any] = {}  # of the prediction

    def begin_trace(self, folder: str) -> None:
        """Write down the first steps, if that is asked for. Collective."""
        if self.state.config.traced_steps and self.trace is None:
            self.trace = Trace(self.model, self.state, folder)

    def begin_noise(self, trainer: Trainer | None = None) -> None:
        """Begin a step whose small batches are compared.

        Raises:
            SpecError: the first time, a Trainer's steps have one small batch.
        """
        if self.noise is None:
            return
        if trainer is not None and self.noise.is_new:
            self.check_scale(trainer.accelerator)
            config, accumulation = self.state.config, trainer.args.gradient_accumulation_steps
            if config.cp_size > 1 and not config.reduces_each_micro_batch:
                accumulation = 1  # a reduction holds all batches of the step
            if config.data_parallel_size * config.pp_size * accumulation == 1:
                what = f"monitor={config.monitor} with gradient_accumulation_steps={accumulation} on one data rank"
                micro = ", and gradient_reduction=micro_step" if config.cp_size > 1 else ""
                why = "a step has one small batch, and noise is by how much several differ"
                refuse(what, why, f"--gradient_accumulation_steps 2{micro}")
        self.noise.begin_step()

    def check_scale(self, accelerator: Accelerator) -> None:
        """Refuse gradients that are measured with a scale and stepped with without it."""
        if accelerator.scaler is not None:
            what = f"monitor={self.state.config.monitor} with mixed_precision=fp16"
            refuse(what, "gradients have a scale that changes during a training", "bf16")

    def parts_of(self, inputs: Any, real_rows: int | None = None) -> list[tuple[torch.Tensor, float]]:
        """Return targets and sequences of each backward pass of a batch; of a pipeline's there are several."""
        device, engine = self.session.mesh.device, self.state.pipeline
        _, rows = count_tokens_and_rows(inputs, real_rows)
        labels = inputs.get("labels") if hasattr(inputs, "get") else None
        if torch.is_tensor(labels) and labels.ndim > 1 and not labels.is_floating_point():
            shifted = inputs.get("shift_labels")
            if shifted is None and self.state.sums_over_tokens:
                shifted = labels[..., 1:]
            targets = ((labels if shifted is None else shifted) != -100).flatten(1).sum(1)
        else:
            targets = torch.ones(rows, device=device)
        targets = targets * (rows > 0)
        if engine is None or not can_be_cut(len(targets), self.state.config):
            return [(targets.sum(), rows)]
        parts = targets.tensor_split(count_micro_batches(len(targets), self.state.config))
        return [(part.sum(), rows / len(parts)) for part in parts]

    def read(self, arguments: TrainingArguments | None = None, step: int | None = None) -> dict[str, float]:
        """Return what is to be logged of the steps since the last time. Collective over all ranks."""
        reading = self.session.read()
        if reading is None:
            return {}
        self.readings += 1
        self.steps.append(max(row.step for row in reading.rows))
        line = None if arguments is None else auto_shares.look(reading.rows, arguments.gradient_accumulation_steps)
        if line is not None:
            reading.said.append(("shares", line))
        noise = None if self.noise is None else self.noise.read()
        if self.noise is not None and self.noise.left_out and self.state.note_line(_LEFT_OUT):
            report.say(_LEFT_OUT)
        if noise is not None and noise.in_sequences is not None:
            reading.figures["noise_scale"] = round_to_significant(noise.in_sequences)
        if dist.get_rank() > 0:
            return reading.figures
        from hf_parallel.monitor import expected  # the planner: not needed to start

        if self.record is None and arguments is not None:
            self.record = Record(arguments.output_dir)
            self._write("run", **self._run(reading, arguments))
        rows = [row.to_dict() for row in reading.rows]
        measured = {} if noise is None else {"noise": noise.to_dict()}
        self._write("metrics", step=step, perf=reading.figures, ranks=rows, **measured)
        lines = list(reading.said)
        if self.readings == WARM and self.session.mesh.device.type != "cpu":
            lines += [("plan", line) for line in expected.list_deviations_of_groups(self.plans, reading.rows)]
        for about, line in lines:
            report.say(line)
            self._write("note", step=step, about=about, text=line)
        return reading.figures

    def _run(self, reading: Reading, arguments: TrainingArguments) -> dict[str, object]:
        """Return the first line of a run's record."""
        from hf_parallel.monitor import expected
        from hf_parallel.planner.detect import detect
        from hf_parallel.planner.groups import find_machines_of_ranks
        from hf_parallel.planner.layout import name_optimizer_of, name_precision_of

        config, plan, why = self.state.config, None, ""
        adapters = getattr(self.model, "peft_config", {}).values()
        dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), None)
        lowered = next((name for name in ("bf16", "fp16") if getattr(arguments, name)), "no")
        batch = expected.Batch(
            rows=arguments.per_device_train_batch_size,
            calls=arguments.gradient_accumulation_steps,
            seq=reading.seq,
            precision=name_precision_of(dtype, lowered),
            optimizer=name_optimizer_of(str(getattr(arguments.optim, "value", arguments.optim))),
            lora=max((int(getattr(one, "r", 0) or 0) for one in adapters), default=0),
        )
        self.batch = dataclasses.asdict(batch)
        try:
            if self.session.shape is None or not batch.seq:
                why = "the planner counts neither this model nor its batches"
            else:
                here = detect(config.world_size, read_local_world_size())
                machines, _ = find_machines_of_ranks(here, self.session.devices)
                # Of a micro-step on each data rank; under even shares all have as many.
                current = runtime.current()
                measured = None if current is None else current.measured
                shares = config.shares if measured is None else measured.of_pass.latest
                examples: tuple[int, ...] = (batch.rows,) * config.data_parallel_size
                if shares is not None:
                    total = batch.rows * config.data_parallel_size
                    examples = cut_examples(total, shares, int(measured is not None))
                self.plans = expected.expect_of_groups(self.session.shape, config, machines, batch, examples)
                slowest = self.plans[0]
                plan = expected.describe_prediction(slowest.prediction, config, slowest.batch)
                plan["ranks"] = [slowest.ranks.start, slowest.ranks.stop]
        except SpecError as error:
            why = str(error)
        return {
            "spec": config.to_spec(),
            "axes": config.sizes,
            "world_size": config.world_size,
            "model": type(self.model).__name__,
            "device": str(self.session.mesh.device.type),
            "plan": plan,
            "why_no_plan": why,
        }

    def _write(self, kind: str, **values: object) -> None:
        failure = None if self.record is None else self.record.write(kind, **values)
        if failure is not None:
            report.say(failure)


@dataclasses.dataclass
class _Now:
    """The model that is watched now, if any."""

    watched: Watched | None = None
    in_trainer: bool = False  # is the open step one of a Trainer?
    told_of_profiles: bool = False


def watch_model(model: PreTrainedModel) -> Watched | None:
    """Watch this model from now on, if nobody did; return its watch, or None where that is switched off.

    Collective at first.
    """
    now = of_session(_Now)
    state = runtime.find_parallel_state(model)
    if state is None or state.config.monitor == "off":
        return None
    if now.watched is None or now.watched.state is not state:
        stop_watching()
        now.watched = Watched(getattr(model, "_orig_mod", model), state)
    return now.watched


def stop_watching() -> None:
    """Stop watching all models."""
    now = of_session(_Now)
    if now.watched is not None:
        now.watched.session.meter.stop()
    now.watched, now.in_trainer, now.told_of_profiles = None, False, False


def measure_phase(name: str) -> contextlib.AbstractContextManager:
    """Count what runs inside for this phase of the open step, if there is one."""
    now = of_session(_Now)
    return contextlib.nullcontext() if now.watched is None else now.watched.meter.phase(name)


def note_gradients() -> None:
    """Read gradients before they are clipped, for a trace and for the noise scale. Collective under a trace."""
    now = of_session(_Now)
    if now.watched is not None and now.watched.trace is not None:
        now.watched.trace.note_gradients()
    if now.watched is not None and now.watched.noise is not None:
        now.watched.noise.note_gradients()


def metrics() -> dict[str, float]:
    """Return speed, waits and memory of the steps since the last call, for `accelerator.log` (docs/monitoring.md).

    Collective: all ranks call it. Empty where no layout is active, under `monitor=off`, and before the first step.
    """
    now = of_session(_Now)
    return {} if now.watched is None else now.watched.read()


# ---- Trainer ------------------------------------------------------------------------------------------------------

TRAINER = "trainer"


@contextlib.contextmanager
def measure_reading(trainer: Trainer) -> Iterator[None]:
    """Begin a step of a Trainer with what is read for it inside."""
    now = of_session(_Now)
    now.in_trainer, by = True, watch_model(trainer.model)
    if by is not None:
        by.begin_trace(trainer.args.output_dir)
        by.begin_noise(trainer)
        by.meter.begin(TRAINER)
    with measure_phase(DATA):
        yield


def count_samples(samples: list) -> None:
    """Count these batches for the open step."""
    now = of_session(_Now)
    if now.watched is not None:
        for batch in samples:
            # How many examples of a batch count, where its rows do not tell.
            real = getattr(batch, "real_rows", None)
            real = getattr(batch, "examples", None) if real is None else real
            now.watched.meter.count(*count_tokens_and_rows(batch, real))


def end_monitored_step() -> None:
    """End the step of the Trainer that has begun it."""
    now = of_session(_Now)
    now.in_trainer = False
    if now.watched is not None:
        now.watched.meter.end(TRAINER)
        if now.watched.noise is not None:
            now.watched.noise.end_step()


@contextlib.contextmanager
def measure_small_batch(inputs: Any, real_rows: int | None) -> Iterator[None]:
    """Measure what the backward pass inside adds to the step's gradient, for the noise scale."""
    now = of_session(_Now)
    if now.watched is None or now.watched.noise is None:
        yield
        return
    parts = now.watched.parts_of(inputs, real_rows)  # now: scripts take out of a batch what they have read
    yield
    now.watched.noise.end_small_batch(parts)


def get_critical_batch() -> float | None:
    """Return the gradient noise scale in sequences, if it was measured and can be told yet."""
    now = of_session(_Now)
    estimate = None if now.watched is None or now.watched.noise is None else now.watched.noise.scale.estimate
    return None if estimate is None else estimate.in_sequences


def keep_measured_step() -> None:
    """Note the median step of a run that ends in this machine's calibration, if it has one."""
    from hf_parallel.planner.calibration import choose_calibration_path, name_device, read_calibration, remember_step

    by = of_session(_Now).watched
    if by is None or not by.steps or dist.get_rank() > 0:
        return
    try:
        found, shape = read_calibration(), by.session.shape
        if found is None or shape is None or len(by.plans) != 1:  # steps of unlike GPUs are of no one machine
            return
        if found.device != name_device(by.plans[0].prediction.cluster):
            return
        batch = {key: by.batch[key] for key in ("rows", "calls", "seq", "precision")}
        today = datetime.date.today().isoformat()
        seconds = round_to_significant(statistics.median(by.steps[1:] or by.steps))
        remember_step(found, shape, by.state.config, batch, seconds, today)
        found.write(choose_calibration_path())
    except (SpecError, OSError) as error:
        report.say(f"the measured step is not kept: {error}")


#: What the console shows of all that is measured; trackers and trainer_state.json have every key.
_ON_CONSOLE = {f"{PREFIX}tokens_per_second": "tokens/s", f"{PREFIX}memory_peak_gib": "GiB"}


@patch("transformers.trainer_callback:{ProgressCallback,PrinterCallback}.on_log", "would print all that is measured")
def print_log(
    original: Callable,
    self: TrainerCallback,
    args: TrainingArguments,
    state: TrainerState,
    control: TrainerControl,
    logs: dict[str, Any] | None = None,
    **kwargs: object,
) -> None:
    """Print Trainer's own keys, tokens per second and memory."""
    shown = logs
    if logs is not None:  # without what only trackers are for
        shown = {key: value for key, value in logs.items() if not key.startswith(PREFIX)}
        shown |= {short: logs[key] for key, short in _ON_CONSOLE.items() if key in logs}
    original(self, args, state, control, logs=shown, **kwargs)


# ---- loops --------------------------------------------------------------------------------------------------------


def watch_loop_model(model: PreTrainedModel, folder: str) -> None:
    """Watch the first model that a loop prepares. Collective.

    Args:
        folder: OUTPUT_DIR.
    """
    now = of_session(_Now)
    if now.watched is None and (by := watch_model(model)) is not None:
        calls: list[contextlib.AbstractContextManager] = []

        def enter(module: nn.Module, args: tuple) -> None:
            if torch.is_grad_enabled() and not now.in_trainer:
                by.begin_trace(folder)
            calls.append(by.meter.phase(COMPUTE))
            calls[-1].__enter__()

        def leave(module: nn.Module, args: tuple, output: object) -> None:
            calls.pop().__exit__(None, None, None)

        model.register_forward_pre_hook(enter)
        model.register_forward_hook(leave, always_call=True)


@patch("accelerate.data_loader:{DataLoaderShard,DataLoaderDispatcher}.__iter__", "does not say how long it waits")
def batches(original: Callable, self: DataLoaderShard) -> Iterator:
    """Time a loop's reading; a step begins with the first batch after the last one's end."""
    alone = processes.read_alone(self, original)
    if alone is not None:
        return alone
    desync.come_to_call()
    now = of_session(_Now)
    iterator = loop_losses.note_last_batch(self, original(self))
    return hangs.mark_batches(iterator if now.watched is None else _time_iterator(now.watched, iterator))


def _time_iterator(by: Watched, iterator: Iterator) -> Iterator:
    while True:
        # A step that has read batches without a backward pass was none: an evaluation, or the end of an epoch.
        if by.meter.owner is None or (by.meter.owner == LOOP and not by.computes):
            by.meter.begin(LOOP)
            by.computes = False
            by.read_in_loop.clear()
            by.begin_noise()
        with by.meter.phase(DATA):
            batch = next(iterator, iterator)
        if batch is iterator:
            return
        if by.meter.owner == LOOP:
            by.meter.count(*count_tokens_and_rows(batch))
            by.read_in_loop += [] if by.noise is None else by.parts_of(batch)
        yield batch


@patch("accelerate.accelerator:Accelerator.backward", "does not say that a loop trains, nor weigh its loss")
def backward(original: Callable, self: Accelerator, loss: torch.Tensor, **kwargs: object) -> None:
    """Train on what was read since the last step."""
    desync.come_to_call()
    now = of_session(_Now)
    loss = loop_losses.weigh(loss, self.gradient_state)
    hangs.backward_begins(self)
    if now.watched is not None:
        now.watched.computes = True
        if now.watched.noise is not None:
            now.watched.check_scale(self)
    with measure_phase(COMPUTE):
        original(self, loss, **kwargs)
    if now.watched is not None and now.watched.meter.owner == LOOP and now.watched.noise is not None:
        now.watched.noise.end_small_batch(now.watched.read_in_loop)
        now.watched.read_in_loop.clear()


#: Optimizers whose steps are followed.
_followed: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


def follow_steps(optimizer: torch.optim.Optimizer) -> None:
    """End a loop's step with that of this optimizer, which no other micro-step has."""
    if optimizer not in _followed:
        _followed.add(optimizer)
        optimizer.register_step_pre_hook(skip_inner_steps(_begin_loop_step))
        optimizer.register_step_post_hook(skip_inner_steps(_end_loop_step))


def _begin_loop_step(optimizer: torch.optim.Optimizer, *args: object) -> None:
    now = of_session(_Now)
    loop_losses.check_step()
    note_gradients()
    if now.watched is not None and now.watched.trace is not None:
        now.watched.trace.note_settings(optimizer)
    hangs.mark_loop("the optimizer's step")


def _end_loop_step(*args: object) -> None:
    now = of_session(_Now)
    processes.rejoin_after_epoch()
    hangs.mark_loop("what follows a step", may_take_long=True)
    if runtime.mesh().config.profile_steps and not (now.in_trainer or now.told_of_profiles):
        now.told_of_profiles = True  # also where nobody is watched (monitor=off)
        report.say("profile_steps: steps of a Trainer are profiled, those of a loop are not")
    if now.watched is not None and now.watched.trace is not None:
        now.watched.trace.end_step()
    if now.watched is not None and now.watched.computes:
        if now.watched.meter.owner == LOOP and now.watched.noise is not None:
            now.watched.noise.end_step()
        now.watched.meter.end(LOOP)
        now.watched.computes = False


def count_tokens_and_rows(batch: Any, rows: int | None = None) -> tuple[int, int]:
    """Return tokens and rows of a batch. Tokens of prompts, which come as a list, are not known before generation."""
    if not hasattr(batch, "get"):
        return 0, len(batch) if hasattr(batch, "__len__") else 0
    tensors = [value for value in batch.values() if hasattr(value, "shape") and len(value.shape)]
    tokens = batch.get("input_ids")
    seen = tokens.numel() if hasattr(tokens, "numel") else 0
    return seen, rows if rows is not None else len(tensors[0]) if tensors else 0

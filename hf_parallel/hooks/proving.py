"""A script that is proved runs small and is watched: patches of the processes that `hf-parallel prove` forks.

    size      a large model becomes a small one of its kind; data sets are cut to a few steps with a ragged last batch
    equal     one process takes the batches of all data ranks; random numbers of an example depend on its index alone
    watched   logs, losses, gradients, tokens, predictions and weights go to a `Record`

The patches live as long as the process, and no other process has them: docs/reference/patches.md has a layout's. They
go around these, so that a layout does its work as in a real run. Trainer is here, models and examples are in
`proving_models.py`, loops in `proving_loops.py`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.utils.data import IterableDataset, Subset
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.spec import refuse
from hf_parallel.hooks import auto, proving_loops, proving_models
from hf_parallel.hooks.patching import Patch, apply_patches, with_first
from hf_parallel.prove.small_run import (
    ACCUMULATION,
    EXAMPLES,
    SAVED_AFTER,
    Enough,
    Proving,
    SumsInAnotherOrder,
    refuse_writes_outside,
)

if TYPE_CHECKING:
    from hf_parallel.planner.hardware import Cluster

#: Examples of an evaluation that are kept in any case: scripts look their own up by number.
FEW_TO_EVALUATE = 33
#: Of the noise that a forward pass draws.
NOISE_SEED = 20_000


def run_script(script: str, is_module: bool, arguments: list[str], proving: Proving) -> None:
    """Run a script as `python SCRIPT …` does, small and watched."""
    trainer = [
        with_first(
            proving, "transformers.trainer:Trainer.__new__", _make_sized_trainer, "sizes that a subclass reads early"
        ),
        with_first(proving, "transformers.trainer:Trainer.__init__", _prepare_trainer, "a few steps; watched"),
        with_first(proving, "transformers.trainer:Trainer.train", _train, "resumes where another layout left"),
        with_first(
            proving, "transformers.trainer:Trainer.evaluation_loop", _keep_predictions, "predictions are compared"
        ),
    ]
    patches = (
        _list_patches_of_settings(proving),
        trainer,
        proving_models.list_model_patches(proving),
        proving_loops.list_loop_patches(proving),
    )
    for patch in (patch for some in patches for patch in some):
        apply_patches([patch])
    proving_models.turn_dropout_off(proving)
    with SumsInAnotherOrder() if proving.disturbed else contextlib.nullcontext():
        _run(script, is_module, arguments, proving)
    if not proving.done:
        why = "the script trained no model that a layout reaches"
        do = "train with Trainer, Accelerator.prepare, from_pretrained or hf_parallel.parallelize"
        refuse("prove", why, do=do)


def choose_layout(
    script: str, is_module: bool, arguments: list[str], proving: Proving, cluster: Cluster | None
) -> str:
    """Run a script, of its own size, up to the choice that `--parallel auto` makes for its model. Collective.

    Args:
        cluster: to choose for; default: this machine.
    """
    chosen: list[str] = []

    def stop_here(config: ParallelConfig, source: str) -> None:
        chosen.append(config.to_spec())
        raise Enough(0)

    apply_patches(_list_patches_of_settings(proving))
    auto.wait("prove", stop_here, cluster)
    _run(script, is_module, arguments, proving)
    auto.check_chosen()
    return chosen[0]


def _run(script: str, is_module: bool, arguments: list[str], proving: Proving) -> None:
    script, started_in = script if is_module else os.path.abspath(script), os.getcwd()
    os.chdir(proving.out / "work")
    os.environ["PWD"] = os.getcwd()
    refuse_writes_outside(proving.out.parent)
    sys.argv = [script, *arguments]
    try:
        if is_module:
            sys.path.insert(0, started_in)
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.realpath(script))
            runpy.run_path(script, run_name="__main__")
    except SystemExit as left:
        if left.code not in (None, 0):
            raise RuntimeError(f"the script ended with exit code {left.code}") from left


# ---- Trainer -----------------------------------------------------------------------------------------------------


def _list_patches_of_settings(proving: Proving) -> list[Patch]:
    of = functools.partial(with_first, proving)
    made = proving_loops.make_accelerator
    return [
        of(
            "transformers.training_args:TrainingArguments.__post_init__",
            _change_arguments,
            "other folder, dtype, device",
        ),
        of("accelerate.accelerator:Accelerator.__init__", made, "dtype, trackers"),
    ]


@dataclass(eq=False)
class Watcher(TrainerCallback):
    """Tells `Proving` what a Trainer does."""

    proving: Proving

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Watch the model as it is trained."""
        self.proving.in_trainer, self.proving.done = True, max(self.proving.done, state.global_step)
        self.proving.watch(model, "bf16" if args.bf16 else "fp16" if args.fp16 else "no")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let all processes draw the noise of the first batch from one state."""
        if self.proving.draws:
            torch.manual_seed(NOISE_SEED + 2 * ACCUMULATION * self.proving.done)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Let them draw that of the next batch of a step from one state, too; a pipeline runs all of them at once."""
        if self.proving.draws and self.proving.sizes.stages == 1:
            torch.manual_seed(torch.initial_seed() + 1)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Note the gradients."""
        self.proving.end_step([model])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step."""
        self.proving.done += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep the numbers."""
        self.proving.record.log(logs or {})

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave a run that another layout resumes."""
        if self.proving.leaves:
            raise Enough(0)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Note the weights."""
        self.proving.note_weights([model])
        self.proving.in_trainer = False


def _change_arguments(proving: Proving, original: Callable, self: TrainingArguments) -> None:
    """Change what stands in the way of a small run before Transformers checks it."""
    self.output_dir = str(proving.out / "output")
    self.use_cpu = not proving.on_gpu
    self.report_to, self.push_to_hub = [], False
    self.dataloader_num_workers, self.dataloader_prefetch_factor = 0, None
    self.dataloader_persistent_workers = False
    if not proving.sizes.keep_dtype:
        for name in ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval"):
            if getattr(self, name, False):
                setattr(self, name, False)
                proving.record.note("the run is in fp32; --dtype own keeps the script's")
        self.tf32 = None
    if getattr(self, "torch_compile", False):
        self.torch_compile = False
        proving.record.note("nothing is compiled")
    original(self)


def _prepare_trainer(proving: Proving, original: Callable, self: Trainer, *args: Any, **kwargs: Any) -> None:
    """Cut the data of a Trainer, set its steps, and watch it."""
    proving.driven = True
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    given, values = bound.arguments.get("args"), bound.arguments
    if given is None:
        given = values["args"] = TrainingArguments("tmp_trainer")
    _set_few_steps(proving, given)
    trained, evaluated_at_once = (  # of a device under the layout, where `given` may have one process's
        size // proving.multiply for size in (given.per_device_train_batch_size, given.per_device_eval_batch_size)
    )
    examples = proving.count_examples(trained, given.gradient_accumulation_steps)
    values["train_dataset"] = _take_first_examples(values.get("train_dataset"), examples)
    evaluated, some = (
        values.get("eval_dataset"),
        max(FEW_TO_EVALUATE, evaluated_at_once * proving.sizes.data_ranks + 1),
    )
    if isinstance(evaluated, dict) and not hasattr(evaluated, "column_names"):
        values["eval_dataset"] = {name: _take_first_examples(one, some) for name, one in evaluated.items()}
    else:
        values["eval_dataset"] = _take_first_examples(evaluated, some)
    original(*bound.args, **bound.kwargs)
    self.add_callback(Watcher(proving))


def _make_sized_trainer(
    proving: Proving, original: Callable, cls: type[Trainer], *args: Any, **kwargs: Any
) -> Trainer:
    """Set the sizes before the `__init__` of a subclass reads them: KTO pairs the examples of a batch there."""
    for given in (*args, *kwargs.values()):
        if isinstance(given, TrainingArguments):
            _set_few_steps(proving, given)
    return original(cls)


def _train(
    proving: Proving, original: Callable, self: Trainer, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Resume from the other layout's checkpoint, once: scripts may train several times."""
    found, proving.resumes = proving.resumes or resume_from_checkpoint, None
    return original(self, found if found is None or isinstance(found, bool) else str(found), *args, **kwargs)


def _set_few_steps(proving: Proving, args: TrainingArguments) -> None:
    """A few steps, one evaluation and one save in their middle and at their end, if the script has any."""
    if getattr(args, "_hf_parallel_proved", False):
        return
    args._hf_parallel_proved = True  # type: ignore[attr-defined]
    if args.accelerator_config.split_batches:
        proving.share_batches()
    most = max(EXAMPLES, proving.sizes.micro_batches)
    for name in ("per_device_train_batch_size", "per_device_eval_batch_size"):
        value = getattr(args, name)
        if value > most:
            proving.record.note(f"{name} is {most} in place of {value}")
        setattr(args, name, min(value, most) * proving.multiply)
    if args.gradient_accumulation_steps > ACCUMULATION:
        proving.record.note(f"gradient_accumulation_steps is {ACCUMULATION}, not {args.gradient_accumulation_steps}")
        args.gradient_accumulation_steps = ACCUMULATION
    if getattr(args, "neftune_noise_alpha", None) is not None and (
        proving.sizes.data_ranks > 1 or proving.sizes.joins
    ):
        args.neftune_noise_alpha = None
        why = (
            "noise of joined examples has none for padding"
            if proving.sizes.joins
            else "each data rank draws noise for its own examples"
        )
        proving.record.note(f"NEFTune is off: {why}")
    proving.draws = getattr(args, "neftune_noise_alpha", None) is not None
    args.max_steps = proving.sizes.steps
    args.logging_strategy, args.logging_steps, args.logging_first_step = IntervalStrategy.STEPS, 1, False
    args.dataloader_num_workers, args.disable_tqdm = 0, True
    if args.warmup_steps >= 1:  # else no weight would move
        args.warmup_steps = 0
    if args.eval_strategy != IntervalStrategy.NO:
        args.eval_strategy, args.eval_steps, args.eval_delay = IntervalStrategy.STEPS, 2, 0
    if args.save_strategy != SaveStrategy.NO or proving.leaves:
        args.save_strategy, args.save_steps = SaveStrategy.STEPS, SAVED_AFTER


def _take_first_examples(data: Any, count: int) -> Any:
    """Return the first examples of a data set, or all of one that has fewer."""
    if data is None or count <= 0:
        return data
    if hasattr(data, "take") and not hasattr(data, "__len__"):
        return data.take(count)
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__") or len(data) <= count:
        return data
    return data.select(range(count)) if hasattr(data, "select") else Subset(data, range(count))


def _keep_predictions(proving: Proving, original: Callable, self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Keep what an evaluation predicts, if the script asks for it."""
    output = original(self, *args, **kwargs)
    predicted = output.predictions
    for part in predicted if isinstance(predicted, tuple) else (predicted,):
        if isinstance(part, numpy.ndarray) and part.dtype.kind == "f":
            proving.record.predictions.append(torch.from_numpy(part.astype("float32")))
    return output

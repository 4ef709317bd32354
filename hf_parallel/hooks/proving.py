"""A script that is proved runs small and is watched: patches of the processes that `hf-parallel prove` forks.

    size      a large model becomes a small one of its kind; data sets are cut to a few steps with a ragged last batch
    equal     one process takes the batches of all data ranks; random numbers of an example depend on its index alone
    watched   logs, losses, gradients, tokens, predictions and weights go to a `Record`

The patches live as long as the process, and no other process has them: docs/patches.md lists those of a layout. They
go around these, so that a layout does its work as in a real run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import random
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.utils.data import IterableDataset, RandomSampler, SequentialSampler, Subset
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from transformers import AutoConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.spec import refuse
from hf_parallel.hooks import auto
from hf_parallel.hooks.patching import Patch, apply, around
from hf_parallel.model.shrink import Layout, small_values
from hf_parallel.prove import guarded, noise
from hf_parallel.prove.record import Record, Step, TokenWatch, whole_gradients, whole_weights

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

    from hf_parallel.planner.hardware import Cluster

#: Parameters beside the embeddings up to which a model is proved as it is.
SMALL_ENOUGH = 10_000_000
#: Gradient accumulation steps and examples per device that a proof takes at most.
ACCUMULATION, EXAMPLES = 2, 4
#: Examples of an evaluation that are kept in any case: scripts look their own up by number.
FEW_TO_EVALUATE = 33

_COUNTS = (
    "accelerate.accelerator:Accelerator.num_processes",
    "transformers.training_args:TrainingArguments.world_size",
)
_LIBRARIES = ("accelerate", "transformers", "trl", "peft", "hf_parallel", "sentence_transformers")


@dataclass
class Sizes:
    """The sizes of a small run, in which one process stands for all data ranks.

    Attributes:
        steps: optimizer steps; an epoch has one less, the last of which is ragged.
        data_ranks: of the layout. One process takes as many times the batch of a device.
        micro_batches: what a pipeline needs of examples per device.
        heads: ranks that share the heads of a layer.
        stages: of the pipeline.
        keep_dtype: leave bf16 and fp16 as the script has them; else all is fp32.
    """

    steps: int = 4
    data_ranks: int = 1
    micro_batches: int = 1
    heads: int = 1
    stages: int = 1
    keep_dtype: bool = False

    @classmethod
    def of_layout(cls, config: ParallelConfig, steps: int, keep_dtype: bool) -> Sizes:
        """The sizes that a resolved layout needs."""
        micro_batches = max(config.pipeline_microbatches or 1, config.pp_size)
        heads = config.tp_size * config.cp_size
        return cls(steps, config.data_parallel_size, micro_batches, heads, config.pipeline_stages, keep_dtype)


@dataclass
class Proving:
    """The state of one process that is proved.

    Attributes:
        multiply: how many data ranks this process stands for.
        disturbed: rounding differs on purpose.
        models: folder with the small models, which all processes of a proof share.
        out: folder of this run, which takes the place of the script's output folder.
        done: optimizer steps.
        in_trainer: a Trainer trains; Accelerator is its tool.
        driven: the script has a Trainer or an Accelerator, which tell of steps and losses; else its optimizer does.
        made: models that the script has loaded or made.
    """

    sizes: Sizes
    record: Record
    out: Path
    models: Path
    multiply: int = 1
    disturbed: bool = False
    done: int = 0
    in_trainer: bool = False
    driven: bool = False
    watched: list[nn.Module] = field(default_factory=list)
    made: list[nn.Module] = field(default_factory=list)

    # ---- watching --------------------------------------------------------------------------------------------

    def step(self) -> Step:
        """The step that is being computed."""
        while len(self.record.steps) <= self.done:
            self.record.steps.append(Step())
        return self.record.steps[self.done]

    def watch(self, model: nn.Module, precision: str | None = None) -> None:
        """Watch the tokens of a model; disturb its weights if this run is to differ by rounding.

        Args:
            precision: of mixed precision: "bf16", "fp16", or "no".
        """
        if model in self.watched:
            return
        self.watched.append(model)
        self.record.facts.setdefault("model", type(model).__name__)
        config: Any = getattr(model, "config", None)
        if hasattr(config, "to_json_string"):
            self.record.facts.setdefault("config", hashlib.sha256(config.to_json_string().encode()).hexdigest()[:16])
        weights = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
        computes_in = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision or "no", weights)
        self.record.facts.setdefault("computes_in", str(computes_in).removeprefix("torch."))
        if self.disturbed:
            noise.disturb_weights(model, computes_in)
        tokens = TokenWatch(model, self.step)
        if not torch.distributed.is_initialized():  # tokens of one process are looked for among all of a layout
            tokens.mark_padding(model)

    def end_step(self, models: Sequence[nn.Module]) -> None:
        """Note the gradients of a step, once: before they are clipped, or as the optimizer is about to read them."""
        if self.step().gradients:
            return
        for model in models:
            self.step().gradients.update(whole_gradients(model))

    def note_weights(self, models: Sequence[nn.Module]) -> None:
        """Note the trained weights."""
        for model in models:
            self.record.weights.update(whole_weights(model))

    # ---- sizes -----------------------------------------------------------------------------------------------

    def share_batches(self) -> None:
        """With `split_batches=True` the batch that a script asks for is that of all data ranks: one process's, too."""
        self.sizes, self.multiply = replace(self.sizes, data_ranks=1), 1

    def examples(self, per_device: int, accumulation: int) -> int:
        """Examples of an epoch: full steps, and a last one with a quarter less."""
        batch = per_device * self.sizes.data_ranks * accumulation
        return batch * (self.sizes.steps - 2) + max(1, batch - max(1, batch // 4))


class Watcher(TrainerCallback):
    """Tells `Proving` what a Trainer does."""

    def __init__(self, proving: Proving) -> None:
        self.proving = proving

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Watch the model as it is trained."""
        self.proving.in_trainer = True
        self.proving.watch(model, "bf16" if args.bf16 else "fp16" if args.fp16 else "no")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Note the gradients."""
        self.proving.end_step([model])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count the step."""
        self.proving.done += 1

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Keep the numbers."""
        self.proving.record.log(logs or {})

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Note the weights."""
        self.proving.note_weights([model])
        self.proving.in_trainer = False


class _Enough(SystemExit):
    """A loop of the script's own has made all steps of the proof."""


def run_script(script: str, is_module: bool, arguments: list[str], proving: Proving) -> None:
    """Run a script as `python SCRIPT …` does, small and watched."""
    for patch in _patches(proving):
        apply([patch])
    _turn_dropout_off(proving)
    with noise.SumsInAnotherOrder() if proving.disturbed else contextlib.nullcontext():
        _run(script, is_module, arguments, proving)
    if not proving.done:
        why = "the script made no step with a model of Transformers by Trainer, Accelerator or an optimizer of torch"
        refuse("prove", why, do="give its training script")


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
        raise _Enough(0)

    apply(_patches_of_settings(proving))
    auto.wait("prove", stop_here, cluster)
    _run(script, is_module, arguments, proving)
    auto.check_chosen()
    return chosen[0]


def _run(script: str, is_module: bool, arguments: list[str], proving: Proving) -> None:
    script, started_in = script if is_module else os.path.abspath(script), os.getcwd()
    os.chdir(proving.out / "work")
    os.environ["PWD"] = os.getcwd()
    guarded.refuse_writes_outside(proving.out.parent)
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


# ---- patches -----------------------------------------------------------------------------------------------------


def _patch(proving: Proving, target: str, function: Callable, why: str) -> Patch:
    bound = functools.partial(function, proving)
    parameters = list(inspect.signature(function).parameters.values())[1:]
    bound.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return Patch(target, around(bound), why)


def _patches_of_settings(proving: Proving) -> list[Patch]:
    of = functools.partial(_patch, proving)
    return [
        of("transformers.training_args:TrainingArguments.__post_init__", _arguments, "other folder, dtype, device"),
        of("accelerate.accelerator:Accelerator.__init__", _accelerator, "dtype, trackers"),
    ]


def _patches(proving: Proving) -> list[Patch]:
    of = functools.partial(_patch, proving)
    return [
        *_patches_of_settings(proving),
        of("transformers.trainer:Trainer.__init__", _trainer, "a few steps; watched"),
        of("transformers.trainer:Trainer.evaluation_loop", _evaluation, "predictions are compared"),
        of("transformers.modeling_utils:PreTrainedModel.from_pretrained", _noted(_from_pretrained), "small models"),
        of("transformers.modeling_utils:PreTrainedModel._from_config", _noted(_from_config), "small models"),
        of("hf_parallel.hooks.library:parallelize", _noted(_parallelize), "one process is the model itself"),
        of("torch.optim.optimizer:Optimizer.__init__", _optimizer, "steps of loops without Accelerate"),
        of("torch:Tensor.backward", _tensor_backward, "losses are compared"),
        of("torch.utils.data._utils.fetch:_MapDatasetFetcher.fetch", _fetch, "draws by example; notes the order"),
        of("accelerate.accelerator:Accelerator.prepare", _prepare, "watched"),
        *(Patch(target, functools.partial(_counted, proving), "scripts count steps") for target in _COUNTS),
        of("accelerate.accelerator:Accelerator.prepare_data_loader", _data_loader, "a few steps"),
        of("accelerate.accelerator:Accelerator.backward", _backward, "losses are compared"),
        of("accelerate.accelerator:Accelerator.clip_grad_norm_", _clip, "gradients are compared before"),
        of("accelerate.accelerator:Accelerator.log", _log, "logs are compared"),
        of("accelerate.optimizer:AcceleratedOptimizer.step", _optimizer_step, "gradients are compared"),
        of("accelerate.scheduler:AcceleratedScheduler.step", _scheduler_step, "as often as under the layout"),
        of("transformers.data.data_collator:DataCollatorForLanguageModeling.torch_mask_tokens", _mask, "by example"),
    ]


def _arguments(proving: Proving, original: Callable, self: TrainingArguments) -> None:
    """Change what stands in the way of a small run before Transformers checks it."""
    self.output_dir = str(proving.out / "output")
    self.use_cpu = True
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


def _trainer(proving: Proving, original: Callable, self: Trainer, *args: Any, **kwargs: Any) -> None:
    """Cut the data of a Trainer, set its steps, and watch it."""
    proving.driven = True
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    given, values = bound.arguments.get("args"), bound.arguments
    if given is None:
        given = values["args"] = TrainingArguments("tmp_trainer")
    _few_steps(proving, given)
    trained, evaluated_at_once = (  # of a device under the layout, where `given` may have one process's
        size // proving.multiply for size in (given.per_device_train_batch_size, given.per_device_eval_batch_size)
    )
    examples = proving.examples(trained, given.gradient_accumulation_steps)
    values["train_dataset"] = _first(values.get("train_dataset"), examples)
    evaluated, some = (
        values.get("eval_dataset"),
        max(FEW_TO_EVALUATE, evaluated_at_once * proving.sizes.data_ranks + 1),
    )
    if isinstance(evaluated, dict) and not hasattr(evaluated, "column_names"):
        values["eval_dataset"] = {name: _first(one, some) for name, one in evaluated.items()}
    else:
        values["eval_dataset"] = _first(evaluated, some)
    original(*bound.args, **bound.kwargs)
    self.add_callback(Watcher(proving))


def _few_steps(proving: Proving, args: TrainingArguments) -> None:
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
    args.max_steps = proving.sizes.steps
    args.logging_strategy, args.logging_steps, args.logging_first_step = IntervalStrategy.STEPS, 1, False
    args.dataloader_num_workers, args.disable_tqdm = 0, True
    if args.warmup_steps >= 1:  # else no weight would move
        args.warmup_steps = 0
    if args.eval_strategy != IntervalStrategy.NO:
        args.eval_strategy, args.eval_steps, args.eval_delay = IntervalStrategy.STEPS, 2, 0
    if args.save_strategy != SaveStrategy.NO:
        args.save_strategy, args.save_steps = SaveStrategy.STEPS, 2


def _first(data: Any, count: int) -> Any:
    """The first examples of a data set, or all of one that has fewer."""
    if data is None or count <= 0:
        return data
    if hasattr(data, "take") and not hasattr(data, "__len__"):
        return data.take(count)
    if isinstance(data, IterableDataset) or not hasattr(data, "__len__") or len(data) <= count:
        return data
    return data.select(range(count)) if hasattr(data, "select") else Subset(data, range(count))


def _evaluation(proving: Proving, original: Callable, self: Trainer, *args: Any, **kwargs: Any) -> Any:
    """Keep what an evaluation predicts, if the script asks for it."""
    output = original(self, *args, **kwargs)
    predicted = output.predictions
    for part in predicted if isinstance(predicted, tuple) else (predicted,):
        if isinstance(part, numpy.ndarray) and part.dtype.kind == "f":
            proving.record.predictions.append(torch.from_numpy(part.astype("float32")))
    return output


# ---- models ------------------------------------------------------------------------------------------------------


def _noted(make: Callable) -> Callable:
    """Remember the model that is made."""

    @functools.wraps(make)
    def make_noted(proving: Proving, *args: Any, **kwargs: Any) -> Any:
        model = make(proving, *args, **kwargs)
        if isinstance(model, nn.Module):
            proving.made.append(model)
        return model

    return make_noted


def _parallelize(proving: Proving, original: Callable, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
    """One process, whom nobody launched, trains the model itself."""
    return original(model, *args, **kwargs) if "WORLD_SIZE" in os.environ else model


def _from_pretrained(
    proving: Proving, original: Callable, cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any
) -> Any:
    """Load the small model of the kind that the script asks for."""
    source = pretrained_model_name_or_path
    known = {name: kwargs[name] for name in ("revision", "trust_remote_code", "token", "cache_dir") if name in kwargs}
    if not proving.sizes.keep_dtype:
        kwargs.pop("torch_dtype", None)
        kwargs["dtype"] = torch.float32
    kwargs.pop("device_map", None)
    if source is None or os.path.isfile(str(source)) or not issubclass(cls, PreTrainedModel):
        return original(cls, source, *args, **kwargs)
    config = kwargs.get("config")
    try:
        if not hasattr(config, "to_diff_dict"):
            config = cls.config_class.from_pretrained(source, **known) if cls.config_class else None
            config = config or AutoConfig.from_pretrained(source, **known)
    except OSError as error:
        refuse(str(source), "is not on this machine, and a proof downloads nothing", do="load it once", cause=error)
    small = _small_config(proving, cls, config)
    if small is None:
        return original(cls, source, *args, **kwargs)
    if "config" in kwargs:
        kwargs["config"] = small
    kwargs.pop("variant", None)
    kwargs.pop("subfolder", None)
    return original(cls, str(_written(proving, cls, small)), *args, **kwargs)


def _from_config(proving: Proving, original: Callable, cls: Any, config: Any, **kwargs: Any) -> Any:
    """Make the small model of the kind that the script asks for."""
    if not proving.sizes.keep_dtype:
        kwargs.pop("torch_dtype", None)
        kwargs["dtype"] = torch.float32
    small = _small_config(proving, cls, config)
    return original(cls, config if small is None else small, **kwargs)


def _small_config(proving: Proving, cls: type[PreTrainedModel], config: Any) -> Any:
    """The config of a small model of this kind; None where the model itself is small enough."""
    with torch.device("meta"):
        whole = cls(config)
    embeddings = whole.get_input_embeddings()
    in_vocabulary = 0 if embeddings is None else 2 * embeddings.weight.numel()
    if sum(p.numel() for p in whole.parameters()) - in_vocabulary <= SMALL_ENOUGH:
        _drop_nothing(config)
        return None
    values = small_values(config, ("vocab_size",), Layout(proving.sizes.heads, proving.sizes.stages))
    small = type(config)(**values)
    small._attn_implementation = config._attn_implementation
    _drop_nothing(small)
    layers = getattr(small, "num_hidden_layers", "few")
    proving.record.note(f"{cls.__name__} has {layers} layers of width {getattr(small, 'hidden_size', '?')}")
    return small


def _drop_nothing(config: Any) -> None:
    """Set all dropout of a config to zero, parts included."""
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
        elif hasattr(value, "to_diff_dict"):
            _drop_nothing(value)


def _written(proving: Proving, cls: Any, config: Any) -> Path:
    """The folder of the small model, which the first process that asks for it writes."""
    name = hashlib.sha256(f"{cls.__name__}{config.to_json_string()}".encode()).hexdigest()[:16]
    folder = proving.models / name
    if not folder.exists():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            model = cls(config)
        mine = folder.with_name(f"{name}-{os.getpid()}")
        model.save_pretrained(mine)
        with contextlib.suppress(OSError):  # another process was first
            mine.rename(folder)
    return folder


def _turn_dropout_off(proving: Proving) -> None:
    functional = torch.nn.functional
    original = functional.dropout

    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if p > 0 and training:
            proving.record.note("dropout is off")
        return original(input, 0.0, training, inplace)

    functional.dropout = dropout


# ---- data --------------------------------------------------------------------------------------------------------


def _fetch(proving: Proving, original: Callable, self: _MapDatasetFetcher, possibly_batched_index: Any) -> Any:
    """Read a batch example by example, each under random numbers of its own; note which ones training reads."""
    indices = possibly_batched_index
    if not self.auto_collation:
        return original(self, indices)
    if torch.is_grad_enabled():
        proving.record.examples.extend(int(index) for index in indices if isinstance(index, int))
    examples = []
    for index in indices:
        with _drawing_by(index):
            examples.append(self.dataset[index])
    with _drawing_by(len(examples)):
        before = _random_state()
        batch = self.collate_fn(examples)
        drew = before != _random_state()
    if drew and proving.sizes.data_ranks > 1:
        name = type(self.collate_fn).__name__ if not inspect.isfunction(self.collate_fn) else self.collate_fn.__name__
        why = "draws random numbers for a whole batch, which is another on each data rank"
        refuse(f"prove: the collator {name}", why, do="prove a layout with one data rank, such as tp=2")
    return batch


@contextlib.contextmanager
def _drawing_by(seed: Any) -> Iterator[None]:
    """Make random numbers depend on this seed alone, inside the context."""
    number = int(seed) if isinstance(seed, int) else abs(hash(str(seed)))
    numpy_state, python_state = numpy.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(number)
        numpy.random.seed(number % (1 << 31))
        random.seed(number)
        try:
            yield
        finally:
            numpy.random.set_state(numpy_state)
            random.setstate(python_state)


def _random_state() -> tuple[bytes, bytes, int]:
    state: Any = numpy.random.get_state()
    return (
        torch.get_rng_state().numpy().tobytes(),
        state[1].tobytes() + bytes([state[2] % 251]),
        hash(random.getstate()),
    )


def _mask(
    proving: Proving,
    original: Callable,
    self: Any,
    inputs: Any,
    special_tokens_mask: Any = None,
    *args: Any,
    **kw: Any,
) -> Any:
    """Mask the tokens of each example under random numbers of its own: one process draws for larger batches."""
    masked = []
    for index in range(len(inputs)):
        special = None if special_tokens_mask is None else special_tokens_mask[index : index + 1]
        kept = int((inputs[index] != self.tokenizer.pad_token_id).sum())  # padding depends on the batch
        with _drawing_by(int(inputs[index, :kept].sum())):
            part = inputs[index : index + 1, :kept].clone()
            ids, labels = original(self, part, None if special is None else special[:, :kept], *args, **kw)
        filler = inputs[index : index + 1, kept:]
        masked.append((torch.cat([ids, filler], 1), torch.cat([labels, torch.full_like(filler, -100)], 1)))
    return tuple(torch.cat(parts) for parts in zip(*masked, strict=True))


# ---- loops of the script's own -----------------------------------------------------------------------------------


def _accelerator(proving: Proving, original: Callable, self: Accelerator, *args: Any, **kwargs: Any) -> None:
    """Make an Accelerator for CPUs, in fp32 unless the dtype is kept, that tracks nothing."""
    proving.driven = True
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    bound.arguments["cpu"] = True
    bound.arguments.pop("log_with", None)
    if not proving.sizes.keep_dtype:
        bound.arguments["mixed_precision"] = "no"
    if bound.arguments.get("gradient_accumulation_steps", 1) > ACCUMULATION:
        bound.arguments["gradient_accumulation_steps"] = ACCUMULATION
        proving.record.note(f"gradient_accumulation_steps is {ACCUMULATION}")
    original(*bound.args, **bound.kwargs)


def _prepare(proving: Proving, original: Callable, self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    """Watch the models that a loop prepares."""
    prepared = original(self, *args, **kwargs)
    if not _of_a_trainer():
        for model in (one for one in args if isinstance(one, nn.Module)):
            proving.watch(self.unwrap_model(model), self.mixed_precision)
            if not hasattr(model, "no_sync"):  # as models of several processes have
                vars(model)["no_sync"] = contextlib.nullcontext
    return prepared


def _of_a_trainer() -> bool:
    """Is this called by a Trainer, which tells of its model itself?"""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "transformers.trainer":
            return True
        frame = frame.f_back
    return False


def _data_loader(
    proving: Proving, original: Callable, self: Accelerator, data_loader: DataLoader, *args: Any, **kwargs: Any
) -> Any:
    """Cut the data of a loop; one process takes the batches of all data ranks."""
    sampler: Any = getattr(data_loader, "batch_sampler", None)
    if not _of_a_trainer() and self.split_batches:
        proving.share_batches()
    if not _of_a_trainer() and isinstance(getattr(sampler, "batch_size", None), int):
        own = min(sampler.batch_size, max(EXAMPLES, proving.sizes.micro_batches))
        examples = proving.examples(own, self.gradient_accumulation_steps)
        order: Any = sampler.sampler
        if isinstance(order, RandomSampler):
            if proving.sizes.data_ranks > 1:  # Accelerate fills an incomplete batch with repeated examples
                batch = own * proving.sizes.data_ranks * self.gradient_accumulation_steps
                examples = max(batch, examples // batch * batch)
                proving.record.note("the loop trains on whole batches: Accelerate fills the last one of an epoch")
            order._num_samples = min(examples, len(order.data_source))
        elif isinstance(order, SequentialSampler):
            order.data_source = range(min(examples, len(order.data_source)))  # type: ignore[assignment]
        sampler.batch_size = own * proving.multiply
        object.__setattr__(data_loader, "batch_size", sampler.batch_size)
        object.__setattr__(data_loader, "num_workers", 0)
    return original(self, data_loader, *args, **kwargs)


def _backward(proving: Proving, original: Callable, self: Accelerator, loss: Any, *args: Any, **kwargs: Any) -> None:
    """Keep the loss of a loop."""
    if not proving.in_trainer:
        proving.record.losses.append(float(loss.detach()))
    original(self, loss, *args, **kwargs)


def _clip(proving: Proving, original: Callable, self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    """Note the gradients before they are clipped."""
    if self.gradient_state.sync_gradients:
        proving.end_step(proving.watched)
    return original(self, *args, **kwargs)


def _log(proving: Proving, original: Callable, self: Accelerator, values: Any, *args: Any, **kwargs: Any) -> None:
    """Keep the numbers that a loop logs."""
    if not proving.in_trainer:
        proving.record.log(values)
    original(self, values, *args, **kwargs)


def _optimizer_step(
    proving: Proving, original: Callable, self: AcceleratedOptimizer, *args: Any, **kwargs: Any
) -> Any:
    """Note the gradients of a loop, and end it after the last step of the proof."""
    counts = self.gradient_state.sync_gradients and not proving.in_trainer
    if counts:
        proving.end_step(proving.watched)
    result = original(self, *args, **kwargs)
    if counts:
        _loop_has_stepped(proving)
    return result


def _loop_has_stepped(proving: Proving) -> None:
    proving.done += 1
    if proving.done >= proving.sizes.steps:
        proving.note_weights(proving.watched)
        proving.record.note(f"the script was stopped after {proving.done} steps; what follows is not proved")
        raise _Enough(0)


def _optimizer(proving: Proving, original: Callable, self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
    """Watch the models of a loop that has neither Trainer nor Accelerator, and count its steps."""
    original(self, *args, **kwargs)
    own = {id(parameter) for group in self.param_groups for parameter in group["params"]}
    models = [model for model in proving.made if any(id(parameter) in own for parameter in model.parameters())]
    if proving.driven or not models:
        return
    if proving.sizes.data_ranks > 1:
        why = "without Trainer or Accelerator deals the data to its ranks itself"
        refuse("prove: a loop", why, do="prove a layout with one data rank, such as tp=2")
    for model in models[-1:]:  # made of the others
        proving.watch(model)
    self.register_step_pre_hook(lambda *_: None if proving.driven else proving.end_step(proving.watched))
    self.register_step_post_hook(lambda *_: None if proving.driven else _loop_has_stepped(proving))


def _tensor_backward(proving: Proving, original: Callable, self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """Keep the loss of such a loop."""
    if not proving.driven and self.numel() == 1:
        proving.record.losses.append(float(self.detach()))
    original(self, *args, **kwargs)


def _counted(proving: Proving, original: property) -> property:
    """Tell a script how many data ranks one process stands for; libraries go on with one process."""

    def count(self: Any) -> int:
        module = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0]
        own = original.__get__(self)
        return own if module in _LIBRARIES else own * proving.multiply

    return property(count)


def _scheduler_step(
    proving: Proving, original: Callable, self: AcceleratedScheduler, *args: Any, **kwargs: Any
) -> None:
    """Step as often as the data ranks together do."""
    repeated = 1 if proving.in_trainer or self.split_batches else proving.multiply
    for _ in range(repeated):
        original(self, *args, **kwargs)

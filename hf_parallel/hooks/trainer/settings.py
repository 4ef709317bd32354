"""Settings of TrainingArguments that cannot hold under a layout, refused by name before anything trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_parallel.ask.config import SpecError
from hf_parallel.ask.keys.layers import check_compiled
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.pipeline.schedules import count_micro_batches
from hf_parallel.axes.recompute import check_layers, check_selective
from hf_parallel.hooks import model_parts, runtime
from hf_parallel.hooks.accelerate.shares import check_batch_size, check_micro_batches
from hf_parallel.hooks.trainer.engines import check_engines
from hf_parallel.hooks.trl import trainers as trl

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments


def check_arguments(args: TrainingArguments) -> None:
    """Refuse what this version cannot do under the active layout, by name."""
    config = runtime.mesh().config
    check_engines(args)
    block = config.world_size // config.data_parallel_size
    # Is it asked for, how it is spelled, what is missing, what works?
    refusals: list[tuple[bool, str, str, str]] = [
        (args.fp16 and runtime.mesh().device.type == "cpu", "fp16=True", "loss scaling on CPUs", "bf16=True"),
        (args.auto_find_batch_size, "auto_find_batch_size=True", "retrying sharded models", "a fixed batch size"),
        (
            args.fp16_full_eval and config.precision in ("fp8", "int8"),
            f"fp16_full_eval=True with precision={config.precision}",
            "scaling of products in fp16",
            "bf16_full_eval=True",
        ),
        (args.parallelism_config is not None, "parallelism_config", "a second layout beside --parallel", "the spec"),
        (
            args.train_sampling_strategy == "batch_rebalance" and block > 1,
            "train_sampling_strategy=batch_rebalance",
            "rebalancing by process",
            "group_by_length",
        ),
        (
            "underflow_overflow" in args.debug and config.tp_size > 1,
            "debug=underflow_overflow",
            "watching split weights",
            "dp_shard in the place of tp",
        ),
    ]
    for asked, spelled, what, works in refusals:
        if asked:
            refuse(spelled, f"{what} is not part of this version", works)
    if getattr(args, "torch_compile", False):
        check_compiled(config, "torch_compile=True")
    if config.recompute_way != "none":
        check_layers(config.recompute_way, _read_checkpointing_settings(args))
    if config.recompute_way == "selective":
        check_selective(_read_checkpointing_settings(args))
    if args.use_liger_kernel:
        model_parts.check_recomputation(args, config)
    # Every data rank gets an example of a batch.
    ranks = 1 if args.accelerator_config.split_batches else config.data_parallel_size
    names = ["per_device_train_batch_size"] * (not config.pack_tokens)
    names += ["per_device_eval_batch_size"] * is_evaluating(args)
    for name in names:
        check_batch_size(getattr(args, name) * ranks, name, getattr(args, name))
    check_micro_batches(args.per_device_train_batch_size * ranks)
    if config.pp_size > 1 and not config.shares_batches:  # unlike batches are filled up to what the schedule takes
        rows = args.per_device_train_batch_size
        try:
            count_micro_batches(rows, config)
        except SpecError as error:
            refuse(f"per_device_train_batch_size={rows}", error)


def _read_checkpointing_settings(args: TrainingArguments) -> dict[str, object]:
    """Transformers 5.23 has renamed them."""
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if getattr(args, name, False):
            return dict(getattr(args, f"{name}_kwargs", None) or {})
    return {}


def is_evaluating(args: TrainingArguments) -> bool:
    """Do these arguments ask for evaluations in the middle of a training?"""
    return str(getattr(args.eval_strategy, "value", args.eval_strategy)) != "no"


def check_shared_examples(trainer: Trainer) -> None:
    """Refuse `batch_shares` where the loss of a data rank's examples is no mean over each of them.

    Raises:
        SpecError: the loss compares examples of a batch, or the trainer shares out what it generates.
    """
    config = runtime.mesh().config
    if not config.shares_batches:
        return
    what = f"batch_shares={config.batch_shares}"
    others = [cls for cls in type(trainer).__mro__ if cls.__module__.startswith(("trl.", "sentence_transformers."))]
    if others and trl.count_trl_rows_per_example(trainer) is None:
        refuse(what, f"{others[0].__name__} compares examples of a data rank's batch", "batch_shares=even")
    if trainer.can_return_loss:
        refuse(what, f"the loss of {type(trainer.model).__name__} compares examples", "batch_shares=even")

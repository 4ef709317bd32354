"""Settings of TrainingArguments that cannot hold under a layout, refused by name before anything trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.ask.keys.layers import check_compiled
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.pipeline.schedules import micro_batch_count
from hf_parallel.axes.recompute import check_layers, check_selective
from hf_parallel.hooks import model_parts, runtime

if TYPE_CHECKING:
    from transformers import TrainingArguments


def check_arguments(args: TrainingArguments) -> None:
    """Refuse what this version cannot do under the active layout, by name."""
    config = runtime.mesh().config
    for asked, spelled, what, works in _refusals(args, config):
        if asked:
            refuse(spelled, f"{what} is not part of this version", works)
    if getattr(args, "torch_compile", False):
        check_compiled(config, "torch_compile=True")
    if config.activation_checkpointing != "none":
        check_layers(config.activation_checkpointing, _checkpointing_settings(args))
    if config.activation_checkpointing == "selective":
        check_selective(_checkpointing_settings(args))
    if args.use_liger_kernel:
        model_parts.check_recomputation(args, config)
    if config.pp_size > 1:
        _check_micro_batches(args.per_device_train_batch_size, config)


def _checkpointing_settings(args: TrainingArguments) -> dict[str, object]:
    """Transformers 5.23 has renamed them."""
    for name in ("activation_checkpointing", "gradient_checkpointing"):
        if getattr(args, name, False):
            return dict(getattr(args, f"{name}_kwargs", None) or {})
    return {}


def _refusals(args: TrainingArguments, config: ParallelConfig) -> list[tuple[bool, str, str, str]]:
    """Is it asked for, how it is spelled, what is missing, what works."""
    block = config.world_size // config.data_parallel_size
    return [
        (args.fp16 and runtime.mesh().device.type == "cpu", "fp16=True", "loss scaling on CPUs", "bf16=True"),
        (bool(args.fsdp), f"fsdp={args.fsdp}", "a second sharding beside --parallel", "dp_shard in the spec"),
        (bool(args.deepspeed), "deepspeed", "a second engine beside --parallel", "dp_shard in the spec"),
        (args.auto_find_batch_size, "auto_find_batch_size=True", "retrying sharded models", "a fixed batch size"),
        (args.parallelism_config is not None, "parallelism_config", "a second layout beside --parallel", "the spec"),
        (
            args.train_sampling_strategy == "batch_rebalance" and block > 1,
            "train_sampling_strategy=batch_rebalance",
            "rebalancing by process",
            "group_by_length",
        ),
        (
            "adafactor" in str(args.optim).lower(),
            "optim=adafactor",
            "row and column statistics of shards",
            "optim=adamw_torch",
        ),
        (
            "underflow_overflow" in args.debug and config.tp_size > 1,
            "debug=underflow_overflow",
            "watching split weights",
            "dp_shard in the place of tp",
        ),
        (args.fp16_full_eval, "fp16_full_eval=True", "casting sharded models", "bf16=True"),
        (args.bf16_full_eval, "bf16_full_eval=True", "casting sharded models", "bf16=True"),
    ]


def _check_micro_batches(rows: int, config: ParallelConfig) -> None:
    try:
        micro_batch_count(rows, config)
    except SpecError as error:
        refuse(f"per_device_train_batch_size={rows}", error)

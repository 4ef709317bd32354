"""`hf-parallel migrate FILE`: the spec that stands for another program's configuration, and what became of each key.

Files of accelerate (FSDP 1 and 2, DeepSpeed, Megatron-LM, parallelism_config), DeepSpeed's JSON, axolotl's and
torchtune's YAML, and Python scripts whose TrainingArguments ask for fsdp or deepspeed. Nothing is run or changed.

Exit codes: 0; 2 if the file is none of these, or what it asks for cannot hold together.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.spec import SpecError, read_yaml, refuse, spell, suggest_file
from hf_parallel.planner.batch import StepBatch

# ---- The meaning of a foreign key -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Became:
    """The meaning of a foreign key here: keys of the spec; or an argument of the script's; or nothing, and why."""

    spec: Mapping[str, object] = field(default_factory=dict)
    why: str = ""


Rule: TypeAlias = Callable[[str], Became] | str
_ALIKE = "every layout does so"
_ARGUMENT = "stays the script's own"


def _make_size_rule(key: str) -> Rule:
    """Return the rule for a number of ranks; 1 is the default, and so is all that is left."""
    return lambda value: Became({key: int(value)} if int(value) != 1 else {}, "" if int(value) != 1 else "one rank")


def _make_switch_rule(**spec: object) -> Rule:
    return lambda value: Became(spec) if _is_true(value) else Became(why="off, as by default")


def _is_true(value: object) -> bool:
    return str(value).lower() in ("true", "1", "yes", "on")


def _read_strategy(value: str) -> Became:
    """Read FSDP 1's strategy, given as a word or a number."""
    name = value.upper()
    found: dict[str, dict[str, object]] = {
        **dict.fromkeys(("FULL_SHARD", "1"), {"zero_stage": 3}),
        **dict.fromkeys(("SHARD_GRAD_OP", "2"), {"zero_stage": 2}),
        **dict.fromkeys(("NO_SHARD", "3"), {"zero_stage": 0}),
        **dict.fromkeys(("HYBRID_SHARD", "4"), {"zero_stage": 3, "dp_replicate": "MACHINES"}),
        **dict.fromkeys(("HYBRID_SHARD_ZERO2", "5"), {"zero_stage": 2, "dp_replicate": "MACHINES"}),
    }
    if name in ("TRUE", "FALSE"):  # FSDP 2's reshard_after_forward
        return Became({"zero_stage": 3 if name == "TRUE" else 2})
    return Became(found[name]) if name in found else Became(why="not a known strategy: nothing stands for it")


_FSDP: dict[str, Rule] = {
    "sharding_strategy": _read_strategy,
    "reshard_after_forward": _read_strategy,
    "offload_params": _make_switch_rule(offload="cpu"),
    "cpu_offload": _make_switch_rule(offload="cpu"),
    "activation_checkpointing": _make_switch_rule(activation_checkpointing="full"),
    "version": "sharding is FSDP2's",
    "auto_wrap_policy": "each transformer block is a group, found by itself",
    "transformer_layer_cls_to_wrap": "each transformer block is a group, found by itself",
    "transformer_cls_names_to_wrap": "each transformer block is a group, found by itself",
    "min_num_params": "each transformer block is a group, found by itself",
    "backward_prefetch": "FSDP2 gathers the next block ahead",
    "backward_prefetch_policy": "FSDP2 gathers the next block ahead",
    "forward_prefetch": "FSDP2 gathers the next block ahead",
    "limit_all_gathers": "FSDP2 gathers the next block ahead",
    "state_dict_type": "a checkpoint is read by any layout, and by plain Transformers",
    "save_strategy": "a checkpoint is read by any layout, and by plain Transformers",
    "use_orig_params": "parameters keep their names and shapes",
    "cpu_ram_efficient_loading": "each rank reads its own slices",
    "sync_module_states": "each rank reads its own slices",
    "mixed_precision_policy": f"{_ARGUMENT}: bf16=True, or dtype of the model",
    "xla": "there is no TPU layout",
    "xla_fsdp_v2": "there is no TPU layout",
    "xla_fsdp_grad_ckpt": "there is no TPU layout",
}
_TUNED = "its own engine's tuning"
_ZERO: dict[str, Rule] = {
    "stage": lambda value: Became({"zero_stage": int(value)}),
    "zero_quantized_weights": _make_switch_rule(quantize_weights="int8"),
    "zero_quantized_gradients": _make_switch_rule(quantize_gradients="int4"),
    "zero_hpz_partition_size": _make_size_rule("hierarchical_shard"),
    "mics_shard_size": lambda value: Became({"dp_shard": int(value), "dp_replicate": -1} if int(value) > 0 else {}),
    "stage3_gather_16bit_weights_on_model_save": "saved models are always whole",
    "gather_16bit_weights_on_model_save": "saved models are always whole",
    **dict.fromkeys(
        (
            *("overlap_comm", "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "round_robin_gradients"),
            *("allgather_partitions", "allgather_bucket_size", "sub_group_size", "stage3_prefetch_bucket_size"),
            *("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance"),
            *("stage3_module_granularity_threshold", "ignore_unused_parameters", "legacy_stage1"),
            *("max_live_parameters", "max_reuse_distance", "module_granularity_threshold", "prefetch_bucket_size"),
            *("mics_hierarchical_params_gather", "zero_quantized_nontrainable_weights", "elastic_checkpoint"),
        ),
        _TUNED,
    ),
}
_BATCH = {
    "train_batch_size": "per_device_train_batch_size, gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
}
#: Sequences of a device and micro-step, as files spell it.
_ROWS = ("train_micro_batch_size_per_gpu", "micro_batch_size", "batch_size", "per_device_train_batch_size")
_DEEPSPEED: dict[str, Rule] = {
    **{key: f"{_ARGUMENT}: {name}" for key, name in _BATCH.items()},
    "optimizer": f"{_ARGUMENT}: optim, learning_rate, weight_decay, adam_beta1, …",
    "scheduler": f"{_ARGUMENT}: lr_scheduler_type, warmup_steps",
    "bf16": f"{_ARGUMENT}: bf16=True",
    "fp16": f"{_ARGUMENT}: fp16=True",
    "amp": f"{_ARGUMENT}: fp16=True",
    "sequence_parallel_size": lambda value: Became(
        {"cp": int(value), "context_parallel": "ulysses"} if int(value) > 1 else {}, "one rank"
    ),
    "activation_checkpointing.partition_activations": "sequence parallelism of `tp` cuts them anyway",
    "activation_checkpointing.cpu_checkpointing": _make_switch_rule(activation_offload=True),
    "tensor_parallel.autotp_size": _make_size_rule("tp"),
    "pipeline.stages": _make_size_rule("pp"),
    "steps_per_print": "logging_steps of the script",
    "wall_clock_breakdown": "monitor=full of a spec says where time goes",
    "zero_allow_untested_optimizer": "optimizers that cannot hold are refused by name",
    "zero_force_ds_cpu_optimizer": _TUNED,
    "communication_data_type": _TUNED,
    "prescale_gradients": _TUNED,
    "gradient_predivide_factor": _TUNED,
    "sparse_gradients": _TUNED,
    "aio": _TUNED,
    "comms_config": "monitor=full of a spec says where time goes",
    "comms_logger": "monitor=full of a spec says where time goes",
    "monitor_config": "report_to of the script",
    "compile": f"{_ARGUMENT}: torch_compile=True, or compile=regional of a spec",
    "_comment": "a note",
    "flops_profiler": "hf-parallel report shows the step's parts",
    "tensorboard": "report_to of the script",
    "wandb": "report_to of the script",
}
_ACCELERATE_DEEPSPEED: dict[str, Rule] = {
    "zero_stage": _ZERO["stage"],
    "gradient_accumulation_steps": f"{_ARGUMENT}: gradient_accumulation_steps",
    "gradient_clipping": f"{_ARGUMENT}: max_grad_norm",
    "zero3_init_flag": "each rank reads its own slices",
    "zero3_save_16bit_model": "saved models are always whole",
    "deepspeed_multinode_launcher": "hf-parallel launch, torchrun, Slurm or Ray start the machines",
    "deepspeed_hostfile": "hf-parallel launch, torchrun, Slurm or Ray start the machines",
    "deepspeed_inclusion_filter": "hf-parallel launch, torchrun, Slurm or Ray start the machines",
    "deepspeed_exclusion_filter": "hf-parallel launch, torchrun, Slurm or Ray start the machines",
    "deepspeed_moe_layer_cls_names": "layers with experts are found by themselves",
}
#: Types of accelerate under which every process has the whole model.
_COPIES = ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_HPU")
_PARALLELISM: dict[str, Rule] = {
    "dp_replicate_size": _make_size_rule("dp_replicate"),
    "dp_shard_size": _make_size_rule("dp_shard"),
    "tp_size": _make_size_rule("tp"),
    "cp_size": _make_size_rule("cp"),
    "sp_size": _make_size_rule("cp"),
    "cp_comm_strategy": lambda value: Became({"context_parallel": "allgather" if "gather" in str(value) else "ring"}),
    "cp_backend": "context parallelism is this package's own",
    "sp_backend": "context parallelism is this package's own",
    "cp_handler": "context parallelism is this package's own",
}
_MEGATRON: dict[str, Rule] = {
    "tp_degree": _make_size_rule("tp"),
    "pp_degree": _make_size_rule("pp"),
    "num_micro_batches": lambda value: Became({"pipeline_microbatches": int(value)}),
    "sequence_parallelism": lambda value: Became(
        {} if _is_true(value) else {"sequence_parallel": False}, "on with `tp`"
    ),
    "recompute_activations": _make_switch_rule(activation_checkpointing="selective"),
    "use_distributed_optimizer": _make_switch_rule(zero_stage=1),
    "gradient_clipping": f"{_ARGUMENT}: max_grad_norm",
}
_TORCHTUNE: dict[str, Rule] = {
    "tensor_parallel_dim": _make_size_rule("tp"),
    "context_parallel_dim": _make_size_rule("cp"),
    "data_parallel_shard_dim": _make_size_rule("dp_shard"),
    "data_parallel_replicate_dim": _make_size_rule("dp_replicate"),
    "fsdp_cpu_offload": _make_switch_rule(offload="cpu"),
    "fsdp_reshard_after_forward": _read_strategy,
    "enable_activation_checkpointing": _make_switch_rule(activation_checkpointing="full"),
    "enable_activation_offloading": _make_switch_rule(activation_offload=True),
    "custom_sharded_layers": "each transformer block is a group, found by itself",
    "tensor_parallel_plan": "weights are split by the model's own plan or structure",
}
_AXOLOTL: dict[str, Rule] = {
    "tensor_parallel_size": _make_size_rule("tp"),
    "context_parallel_size": _make_size_rule("cp"),
    "sequence_parallel_degree": _make_size_rule("cp"),
    "dp_shard_size": _make_size_rule("dp_shard"),
    "dp_replicate_size": _make_size_rule("dp_replicate"),
    "expert_parallel_size": _make_size_rule("ep"),
    "ring_attn_func": "context_parallel=ring, ulysses, allgather or hybrid:U says how cp attends",
    "heads_k_stride": "context_parallel=ring, ulysses, allgather or hybrid:U says how cp attends",
    "fsdp_version": _FSDP["version"],
}

# ---- The program that a file belongs to, and its keys ---------------------------------------------------------------

Keys: TypeAlias = Iterator[tuple[str, object, Rule | None]]


def _read_keys_of(values: Mapping, rules: Mapping[str, Rule], shown: str = "", prefix: str = "") -> Keys:
    """Return every key of a mapping with its rule, if it is known; `prefix`: what may stand before each key."""
    for key, value in values.items():
        yield f"{shown}{key}", value, rules.get(key.removeprefix(prefix), rules.get(key))


def _read_deepspeed(values: Mapping, folder: str) -> Keys:
    """Yield the keys of DeepSpeed's JSON, or of the mapping that a script hands over."""
    for key, value in values.items():
        if key == "zero_optimization" and isinstance(value, Mapping):
            yield from _zero(value)
        elif isinstance(value, Mapping) and key not in _DEEPSPEED:
            for inner, chosen in value.items():
                yield f"{key}.{inner}", chosen, _DEEPSPEED.get(f"{key}.{inner}")
        else:
            yield key, value, _DEEPSPEED.get(key)


def _zero(values: Mapping) -> Keys:
    devices = {}
    for key, value in values.items():
        if key in ("offload_optimizer", "offload_param", "cpu_offload"):
            device = (
                value.get("device", "none") if isinstance(value, Mapping) else "cpu" if _is_true(value) else "none"
            )
            path = value.get("nvme_path") if isinstance(value, Mapping) else None
            devices[key] = str(device), path
        else:
            yield f"zero_optimization.{key}", value, _ZERO.get(key)
    yield from _offload(devices, "zero_optimization.")


def _offload(devices: Mapping[str, tuple[str, str | None]], shown: str) -> Keys:
    """Yield where states and parameters rest, which together are one key."""
    path = next((path for _, path in devices.values() if path), None) or "/local_nvme"
    kinds = {key.removeprefix("offload_").partition("_")[0]: device for key, (device, _) in devices.items()}
    states, weights = kinds.get("optimizer", kinds.get("cpu", "none")), kinds.get("param", "none")
    way = {"none": "none", "cpu": "cpu", "nvme": f"nvme_all:{path}"}.get(weights, "none")
    if way in ("none", "cpu") and states == "nvme":
        way = f"nvme:{path}"
    elif way == "none" and states == "cpu":
        way = "optimizer"
    for key, (device, _) in devices.items():
        yield f"{shown}{key}", device, (lambda value: Became({"offload": way} if way != "none" else {}, "resident"))


def _read_accelerate(values: Mapping, folder: str) -> Keys:
    fsdp, deepspeed = values.get("fsdp_config") or {}, values.get("deepspeed_config") or {}
    if values.get("distributed_type") in _COPIES and not values.get("parallelism_config"):
        yield "distributed_type", values["distributed_type"], lambda _: Became({"dp_replicate": -1})
    yield from _read_keys_of(fsdp, _FSDP, "fsdp_config.", "fsdp_")
    offloaded = {}
    for key, value in deepspeed.items():
        if key.endswith("_device") and key.startswith("offload_"):
            name = key.removesuffix("_device")
            offloaded[name] = str(value), deepspeed.get(f"{name}_nvme_path")
        elif key == "deepspeed_config_file":
            yield from _read_deepspeed(_read_json(os.path.join(folder, str(value))), folder)
        elif not key.endswith("_nvme_path"):
            yield f"deepspeed_config.{key}", value, _ACCELERATE_DEEPSPEED.get(key)
    yield from _offload(offloaded, "deepspeed_config.")
    yield from _read_keys_of(
        values.get("parallelism_config") or {}, _PARALLELISM, "parallelism_config.", "parallelism_config_"
    )
    yield from _read_keys_of(values.get("megatron_lm_config") or {}, _MEGATRON, "megatron_lm_config.", "megatron_lm_")
    if values.get("mixed_precision", "no") != "no":
        yield "mixed_precision", values["mixed_precision"], f"{_ARGUMENT}: --mixed_precision, or bf16=True"


def _read_axolotl(values: Mapping, folder: str) -> Keys:
    yield from _read_keys_of({key: value for key, value in values.items() if key in _AXOLOTL}, _AXOLOTL)
    for key in ("micro_batch_size", "gradient_accumulation_steps"):
        if key in values:
            name = "per_device_train_batch_size" if key == "micro_batch_size" else key
            yield key, values[key], f"{_ARGUMENT}: {name}"
    if isinstance(values.get("fsdp"), list):
        yield from _read_fsdp_words(values["fsdp"])
    yield from _read_keys_of(values.get("fsdp_config") or {}, _FSDP, "fsdp_config.", "fsdp_")
    if isinstance(values.get("deepspeed"), str):
        yield from _read_deepspeed(_read_json(os.path.join(folder, values["deepspeed"])), folder)


def _read_torchtune(values: Mapping, folder: str) -> Keys:
    yield from _read_keys_of({key: value for key, value in values.items() if key in _TORCHTUNE}, _TORCHTUNE)
    for key in ("batch_size", "gradient_accumulation_steps"):
        if key in values:
            name = "per_device_train_batch_size" if key == "batch_size" else key
            yield key, values[key], f"{_ARGUMENT}: {name}"


def _read_fsdp_words(asked: str | list[str]) -> Keys:
    """Yield the words of TrainingArguments' `fsdp="full_shard auto_wrap offload"`, or of such a list."""
    for word in asked.split() if isinstance(asked, str) else asked:
        rule = {"auto_wrap": _FSDP["auto_wrap_policy"], "offload": _FSDP["offload_params"]}.get(word, _read_strategy)
        value = {"offload": True}.get(word, word)
        yield f"fsdp {word}", value, rule


def _read_script(source: str, folder: str) -> Keys:
    """Yield fsdp, fsdp_config and deepspeed of any call in a script, as far as they are written out."""
    for node in ast.walk(ast.parse(source)):
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            if keyword.arg not in ("fsdp", "fsdp_config", "deepspeed"):
                continue
            try:
                value = ast.literal_eval(keyword.value)
            except ValueError:
                refuse(keyword.arg, f"line {keyword.value.lineno} computes it", do="give migrate the file it reads")
            if not value:
                continue  # off, as by default
            yield from _read_argument(keyword.arg, value, folder)


def _read_argument(name: str, value: object, folder: str) -> Keys:
    """Yield the keys in one of Trainer's arguments, from a script or a command line."""
    if name == "fsdp" and value is True:
        yield name, value, "dp_shard is all that is left; fsdp_config may say more"
        return
    if name == "fsdp":
        yield from _read_fsdp_words(value)  # type: ignore[arg-type]
        return
    if isinstance(value, Mapping):
        values = value
    elif str(value).lstrip().startswith("{"):
        try:
            values = json.loads(str(value))
        except ValueError as error:
            refuse(value, f"is no JSON ({error})", cause=error)
    else:
        values = _read_json(os.path.join(folder, str(value)))
    if name == "fsdp_config":
        yield from _read_keys_of(values, _FSDP, "fsdp_config.", "fsdp_")
    else:
        yield from _read_deepspeed(values, folder)


def _read_json(path: str) -> Mapping:
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except (OSError, ValueError) as error:
        refuse(path, f"cannot be read as JSON ({error})", cause=error)
    if not isinstance(values, dict):
        refuse(path, "holds no mapping")
    return values


@dataclass(frozen=True)
class Source:
    """A file of another program."""

    program: str
    keys: list[tuple[str, object, Rule | None]]
    processes: int | None = None
    machines: int = 1

    def number(self, *names: str) -> int | None:
        """Return the number that a key of one of these names has, whatever section it stands in."""
        found = [value for key, value, _ in self.keys if key.rpartition(".")[2] in names]
        return next((int(str(value)) for value in found if str(value).isdigit()), None)


def read(path: str) -> Source:
    """Find out whose file it is, and read its keys.

    Raises:
        SpecError: it is none that is known, or cannot be read.
    """
    folder = os.path.dirname(path)
    if path.endswith(".py"):
        try:
            with open(path, encoding="utf-8") as file:
                return Source("script", list(_read_script(file.read(), folder)))
        except (OSError, SyntaxError) as error:
            refuse(path, f"cannot be read as Python ({error})", cause=error)
    values = _read_json(path) if path.endswith(".json") else read_yaml(path)
    kinds = {  # a key that only such a file has -> its program and reader
        ("distributed_type", "compute_environment", "parallelism_config"): ("accelerate", _read_accelerate),
        ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"): ("DeepSpeed", _read_deepspeed),
        ("base_model",): ("axolotl", _read_axolotl),
        tuple(_TORCHTUNE): ("torchtune", _read_torchtune),
    }
    for marks, (program, reader) in kinds.items():
        if any(mark in values for mark in marks):
            processes = values.get("num_processes")
            machines = int(values.get("num_machines") or 1)
            return Source(program, list(reader(values, folder)), int(processes) if processes else None, machines)
    known = "accelerate, DeepSpeed, axolotl, torchtune, or a script with fsdp or deepspeed"
    refuse(path, f"is no configuration of {known}", do="hf-parallel plan MODEL --gpus N proposes a spec")


# ---- The spec, and what became of each key -------------------------------------------------------------------------


def migrate_source(source: Source) -> tuple[str, list[tuple[str, str, str]]]:
    """Return the spec, and for each key: as it is written, what stands for it, why.

    Raises:
        SpecError: two keys ask for different things, or what they ask for cannot hold together.
    """
    spec: dict[str, object] = {}
    rows = []
    for key, value, rule in source.keys:
        try:
            why = "not known here: nothing stands for it"
            became = rule(str(value)) if callable(rule) else Became(why=rule or why)
        except (TypeError, ValueError) as error:
            refuse(f"{key}: {value}", "is no value that is known", do="write a number", cause=error)
        # Replicas of hybrid shards depend on the machines, and one machine has none.
        replicas = source.machines if source.machines > 1 else None
        settled = {name: replicas if asked == "MACHINES" else asked for name, asked in became.spec.items()}
        chosen = {name: asked for name, asked in settled.items() if asked is not None}
        for name, asked in chosen.items():
            if spec.setdefault(name, asked) != asked:
                other = f"another key for {name}={spec[name]}"
                refuse(f"{key}={value}", f"asks for {name}={asked}, {other}", do="keep one")
        shown = ",".join(f"{name}={spell(asked)}" for name, asked in chosen.items())
        text = json.dumps(value) if isinstance(value, Mapping) else str(value)
        text = text if len(text) <= 32 else f"{text[:31]}…"
        rows.append((f"{key}: {text}", shown, became.why if not shown else ""))
    if spec.get("zero_stage") == 3:
        del spec["zero_stage"]  # the default
    spec = {"dp_shard": -1, **spec} if spec.get("dp_replicate") != -1 or "dp_shard" in spec else spec
    text = ",".join(f"{name}={spell(asked)}" for name, asked in spec.items())
    config = ParallelConfig.parse(text)
    if source.processes is not None:
        config.resolve(source.processes)
    return text, rows


def describe_batch_of(source: Source, spec: str) -> str:
    """Return the effective batch under the spec, as far as the file says it; its data ranks are the old program's."""
    rows, accumulation = source.number(*_ROWS), source.number("gradient_accumulation_steps")
    total, processes = source.number("train_batch_size"), source.processes
    ranks = None if processes is None else ParallelConfig.parse(spec).resolve(processes).data_parallel_size
    if ranks and total and rows is None and total % (ranks * (accumulation or 1)) == 0:
        rows = total // ranks // (accumulation or 1)
    if rows is None or ranks is None:
        factors = [
            f"{rows or 'per_device_train_batch_size'} per device",
            f"{accumulation or 'gradient_accumulation_steps'} accumulation",
            f"{ranks or 'processes / (tp x pp x cp)'} data ranks",
        ]
        return f"A step has {' x '.join(factors)} sequences, as before"
    batch = StepBatch(rows, accumulation or 1, ranks)
    if total is not None and total != batch.sequences:
        return f"A step would have {batch.in_words()}, but train_batch_size is {total}: change one of them"
    return f"A step has {batch.in_words()}, as before: {batch.arguments}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `hf-parallel migrate`."""
    parser.description = "Turn the configuration of another program into a spec, and say what became of each key."
    files = "YAML of accelerate, axolotl or torchtune; JSON of DeepSpeed; a Python script"
    parser.add_argument("file", metavar="FILE", nargs="?", help=files)
    parser.add_argument("--fsdp", nargs="?", const=True, metavar="WORDS", help="Trainer's argument, instead of a file")
    parser.add_argument("--fsdp_config", metavar="JSON", help="Trainer's argument: a file, or its content")
    parser.add_argument("--deepspeed", metavar="JSON", help="Trainer's argument, instead of a file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def migrate(args: argparse.Namespace) -> int:
    """Print the spec and the table."""
    try:
        given = {name: getattr(args, name) for name in ("fsdp", "fsdp_config", "deepspeed")}
        words = {name: value for name, value in given.items() if value}
        if (args.file is None) == (not words):
            refuse("migrate", "takes a file, or Trainer's arguments in its place", "hf-parallel migrate fsdp.yaml")
        if args.file is not None and not os.path.isfile(args.file):
            refuse(args.file, "no such file", do=suggest_file(args.file) or "give a YAML, JSON or Python file")
        if args.file is not None:
            source = read(args.file)
        else:
            if "fsdp_config" in words and "fsdp" not in words:
                refuse("--fsdp_config", "says nothing without --fsdp", "--fsdp")
            source = Source(
                "Trainer", [key for name, value in words.items() for key in _read_argument(name, value, "")]
            )
        spec, rows = migrate_source(source)
    except SpecError as error:
        print(f"hf_parallel: {error}", file=sys.stderr)
        return 2
    if args.json:
        batch = describe_batch_of(source, spec)
        keys = [{"key": key, "spec": ours, "why": why} for key, ours, why in rows]
        print(json.dumps({"program": source.program, "spec": spec, "batch": batch, "keys": keys}, indent=2))
        return 0
    count = "" if source.processes is None else f"--num_processes {source.processes} "
    if args.file is not None:
        print(f"{args.file} is a configuration of {source.program}" if source.program != "script" else args.file)
    print(f"\n    hf-parallel launch {count}--parallel {spec} train.py\n")
    print(f"{describe_batch_of(source, spec)}\n")
    width = max((len(key) for key, _, _ in rows), default=0)
    for key, ours, why in rows:
        print(f"{key:<{width}}  ->  {ours or f'({why})'}")
    return 0

"""Ask the functions that `parallelize` goes by, one axis after the other, and collect what they say."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
from typing import Any

import torch

from hf_parallel.axes.pipeline import cut_into_stages
from hf_parallel.axes.pipeline.stages import has_tied_embedding, layers_per_stage
from hf_parallel.axes.tensor.styles import styles_and_origins
from hf_parallel.axes.tensor.tensor_parallel import check_kind
from hf_parallel.axes.tensor.vocab_parallel import check_vocabulary
from hf_parallel.config import AXES, ParallelConfig, SpecError
from hf_parallel.doctor.report import PipelineRank, Report, Split, first_line
from hf_parallel.doctor.sizes import distinct_parameters, slice_shape, stored, tp_cuts
from hf_parallel.mesh import coordinates
from hf_parallel.model.anatomy import attention_heads
from hf_parallel.parallelize import (
    check_overlap,
    check_tied_in_a_v,
    checkpoint_activations,
    use_attention,
    why_whole_sequences,
    with_schedule,
)

Origins = dict[str, tuple[str, str]]  # module -> style and where it comes from

_VOCABULARY = ("embedding_rowwise", "colwise_gather_output")


def build_on_meta(source: str) -> Any:
    """The model that a folder, a Hub id or a config.json describes, without memory for weights.

    Its class is the one that config.architectures names, else the causal language model of its type.

    Raises:
        SpecError: there is no such model, or it is made by code of its own.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False)
        named = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)
        with torch.device("meta"):
            return named._from_config(config) if named else transformers.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise SpecError(f"{source}: {first_line(error)}") from error


def examine(model: Any, config: ParallelConfig, processes: int | None = None) -> Report:
    """What `config` would do to `model`, which is not changed.

    Args:
        processes: how many there are; default: what the sizes multiply to, with dp_shard=-1 as 1.
    """
    report = Report(type(model).__name__, str(model.dtype).removeprefix("torch."))
    resolved = report.attempt(_resolve, config, processes, report.notes)
    config = resolved or _with_free_sizes(config, 1)
    report.axes = {axis: getattr(config, f"{axis}_size") for axis in AXES}
    report.attempt(_check_model, copy.deepcopy(model), config)
    report.attempt(_check_data_axes, model, config)
    styles = report.attempt(_styles, model, config.tp_size)
    places = report.attempt(_cut, model, config)
    if styles is not None:
        _describe(report, model, config, styles, places)
    tied = [f"{name} = {names[0]}" for _, names in distinct_parameters(model) for name in names[1:]]
    report.facts.update({"tied weights": ", ".join(tied)} if tied else {})
    return report


# ---- what may stop it -------------------------------------------------------------------------------------------


def _with_free_sizes(config: ParallelConfig, size: int) -> ParallelConfig:
    sizes: dict[str, Any] = {f"{axis}_size": size for axis in _free(config)}
    return dataclasses.replace(config, **sizes)


def _free(config: ParallelConfig) -> list[str]:
    return [axis for axis in AXES if getattr(config, f"{axis}_size") == -1]


def _resolve(config: ParallelConfig, processes: int | None, notes: list[str]) -> ParallelConfig:
    if processes is not None and processes < 1:
        raise SpecError(f"--nproc {processes}: there is at least one process; --nproc 1 works")
    if processes is not None:
        return config.resolve(processes)
    free = _free(config)
    if free not in ([], ["dp_shard"]):
        raise SpecError(f"{free[0]}_size=-1 takes the processes that are left; --nproc 8 says how many there are")
    notes += ["dp_shard_size=-1 counts as 1 here; --nproc says how many processes there are" for _ in free]
    return _with_free_sizes(config, 1)


def _check_model(model: Any, config: ParallelConfig) -> None:
    """Changes the model."""
    if getattr(model.config, "quantization_config", None) is not None:
        raise SpecError("quantised checkpoints are not part of this version; load in bf16")
    use_attention(model, config.attention)
    if config.activation_checkpointing == "full":
        checkpoint_activations(model)


def _check_data_axes(model: Any, config: ParallelConfig) -> None:
    scalar = next((name for name, parameter in model.named_parameters() if parameter.dim() == 0), None)
    if scalar is not None and config.data_parallel_size > 1:
        key = "dp_shard_size" if config.dp_shard_size > 1 else "dp_replicate_size"
        raise SpecError(f"{key}={getattr(config, key)}: FSDP2 cannot shard the scalar {scalar}; {key}=1 works")


def _styles(model: Any, tp_size: int) -> Origins:
    if tp_size == 1:
        return {}
    styles = styles_and_origins(model, tp_size)
    for name, style in _words(styles).items():
        check = check_vocabulary if style in _VOCABULARY else check_kind
        if style != "heads":  # a parameter, not a module
            check(name, model.get_submodule(name), style, tp_size)
    return styles


def _words(styles: Origins) -> dict[str, str]:
    return {name: style for name, (style, _) in styles.items()}


def _cut(model: Any, config: ParallelConfig) -> list[Any]:
    """The model as `cut_into_stages` leaves it, and its stages, by place along pp."""
    if config.pp_size == 1:
        return [(model, [])]
    config = with_schedule(model, config, has_tied_embedding(model))
    check_tied_in_a_v(config, has_tied_embedding(model))
    check_overlap(config)
    counts, _ = layers_per_stage(model, config)
    copies = [copy.deepcopy(model) for _ in range(config.pp_size)]
    return [(part, cut_into_stages(part, config, rank, counts)[0]) for rank, part in enumerate(copies)]


# ---- what it does -----------------------------------------------------------------------------------------------


def _describe(report: Report, model: Any, config: ParallelConfig, styles: Origins, places: list | None) -> None:
    cuts = tp_cuts(model, _words(styles))
    if config.tp_size > 1:
        report.splits = _splits(model, styles, cuts, config.tp_size)
        report.facts.update(_tensor_facts(report, model, _words(styles), config))
    if places is not None:
        _count(report, places, cuts, config)


def _splits(model: Any, styles: Origins, cuts: dict[str, int], tp_size: int) -> list[Split]:
    """One entry per pattern of names, several where layers differ; in the model's order."""
    groups: dict[tuple, list[str]] = {}
    for module, parameters in _by_module(model).items():
        style, origin = styles.get(module, ("whole", ""))
        key, shown = next(iter(parameters.items()))
        per_rank = slice_shape(shown.shape, cuts.get(key), tp_size, 0)
        whole = tuple(name.rpartition(".")[2] for name in parameters if name not in cuts) if origin else ()
        alike = (_folded(module), style, origin, tuple(shown.shape), per_rank, whole)
        groups.setdefault(alike, []).append(module)
    patterns = [pattern for pattern, *_ in groups]
    return [
        Split(pattern if patterns.count(pattern) == 1 < len(names) else _numbered(names), names, *rest)
        for (pattern, *rest), names in groups.items()
    ]


def _by_module(model: Any) -> dict[str, dict[str, Any]]:
    """Parameters by the module that has them; those that are neither weight nor bias stand for themselves."""
    modules: dict[str, dict[str, Any]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, key = name.rpartition(".")
        modules.setdefault(owner if key in ("weight", "bias") else name, {})[name] = parameter
    return modules


def _folded(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _numbered(names: list[str]) -> str:
    """layers.0.x, layers.1.x, layers.3.x -> layers.0-1,3.x; numbers behind the first become *."""
    parts = [re.split(r"\.(\d+)(?=\.|$)", name, maxsplit=1) for name in names]
    if len(names) == 1 or len(parts[0]) == 1:
        return names[0]
    numbers = sorted({int(part[1]) for part in parts})
    runs = [[n for _, n in run] for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    shown = ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"{parts[0][0]}.{shown}{_folded(parts[0][2])}"


def _tensor_facts(report: Report, model: Any, styles: dict[str, str], config: ParallelConfig) -> dict[str, str]:
    before = len(report.problems)
    reason = report.attempt(why_whole_sequences, model, styles, config.sequence_parallel)
    refused = len(report.problems) > before
    return {
        "sequence parallelism": "refused" if refused else "on" if reason is None else f"off: {reason}",
        "vocabulary": _vocabulary(model, styles, config.tp_size),
        "attention heads": _heads(model, config.tp_size),
    }


def _vocabulary(model: Any, styles: dict[str, str], tp_size: int) -> str:
    rows = {model.get_submodule(name).weight.shape[0] for name, style in styles.items() if style in _VOCABULARY}
    said = []
    for count in sorted(rows):
        parts = [slice_shape([count], 0, tp_size, index)[0] for index in range(tp_size)]
        shown = parts if len(set(parts)) > 1 else parts[:1]
        said.append(f"{count} rows, per rank {', '.join(map(str, shown))}")
    return "; ".join(said) or "whole"


def _heads(model: Any, tp_size: int) -> str:
    heads, kv_heads = attention_heads(model) or (0, 0)
    shared = tp_size > kv_heads
    keys = f"1 key/value shared by {tp_size // kv_heads} ranks" if shared else f"{kv_heads // tp_size} key/value"
    return f"{heads} query, {kv_heads} key/value; per rank {heads // tp_size} query, {keys}"


def _count(report: Report, places: list[Any], cuts: dict[str, int], config: ParallelConfig) -> None:
    """Fill in what each pipeline rank holds and each rank stores."""
    tables = [stored(part, cuts, config) for part, _ in places]
    for (part, stages), table in zip(places, tables, strict=True):
        names = {id(module): name for name, module in part.named_modules()}
        layers = [[names[id(layer)] for layer in stage.layers] for stage in stages]
        inside = tuple(f"{name}." for own in layers for name in own)
        others = [name for name in _by_module(part) if stages and not name.startswith(inside)]
        parameters, size = (max(column) for column in zip(*table.values(), strict=True))
        indices = [stage.index for stage in stages]
        report.pipeline.append(PipelineRank(indices, list(map(_numbered, layers)), others, parameters, size))
    for rank in range(config.world_size):
        place = coordinates(config, rank)
        report.parameters_per_rank.append(tables[place["pp"]][place["dp_shard"], place["tp"]][0])

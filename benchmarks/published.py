"""Published layouts as calls of `predict`, and how far predictions are from them.

A row names a model, GPUs, a layout, a batch, and what was measured: benchmarks/planner.py prints the figures for a
file of them, tests/planner/test_published.py holds a small part of them to bounds.
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.published_models import shape_of_mixture
from hf_parallel.planner import Prediction, predict, shape_of
from hf_parallel.planner.pipeline import split_by_cost

Row = dict[str, Any]

_MODEL = ("model", "params", "layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "experts", "top_k")
_LAYOUT = {"tp": "tp", "pp": "pp", "dp": "dp", "cp": "cp", "ep": "ep", "zero_stage": "zero_stage"}
_LAYOUT |= {"vpp": "virtual_stages", "sp": "sequence_parallel", "async_tp": "tp_overlap"}
_MEGATRON = ("megatron_bridge_pretrain", "moe_model_zoo")
_JOB = ("seq", "micro_batch", "global_batch", "recompute", "precision", "engine", "attention")
_JOB += ("compiled", "fused_norms", "gradients", "eight_bit_scaling")

#: What a publication's configuration files say where its table has a dash or no column. Automodel: the files beside
#: docs/performance-summary (examples/llm_benchmark, October 2025; of GPT-OSS-120B the first with the table's batch).
#: Megatron-Bridge: scripts/performance/configs/gpt_oss, the same from 25.11 to 26.04.
_COMPLETED: dict[tuple[str, str], dict[str, Any]] = {
    ("automodel_pretrain", "GPT-OSS-20B"): {"ep": 8, "recompute": "full"},
    ("automodel_pretrain", "GPT-OSS-120B"): {"ep": 64, "recompute": "full"},
    ("automodel_pretrain", "Qwen3-30B-A3B"): {"recompute": "full"},
    ("automodel_pretrain", "DeepSeek-V3"): {"recompute": "full"},
    ("automodel_pretrain", "Kimi-K2"): {"recompute": "full"},
    ("megatron_bridge_pretrain", "GPT-OSS-120B"): {"recompute": "selective(layernorm,moe_act)"},
}


#: What a publication ran, where that is no fused implementation like those of the fitted rows: an engine of `predict`
#: and its attention.
_FRAMEWORKS: dict[str, dict[str, str]] = {
    "trl_1m": {"engine": "transformers", "attention": "sdpa"},
    "ms_swift": {"engine": "transformers"},
    "torchtune": {"engine": "transformers"},
    "nemo_2412": {"engine": "transformer_engine"},
    "nemo_2502": {"engine": "transformer_engine"},
    "megatron_bridge_pretrain": {"engine": "transformer_engine"},
    "aleph_alpha_layouts": {"engine": "scaling"},
    "llm_foundry_fsdp": {"engine": "composer"},
}
#: The engines of repositories that publish what they run, in which several series may be.
_REPOSITORIES = {"torchtitan": "torchtitan", "nanotron": "nanotron"}
#: Links between nodes that a row's note tells, where they are not those of its GPU in the catalogue.
_NETWORKS = {"DGX, InfiniBand": "infiniband-hdr", "4x Omni-Path": "4x100g"}


def read(path: str) -> list[Row]:
    """Read the rows of a JSON file, or of a CSV file with the same columns."""
    with open(path, encoding="utf-8", newline="") as file:
        if path.endswith(".csv"):
            return [{key: _value(text) for key, text in row.items()} for row in csv.DictReader(file)]
        return json.load(file)


def _value(text: str) -> Any:
    """Return a cell as JSON has it: a number, true or false, None or a text."""
    if text in ("True", "False", ""):
        return {"True": True, "False": False, "": None}[text]
    try:
        number = float(text)
    except ValueError:
        return text
    return int(number) if number.is_integer() else number


def call(row: Row, **changes: Any) -> Prediction:
    """`predict` for one row, with nothing but what its publication says."""
    row = completed(row)
    numbers = {key: row[key] for key in _MODEL if row.get(key) is not None}
    model = (row.get("experts") and shape_of_mixture(row["model"])) or numbers
    layout = {name: row.get(key) for key, name in _LAYOUT.items()}
    if "redistributed by cost" in str(row.get("note")):
        layout["split"] = split_by_cost(shape_of(model), row["pp"], row["recompute"], row["seq"])
    job = {key: row[key] for key in _JOB if key in row} | {"lora": "lora" in str(row.get("lora"))}
    job |= {"four_bit": "nf4"} if row.get("lora") == "qlora" else {}
    where = {"gpu": row["gpu_type"], "gpus": row["gpus"], "gpus_per_node": row.get("gpus_per_node")}
    where["network"] = next((link for said, link in _NETWORKS.items() if said in str(row.get("note"))), None)
    return predict(**{"model": model, "layout": layout, **where, **job, **changes})


def completed(row: Row) -> Row:
    """The row with what its table leaves open, for dense models and mixtures by the same rules.

    Recomputed norms and activations repeat no matrix product. Automodel keeps weights gathered for the backward in a
    pipeline (moe/parallelizer.py), as ZeRO-2 does. Megatron-LM refuses tp with experts without sequence
    parallelism.
    """
    engine = next((engine for name, engine in _REPOSITORIES.items() if name in str(row.get("source"))), None)
    framework = _FRAMEWORKS.get(row["series"], {"engine": engine} if engine else {})
    row = {**framework, **row, **_COMPLETED.get((row["series"], row["model"]), {})}
    if "kernel flash_attention2" in str(row.get("note")) and "RMS kernel" not in row["note"]:
        row["fused_norms"] = False
    if row.get("compile"):
        row["compiled"] = True
    elif row.get("engine") == "torchtitan":  # torch's own operations
        row["fused_norms"] = False
    if row["series"] == "torchtune" and row.get("lora") == "full":  # recipes/configs/llama3_1/8B_full_single_device
        row["recompute"] = "full"
    if "rowwise" in str(row.get("precision")):
        row["eight_bit_scaling"] = "rowwise"
    if row.get("engine") == "transformer_engine":
        if row.get("experts"):  # permutations, routers and grouped products are not in its formulas
            row["engine"] = "standard"
        elif (row.get("tp") or 1) > 1:
            row["sp"] = True
    if row.get("recompute") in ("selective(norm,act)", "selective(layernorm,moe_act)"):
        row["engine"] = "megatron"
    if row["series"] == "automodel_pretrain" and (row.get("pp") or 1) > 1 and row.get("zero_stage") == 3:
        row["zero_stage"] = 2
    if row["series"] in _MEGATRON and row.get("experts") and (row.get("tp") or 1) > 1:
        row["sp"] = True
    return row


# ---- which rows count ---------------------------------------------------------------------------------------------


def is_complete(row: Row) -> bool:
    """The row says what `predict` must know: widths, layout, batch."""
    return all(row.get(key) for key in ("hidden", "tp", "dp", "micro_batch", "global_batch"))


def of_time(rows: Iterable[Row], precisions: tuple[str, ...] = ("bf16",)) -> list[Row]:
    """Dense models in bf16 on H100 and A100 with a step time; fp16 counts where the same runs mix the two."""
    return [
        row
        for row in rows
        if is_complete(row)
        and row.get("step_time_s")
        and not row.get("experts")
        and any(name in str(row.get("precision")).lower() for name in precisions)
        and row["gpu_type"].startswith(("A100", "H100"))
    ]


def with_step_times(rows: Iterable[Row]) -> list[Row]:
    """Rows of any model, precision and GPU of the catalogue that say all that `predict` must know."""
    known = {"RTX4090-24GB", "B200-180GB", "H200-141GB"}
    return [
        row
        for row in rows
        if is_complete(row)
        and row.get("step_time_s")
        and (row["gpu_type"] in known or row["gpu_type"].startswith(("A100", "A800", "H100")))
    ]


def of_mixtures(rows: Iterable[Row]) -> list[Row]:
    """Models with experts, in any precision, with a step time."""
    return [row for row in rows if is_complete(row) and row.get("step_time_s") and row.get("experts")]


def layouts(rows: Iterable[Row]) -> list[Row]:
    """One row of each layout of a series: that in the middle, by step time, of its releases and days."""
    same: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        keys = ("series", "model", "gpus", *_LAYOUT, "seq", "micro_batch", "global_batch", "precision")
        note = row["note"] if row["series"] == "moe_model_zoo" else ""  # where it says how tokens are sent
        same[(*(row.get(key) for key in keys), note)].append(row)
    return [_find_middle(rows) for rows in same.values()]


def of_memory(rows: Iterable[Row]) -> list[Row]:
    """Rows with measured memory; not those with CPU offload or unstated recomputation, which `predict` is not told."""
    return [
        row
        for row in rows
        if is_complete(row)
        and row.get("memory_gib")
        and "offload" not in str(row.get("note"))
        and not (row["series"] == "torchtitan" and row.get("recompute") is None)
        and row["series"] != "torchtune"  # a loss in chunks, an optimizer in the backward, a base of 4 bits
    ]


def of_fitting(rows: Iterable[Row]) -> list[Row]:
    """Rows that ran or failed for want of memory, whose recomputation is known and whose tensors stay on the GPU."""
    silent = ("torchtitan", "automodel_pretrain", "megatron_bridge_pretrain", "nemo_2412", "nemo_2502")
    return [
        row
        for row in rows
        if is_complete(row)
        and "offload" not in str(row.get("note"))
        and not (row["series"] in silent and row.get("recompute") is None)
        and row["series"] != "torchtune"
        and _divides(row)
    ]


def _divides(row: Row) -> bool:
    stages = (row.get("pp") or 1) * (row.get("vpp") or 1)
    return not row.get("layers") or row["layers"] >= stages


def groups_of_ranking(rows: Iterable[Row]) -> list[list[Row]]:
    """Return sweeps of three layouts or more of one model, number of GPUs, batch and recomputation, day or kernel.

    A layout that was run more than once counts once, by the run in the middle. Names of models are numbers of
    parameters in some series, so that their widths are compared, too.
    """
    found: dict[Any, dict[Any, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.get("step_time_s") and is_complete(row) and not row.get("experts"):
            same = re.findall(r"run \d\d-\d\d|kernel [^;]*", str(row["note"]))
            keys = ("series", *_ONE_MODEL, "gpus", "gpu_type", "seq", *([] if "run" in str(same) else _SWEPT))
            found[(*(row.get(key) for key in keys), *same)][(_sizes(row), row["global_batch"])].append(row)
    groups = [[_find_middle(runs) for runs in sweep.values()] for sweep in found.values()]
    return [group for group in groups if len({_sizes(row) for row in group}) >= 3]


_ONE_MODEL = ("model", "layers", "hidden", "heads")
_SWEPT = ("global_batch", "recompute", "precision")


def _sizes(row: Row) -> tuple:
    return tuple(row.get(key) for key in (*_LAYOUT, "micro_batch"))


def _find_middle(rows: list[Row]) -> Row:
    return sorted(rows, key=lambda row: row["step_time_s"])[(len(rows) - 1) // 2]


def regret(group: list[Row], seconds: Callable[[Row], float], within: float = 0.0) -> float:
    """Return how much slower, per sequence, the layout that we put first ran than the published best of its sweep.

    Args:
        within: relative; of all layouts that we take to be so near the first, the one that ran fastest counts.
    """
    ours = {id(row): seconds(row) / row["global_batch"] for row in group}
    near = [row for row in group if ours[id(row)] <= (1 + within) * min(ours.values())]
    tried, best = (min(row["step_time_s"] / row["global_batch"] for row in rows) for rows in (near, group))
    return tried / best - 1


def memory_figure(row: Row) -> str:
    """Return which of a prediction's figures a row's memory is: allocated, reserved, or a monitor's."""
    said = f"{row.get('memory_kind')} {row.get('note')}"
    if "reserved" in said or row["series"] == "torchtitan":  # its metrics are max_reserved
        return "reserved_gib"
    return "allocated_gib" if row.get("memory_kind") else "memory_gib"


# ---- errors ---------------------------------------------------------------------------------------------------------


def constant_utilisation(row: Row) -> float:
    """Seconds of a step by 6 N + 12 L h s FLOPs per token (and a third more under full recomputation) at 50 %."""
    prediction = call(row)
    shape = prediction.shape
    flops = 6 * shape.parameters + 12 * shape.layers * shape.hidden * row["seq"]
    flops *= 4 / 3 if row.get("recompute") == "full" else 1
    return flops * row["seq"] * row["global_batch"] / row["gpus"] / (0.5 * prediction.cluster.gpu.peak("bf16"))


def constant_utilisation_of_mixture(row: Row) -> float:
    """Seconds of a step by the model's FLOPs, those of the experts at work, at 30 % of the bf16 peak."""
    prediction = call(row)
    flops = 3 * prediction.shape.forward_flops(row["seq"], full_attention=True) * row["seq"] * row["global_batch"]
    return flops / row["gpus"] / (0.3 * prediction.cluster.gpu.peak("bf16"))


def textbook_memory(row: Row) -> float:
    """GiB by 16 bytes per parameter over ZeRO's ranks, tp and pp, and 34 s b h bytes per layer and micro-batch."""
    shape, tp, pp = call(row).shape, row["tp"], row.get("pp") or 1
    share = shape.parameters / tp / pp
    stage, dp = row.get("zero_stage") or 0, row["dp"]
    states = share * (16 / dp if stage == 3 else 4 + 12 / dp if stage else 16)
    per_layer = 2 if row.get("recompute") == "full" else 34 / tp
    return (states + per_layer * row["seq"] * row["micro_batch"] * shape.hidden * shape.layers) / 2**30


def errors(rows: Iterable[Row], value: Callable[[Row], float], measured: str) -> list[tuple[Row, float]]:
    """Relative errors, signed: 0.1 is 10 % above what was measured."""
    return [(row, value(row) / row[measured] - 1) for row in rows]


def summary(found: Iterable[tuple[Row, float]]) -> dict[str, float]:
    """Median and 90th percentile of the absolute errors, and the number of rows."""
    sizes = sorted(abs(error) for _, error in found)
    return {"rows": len(sizes), "median": statistics.median(sizes), "p90": sizes[math.ceil(0.9 * len(sizes)) - 1]}


def by_series(found: Iterable[tuple[Row, float]]) -> dict[str, list[float]]:
    """The errors of each series."""
    series: dict[str, list[float]] = defaultdict(list)
    for row, error in found:
        series[row["series"]].append(error)
    return series


def spearman(one: list[float], other: list[float]) -> float:
    """Rank correlation, ties at their mean rank; 0 if one side does not vary."""
    a, b = _ranks(one), _ranks(other)
    mean = (len(a) - 1) / 2
    products = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    squares = math.sqrt(sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b))
    return products / squares if squares else 0.0


def _ranks(values: list[float]) -> list[float]:
    return [sum(v < value for v in values) + (sum(v == value for v in values) - 1) / 2 for value in values]


def ranking(group: list[Row], seconds: Callable[[Row], float]) -> tuple[float, int]:
    """Rank correlation of a group by seconds per sequence, and at which place of ours the published best is."""
    ours, theirs = ([of(row) / row["global_batch"] for row in group] for of in (seconds, lambda r: r["step_time_s"]))
    best = theirs.index(min(theirs))
    return spearman(ours, theirs), sum(value <= ours[best] for value in ours)  # among equals the last place

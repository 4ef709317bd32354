"""The same question to other estimators: how much memory does this published run need on its fullest GPU?

    pip install deepspeed                                           # optional
    python benchmarks/planner_peers.py published_layouts.json

`accelerate estimate-memory` knows a model and a precision, DeepSpeed's estimators a model, ZeRO's stage and the number
of GPUs; neither counts activations, tensor or pipeline parallelism. So their answers are those of one GPU, and of the
data ranks of one tensor and pipeline part.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import published

GIB = 2**30
SHOWN = ("torchtitan", "ultrascale_playbook_best", "ms_swift", "bloom_prequel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", help="a JSON file of published layouts")
    parser.add_argument("--every", type=int, default=6, help="print every n-th row (6); the figures are of all")
    args = parser.parse_args()
    rows = [row for row in published.of_memory(published.read(args.rows)) if row["series"] in SHOWN and row["params"]]
    peers = {"planner": lambda row: published.call(row).memory_gib, "accelerate": accelerate_says, **deepspeed_peer()}
    table = [[peer(row) for peer in peers.values()] for row in rows]
    print(f"{'GiB on the fullest GPU':46}{'published':>10}" + "".join(f"{name:>12}" for name in peers))
    for row, answers in list(zip(rows, table, strict=True))[:: args.every]:
        print(f"{_name(row):46}{row['memory_gib']:10.1f}" + "".join(f"{answer:12.1f}" for answer in answers))
    errors = [
        statistics.median(abs(a[i] / row["memory_gib"] - 1) for row, a in zip(rows, table, strict=True))
        for i in range(len(peers))
    ]
    print(f"{f'median error of {len(rows)} rows':56}" + "".join(f"{error:12.1%}" for error in errors))


def accelerate_says(row: published.Row) -> float:
    """The largest of the four numbers that `accelerate estimate-memory` prints for training with Adam."""
    from accelerate.commands.estimate import estimate_training_usage

    return max(estimate_training_usage(int(4 * row["params"]), "bfloat16").values()) / GIB


def deepspeed_peer() -> dict[str, Callable[[published.Row], float]]:
    """DeepSpeed's estimators of model states, if it is installed."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as third
            from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as second
    except ImportError:
        print("DeepSpeed is not installed: left out", file=sys.stderr)
        return {}

    def says(row: published.Row) -> float:  # they return (CPU memory, GPU memory, …)
        part = row["params"] / (row["tp"] * (row.get("pp") or 1))
        ranks, stage = row["dp"], row.get("zero_stage") or 0
        if stage == 3:
            largest = int(row["vocab"] * row["hidden"] / row["tp"]) if row.get("vocab") and row.get("hidden") else 0
            return third(int(part), largest, ranks, 1, cpu_offload=False)[1] / GIB
        shared = ranks if stage else 1  # it has no estimator for ZeRO-1: the nearest is that for ZeRO-2
        return second(int(part), shared, 1, cpu_offload=False)[1] / GIB

    return {"DeepSpeed": says}


def _name(row: published.Row) -> str:
    name = row["model"].replace(" (BLOOM prequel)", "")
    layout = f"tp {row['tp']} pp {row.get('pp') or 1} ZeRO-{row.get('zero_stage') or 0}"
    return f"{name}, {row['gpus']} x {row['gpu_type'][:9]}, {layout}"


if __name__ == "__main__":
    main()

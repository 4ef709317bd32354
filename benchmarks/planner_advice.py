"""Classical advice, and what the planner says: a table for docs/planner.md.

python benchmarks/planner_advice.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hf_parallel import plan

LLAMA = {"kv_heads": 8, "vocab": 128256, "gated_mlp": True}
SMALL = {"layers": 22, "hidden": 2048, "heads": 32, "kv_heads": 4, "ffn_hidden": 5632, "vocab": 32000}
B8 = {"layers": 32, "hidden": 4096, "heads": 32, "ffn_hidden": 14336, **LLAMA}
B70 = {"layers": 80, "hidden": 8192, "heads": 64, "ffn_hidden": 28672, **LLAMA}
ONE_NODE, EIGHT = ({"gpu": "a100-80gb", "seq": 4096, "gpus": gpus} for gpus in (8, 64))
SLOW = {**EIGHT, "network": "ethernet-25g"}

#: advice, model, cluster, global batch, the layout that the advice names or warns of
CASES = [
    ("a small model on one node: replicas or ZeRO-2", SMALL, ONE_NODE, 256, "dp_replicate=8"),
    ("8B on one node: ZeRO-3", B8, ONE_NODE, 128, "dp_shard=8"),
    ("8B on slow Ethernet: never plain ZeRO-3", B8, SLOW, 512, "dp_shard=64"),
    ("8B on slow Ethernet: hybrid sharding, or pp", B8, SLOW, 512, "dp_replicate=8,dp_shard=8"),
    ("70B on 64 GPUs: tp 8 in the node, pp and dp outside", B70, EIGHT, 512, "tp=8,pp=4,dp_shard=2"),
    ("70B on 64 GPUs: plain ZeRO-3", B70, EIGHT, 512, "dp_shard=64"),
    ("tp never across nodes", B70, EIGHT, 512, "tp=16,dp_shard=4"),
    ("70B on one node: LoRA", B70, {**ONE_NODE, "lora": 16}, 64, "tp=8"),
    ("70B on one node: all weights", B70, ONE_NODE, 64, "dp_shard=8"),
]


def main() -> None:
    print("| advice | the planner's first | its step, memory | the layout of the advice | the planner about it |")
    print("| --- | --- | --- | --- | --- |")
    for advice, model, where, rows, named in CASES:
        found = plan(model, **where, global_batch=rows, expected=named)
        about = next(text for who, text in found.why_not if who.startswith("yours"))
        if not found.choices:
            print(f"| {advice} | none: {found.advice} | | `{named}` | {about} |")
            continue
        best = found.choices[0]
        figures = f"{best.prediction.step_time_s:.1f} s, {best.needed_gib:.0f} GiB"
        print(f"| {advice} | `{short(best.config.to_spec())}` | {figures} | `{named}` | {about} |")


def short(spec: str) -> str:
    """Without sizes of one and the number of micro-batches."""
    parts = [part for part in spec.split(",") if not part.endswith("=1") and "microbatches" not in part]
    return ",".join(parts)


if __name__ == "__main__":
    main()

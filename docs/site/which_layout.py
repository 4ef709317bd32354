"""Write docs/which_layout.js, the answers of the page "which layout for me": `python docs/site/which_layout.py`.

Half an hour of one core. Each answer is what `hf-parallel plan` says to the same question, its reasons included.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
FILE = DOCS / "which_layout.js"

MODELS = {
    "1 B (Llama 3.2 1B)": "llama-3.2-1b",
    "8 B (Llama 3.1 8B)": "llama-3.1-8b",
    "32 B (Qwen3 32B)": "qwen3-32b",
    "70 B (Llama 3.1 70B)": "llama-3.1-70b",
}
METHODS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "adapters (LoRA of rank 16)": {"lora": 16},
    "adapters on a base of 4 bits (QLoRA of rank 16)": {"lora": 16, "four_bit": True},
}
MACHINES: dict[str, dict[str, Any]] = {
    "1 GPU of 24 GB": {"gpu": "rtx4090-24gb", "gpus": 1},
    "4 GPUs of 48 GB on PCIe": {"gpu": "l40s-48gb", "gpus": 4, "gpus_per_node": 4},
    "8 GPUs of 80 GB on NVLink": {"gpu": "h100-80gb", "gpus": 8},
    "64 GPUs of 80 GB, nodes of 8 on InfiniBand": {"gpu": "h100-80gb", "gpus": 64, "network": "infiniband-ndr"},
    "64 GPUs of 80 GB, nodes of 8 on slow Ethernet": {"gpu": "h100-80gb", "gpus": 64, "network": "ethernet-25g"},
}
LENGTHS = {"up to 4,096 tokens": 4096, "32,768 tokens": 32768}
QUESTIONS = (MODELS, METHODS, MACHINES, LENGTHS)
#: Tokens of one step, over all GPUs.
TOKENS = 1 << 20


def answer(model: str, method: str, machine: str, length: str) -> dict[str, Any]:
    """Spec, speed, memory and reasons; or what would do, where nothing fits."""
    import hf_parallel
    from hf_parallel.cli.recipe_file import read_shipped_config

    seq = LENGTHS[length]
    found = hf_parallel.plan(
        read_shipped_config(MODELS[model]),
        **MACHINES[machine],
        seq=seq,
        global_batch=TOKENS // seq,
        **METHODS[method],
    )
    if not found.choices:
        return {"advice": found.advice}
    best = found.choices[0].to_dict()
    return {
        "spec": best["spec"],
        "rows": best["per_device_train_batch_size"],
        "calls": best["gradient_accumulation_steps"],
        "tokens": round(best["tokens_per_s_per_gpu"]),
        "gib": round(found.choices[0].needed_gib, 1),
        "why": [f"{name}: {why}" for name, why in found.why_not],
    }


def read() -> dict[str, dict[str, Any]]:
    """The answers of the page as they are written, by the places of the four options."""
    _, _, lines = FILE.read_text(encoding="utf-8").partition("const ANSWERS=")
    return json.loads(lines.rstrip().rstrip(";"))


def asked(places: str) -> list[str]:
    """The four options of an answer."""
    each = map(int, places.split("-"))
    return [list(options)[place] for options, place in zip(QUESTIONS, each, strict=True)]


def write() -> None:
    """All answers, by the places of the four options."""
    answers = {}
    for numbers in itertools.product(*(range(len(options)) for options in QUESTIONS)):
        places = "-".join(map(str, numbers))
        answers[places] = answer(*asked(places))
        print(*asked(places), answers[places].get("spec", "nothing fits"), sep=" | ", file=sys.stderr)
    options = [list(options) for options in QUESTIONS]
    lines = ",\n".join(f"{json.dumps(key)}:{json.dumps(value)}" for key, value in answers.items())
    head = f"// Written by docs/site/which_layout.py.\nconst OPTIONS={json.dumps(options)};\n"
    FILE.write_text(f"{head}const ANSWERS={{\n{lines}\n}};\n")


if __name__ == "__main__":
    write()

"""Write docs/which_layout.js, the answers of the page "which layout for me": `python docs/site/which_layout.py`.

Twenty minutes of one core; `--missing` keeps the answers that are there, `--processes N` shares the others out. Each
answer is what `hf-parallel plan` says to the same question, its reasons included.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[1]
FILE = DOCS / "which_layout.js"

MODELS = {
    "1 B (Llama 3.2 1B)": "llama-3.2-1b",
    "8 B (Llama 3.1 8B)": "llama-3.1-8b",
    "30 B, a mixture of experts (Qwen3 30B-A3B)": "qwen3-30b-a3b",
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
    "16 GPUs of 80 GB, 2 nodes on InfiniBand": {"gpu": "h100-80gb", "gpus": 16, "network": "infiniband-ndr"},
    "64 GPUs of 80 GB, nodes of 8 on InfiniBand": {"gpu": "h100-80gb", "gpus": 64, "network": "infiniband-ndr"},
    "64 GPUs of 80 GB, nodes of 8 on slow Ethernet": {"gpu": "h100-80gb", "gpus": 64, "network": "ethernet-25g"},
    "512 GPUs of 80 GB, 64 nodes on InfiniBand": {"gpu": "h100-80gb", "gpus": 512, "network": "infiniband-ndr"},
}
LENGTHS = {
    "up to 2,048 tokens": 2048,
    "up to 4,096 tokens": 4096,
    "8,192 tokens": 8192,
    "32,768 tokens": 32768,
    "131,072 tokens": 131072,
    "1,048,576 tokens": 1048576,
}
QUESTIONS = (MODELS, METHODS, MACHINES, LENGTHS)
#: Tokens of one step, over all GPUs.
TOKENS = 1 << 20
#: Places of the options whose combinations have an answer, by question; of others the page shows the command.
STORED = (
    ((0, 1, 3, 4), (0, 1, 2), (0, 1, 2, 4, 5), (1, 3)),
    ((0, 1, 2, 4), (0,), (2, 4), (0, 1, 2, 3, 4, 5)),
    ((0, 1), (0,), (6,), (0, 1, 2, 3, 4, 5)),
    ((1, 2), (0,), (3,), (1, 2, 3, 4)),
    ((1,), (1, 2), (2,), (0, 2, 4, 5)),
    ((2, 4), (0,), (6,), (1, 2, 3)),
    ((3,), (0,), (2, 4), (0, 2, 4, 5)),
    ((4,), (0,), (3,), (1, 2, 3)),
)


def list_places() -> list[str]:
    """Return the places of the four options of each stored answer."""
    every = set(itertools.chain.from_iterable(itertools.product(*options) for options in STORED))
    return ["-".join(map(str, places)) for places in sorted(every)]


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


def list_words() -> list[list[str]]:
    """Return what each option adds to the command line of `hf-parallel plan`, by question."""
    shapes = (DOCS.parent / "hf_parallel/recipes/models" / f"{name}.json" for name in MODELS.values())
    names = {"lora": "--lora", "four_bit": "--load-in-4bit", "gpus_per_node": "--gpus-per-node"}
    methods, machines = (
        [
            " ".join(f"{names.get(key, f'--{key}')} {'' if value is True else value}".strip() for key, value in each)
            for each in (option.items() for option in options.values())
        ]
        for options in (METHODS, MACHINES)
    )
    batches = [f"--seq {seq} --global-batch {TOKENS // seq}" for seq in LENGTHS.values()]
    return [[json.loads(shape.read_text())["model"] for shape in shapes], methods, machines, batches]


def read() -> dict[str, dict[str, Any]]:
    """The answers of the page as they are written, by the places of the four options."""
    _, _, lines = FILE.read_text(encoding="utf-8").partition("const ANSWERS=")
    return json.loads(lines.rstrip().rstrip(";"))


def asked(places: str) -> list[str]:
    """The four options of an answer."""
    each = map(int, places.split("-"))
    return [list(options)[place] for options, place in zip(QUESTIONS, each, strict=True)]


def find_stored() -> dict[str, dict[str, Any]]:
    """Return the answers that are there, by today's places: options may have been added between others."""
    head = FILE.read_text(encoding="utf-8").partition("const OPTIONS=")[2].partition(";\n")[0]
    former, known, found = json.loads(head), [list(options) for options in QUESTIONS], {}
    for places, said in read().items():
        names = [options[int(place)] for options, place in zip(former, places.split("-"), strict=True)]
        if all(name in options for name, options in zip(names, known, strict=True)):
            now = (str(options.index(name)) for name, options in zip(names, known, strict=True))
            found["-".join(now)] = said
    return found


def find_answer(places: str) -> tuple[str, dict[str, Any]]:
    """Return the places with their answer, and tell that it is there."""
    found = answer(*asked(places))
    print(places, *asked(places), found.get("spec", "nothing fits"), sep=" | ", file=sys.stderr, flush=True)
    return places, found


def write(missing: bool, processes: int) -> None:
    """Write all answers, by the places of the four options.

    Args:
        missing: keep those that are there.
    """
    answers = find_stored() if missing else {}
    left = [places for places in list_places() if places not in answers]
    with get_context("fork").Pool(processes) as pool:
        answers |= dict(pool.imap_unordered(find_answer, left))
    lines = ",\n".join(f"{json.dumps(places)}:{json.dumps(answers[places])}" for places in list_places())
    head = f"// Written by docs/site/which_layout.py.\nconst OPTIONS={json.dumps(list(map(list, QUESTIONS)))};\n"
    head += f"const WORDS={json.dumps(list_words())};\n"
    FILE.write_text(f"{head}const ANSWERS={{\n{lines}\n}};\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--missing", action="store_true", help="keep the answers that are there")
    parser.add_argument("--processes", type=int, default=1, metavar="N")
    write(**vars(parser.parse_args()))

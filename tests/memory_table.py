"""Write docs/reference/memory.md and the README table: how many GPUs a model needs, how fast, what memory is left.

python -m tests.memory_table            search all cells, minutes, and write both
python -m tests.memory_table --check    search nothing; fail if the pages do not say what the results say

A cell is what `hf-parallel plan` prints for the fewest GPUs, a power of two up to 64, that hold the model.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from hf_parallel import cli
from hf_parallel.cli.recipe_file import read_shipped_config
from hf_parallel.planner import find_gpu
from tests.support_matrix import ROOT

RESULTS = ROOT / "tests" / "results" / "memory.json"
PAGES = (ROOT / "README.md", ROOT / "docs" / "reference" / "memory.md")
BEGIN, END = "<!-- memory:begin -->", "<!-- memory:end -->"
#: By its name on the Hub: the config that comes with the recipes.
MODELS = {
    "meta-llama/Llama-3.1-8B": "llama-3.1-8b",
    "Qwen/Qwen3-14B": "qwen3-14b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
}
METHODS = {"full": [], "LoRA": ["--lora"], "QLoRA": ["--lora", "--load-in-4bit"]}
GPUS = ("rtx4090-24gb", "l40s-48gb", "h100-80gb")
COUNTS = (1, 2, 4, 8, 16, 32, 64)


class Cell(NamedTuple):
    """The fewest GPUs of a kind, the layout there, tokens per second of all, GiB that the fullest one needs."""

    gpus: int
    spec: str
    tokens_per_s: int
    needed_gib: float


def words_of(model: str, method: str, gpu: str, gpus: int) -> list[str]:
    """The words of the command behind `hf-parallel`."""
    return ["plan", model, "--gpus", str(gpus), "--gpu", gpu, *METHODS[method]]


def search_cell(model: str, method: str, gpu: str, counts: tuple[int, ...] = COUNTS) -> Cell | None:
    """Run the command for more and more GPUs; None: none of these numbers fits."""
    with tempfile.TemporaryDirectory() as folder:
        read_shipped_config(MODELS[model]).save_pretrained(folder)
        for gpus in counts:
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
                code = cli.main([*words_of(folder, method, gpu, gpus), "--json", "--top", "1"])
            if code == 0:
                best = json.loads(out.getvalue())["layouts"][0]
                speed = round(best["tokens_per_s_per_gpu"] * gpus)
                return Cell(gpus, best["spec"], speed, round(best["needed_gib"], 1))
    return None


def key(model: str, method: str, gpu: str) -> str:
    """The name of a cell in the results."""
    return f"{model} {method} {gpu}"


def short_table(results: dict[str, list | None]) -> str:
    """The README's: a cell has GPUs, tokens per second, and the share of memory that is left."""
    lines = [f"| model | trained | {' | '.join(_sizes(gpu) for gpu in GPUS)} |", "| --- " * (2 + len(GPUS)) + "|"]
    for model in MODELS:
        for method in METHODS:
            cells = [_short(results[key(model, method, gpu)], gpu) for gpu in GPUS]
            lines.append(f"| {model.partition('/')[2]} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _sizes(gpu: str) -> str:
    return f"{gpu.rpartition('-')[2].removesuffix('gb')} GB (`{gpu}`)"


def _short(found: list | None, gpu: str) -> str:
    if found is None:
        return f"more than {COUNTS[-1]}"
    cell = Cell(*found)
    left = 1 - cell.needed_gib / find_gpu(gpu).memory_gib
    return f"**{cell.gpus}**: {cell.tokens_per_s:,} tokens/s, {left:.0%} free"


def long_table(results: dict[str, list | None]) -> str:
    """The page's: a line for each cell, with its layout and its command."""
    lines = ["| command | GiB of each GPU | tokens/s | layout |", "| --- | --- | --- | --- |"]
    for model in MODELS:
        for method in METHODS:
            for gpu in GPUS:
                found = results[key(model, method, gpu)]
                if found is not None:
                    cell, command = Cell(*found), " ".join(words_of(model, method, gpu, found[0]))
                    room = f"{cell.needed_gib} of {find_gpu(gpu).memory_gib:.1f}"
                    lines.append(f"| `hf-parallel {command}` | {room} | {cell.tokens_per_s:,} | `{cell.spec}` |")
    return "\n".join(lines)


def replaced(text: str, table: str) -> str:
    """The page with this table between its two marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n{END}{rest.partition(END)[2]}"


def main(arguments: list[str] | None = None) -> int:
    """Write or check; 0 if both pages are right afterwards."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(arguments).check
    if not check:
        names = [(model, method, gpu) for model in MODELS for method in METHODS for gpu in GPUS]
        found = {key(*name): search_cell(*name) for name in names}
        RESULTS.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    wrong = []
    for path, table in zip(PAGES, (short_table(results), long_table(results)), strict=True):
        old = Path(path).read_text(encoding="utf-8")
        new = replaced(old, table)
        wrong += [path.name] if old != new else []
        if not check:
            path.write_text(new, encoding="utf-8")
    if check and wrong:
        print(f"{', '.join(wrong)}: out of date; python -m tests.memory_table writes it", file=sys.stderr)
    return int(check and bool(wrong))


if __name__ == "__main__":
    sys.exit(main())

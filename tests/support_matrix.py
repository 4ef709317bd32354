"""Turn the parity tests' results into the support matrix: its first table is in the README, the others are a page.

pytest tests/parity tests/outside --record-support    # writes tests/results/support.json
pytest tests/outside --add-support                    # replaces the cells that it runs, keeps the others
python -m tests.support_matrix                        # writes README.md and docs/reference/support_matrix.md
python -m tests.support_matrix --check                # exit 1 if one of them says anything else
"""

import argparse
import json
import math
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- support-matrix:begin -->", "<!-- support-matrix:end -->"
SIGNS = {"passed": "✓", "failed": "✗", "refused": "–", None: ""}
#: A layout is named by its axes in this order, in whichever a test spells them.
AXES = ("dp_replicate", "tp", "pp", "cp", "dp_shard", "ep")
LIBRARIES = ("torch", "transformers", "accelerate")

# Rows of the tables, in order; a cell in another row is a typing error.
TABLES = {
    "model": (
        "Llama",
        "Qwen3",
        "Mistral",
        "Qwen2",
        "Gemma 2",
        "Gemma 3",
        "Phi-3",
        "GPT-2",
        "GPT-NeoX",
        "OPT",
        "Falcon",
        "BLOOM",
        "DeepSeek-V3 dense",
        "Granite SWA",
        "BERT",
        "RoBERTa",
        "T5",
        "ViT",
        "Llava",
    ),
    "mixture of experts": ("Mixtral", "Qwen3-MoE", "DeepSeek-V3"),
    "pipeline schedule": (
        "1f1b",
        "gpipe",
        "interleaved_1f1b",
        "looped_bfs",
        "interleaved_zero_bubble",
        "zbv_zero_bubble",
        "dualpipe_v",
    ),
    "feature": (
        "from_config",
        "IterableDataset",
        "bf16",
        "checkpointing",
        "label smoothing",
        "own loss",
        "odd sizes",
        "tp_overlap",
        "tp_mesh",
        "LoRA",
        "DoRA",
        "QLoRA",
        "LoRA, tokens added",
        "saved on rank 0",
        "scalars",
        "model_init",
        "hyperparameter_search",
        "two models",
        "Accelerate loop",
        "library",
    ),
    "context parallelism": (
        "Llama, each variant",
        "Qwen3, each variant",
        "Mistral, each variant",
        "Gemma 3, each variant",
        "GPT-2, each variant",
        "BERT, each variant",
        "Gemma 2, odd heads",
        "ring, plain rows and packs",
        "Trainer",
        "Trainer, own loss",
        "Trainer, LoRA",
        "recomputed layers",
        "resumed on other ranks",
        "experts, odd rows",
        "experts, Trainer",
        "experts, balance",
        "experts, LoRA",
        "sft of TRL",
        "dpo of TRL",
        "kto of TRL",
        "reward of TRL",
    ),
    "unchanged script": (
        "trl sft",
        "trl dpo",
        "trl kto",
        "trl reward",
        "trl grpo",
        "trl rloo",
        "trl distillation",
        "trl cpo",
        "trl orpo",
        "trl tpo",
        "trl gkd",
        "trl gold",
        "trl iw_opd",
        "trl online_dpo",
        "trl sdft",
        "trl sdpo",
        "trl gmpo",
        "run_clm",
        "run_clm from scratch",
        "run_clm --streaming",
        "run_clm_no_trainer",
        "run_mlm",
        "run_glue",
        "run_glue, decoder",
        "run_qa",
        "run_summarization",
        "nlp_example",
        "nlp_example, decoder",
        "complete_nlp_example",
        "complete_nlp_example, resumed",
        "gradient_accumulation",
        "gradient_accumulation_for_autoregressive_models",
        "early_stopping",
        "multi_process_metrics",
        "cross_validation",
        "peft sft",
        "peft_lora_clm_accelerate",
        "dora_finetuning",
        "sentence-transformers",
    ),
}
ROWS = {row for rows in TABLES.values() for row in rows}

#: What rows call the models of `tests/models.py`.
NAMES = {
    **{"llama": "Llama", "qwen3": "Qwen3", "mistral": "Mistral", "gemma3": "Gemma 3", "phi3": "Phi-3"},
    **{"gpt2": "GPT-2", "gpt_neox": "GPT-NeoX", "opt": "OPT", "opt_350m": "OPT", "bloom": "BLOOM"},
    **{"falcon": "Falcon", "falcon_7b": "Falcon", "falcon_rw": "Falcon", "granite_swa": "Granite SWA"},
    **{"bert": "BERT", "roberta": "RoBERTa", "t5": "T5", "t5_gated": "T5", "vit": "ViT", "llava": "Llava"},
    **{"deepseek_v3": "DeepSeek-V3 dense", "deepseek_moe": "DeepSeek-V3"},
    **{"mixtral": "Mixtral", "qwen3_moe": "Qwen3-MoE"},
}

#: The tables that the README shows; the others are on the page.
FIRST = ("model",)
REST = tuple(title for title in TABLES if title not in FIRST)

#: What a tick of each table was compared in with one process, step by step.
TRAINER = "loss, gradient norm, sets of gradients, evaluation, predictions, saved weights"
COMPARED = {
    "model": TRAINER,
    "mixture of experts": TRAINER,
    "pipeline schedule": TRAINER,
    "feature": f"{TRAINER}; of DoRA, QLoRA, two models, Accelerate loop and library: losses, gradients or weights",
    "context parallelism": "losses, gradient norms, sets of gradients, weights; of Trainer and TRL as in their tables",
    "unchanged script": "what the script logs and saves, gradient norm; of TRL its metrics and sets of gradients",
}


def commit() -> str:
    """The commit that is checked out, for what is recorded now."""
    told = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return told.stdout.strip() or "unknown"


def versions() -> dict[str, str]:
    """Versions of the libraries the results are valid for, without local build tags."""
    return {name: version(name).split("+")[0] for name in LIBRARIES}


def layout(spec: str) -> str:
    """One name for the axes of a layout, whatever else its spec says: `dp_shard=2,tp=2` is `tp=2,dp_shard=2`."""
    axes = [item for item in spec.split(",") if item.split("=")[0] in AXES]
    return ",".join(sorted(axes, key=lambda item: AXES.index(item.split("=")[0])))


def cell(item: pytest.Function) -> tuple[str, str] | None:
    """The layout and the row that a case stands for: those of its marker, or of its parameters as that names them."""
    marker = item.get_closest_marker("support")
    if marker is None:
        return None
    given = item.callspec.params if hasattr(item, "callspec") else {}
    names = {key: NAMES.get(value, value) if isinstance(value, str) else value for key, value in given.items()}
    *spec, row = marker.args
    return layout(spec[0] if spec else given.get("spec") or f"cp={given['size']}"), row.format(**names)


def added(former: dict, results: dict) -> dict:
    """The results of a part of the tests over those of an earlier run.

    After an upgrade of the libraries a row is recorded whole, and rows that are not say their older versions.

    Raises:
        ValueError: a row would mix results of two versions.
    """
    commits = dict(former.get("commits", {}))
    if former["versions"] != results["versions"]:
        rows = {row for column in results["cells"].values() for row in column}
        kept = {(layout(spec), row) for spec, column in former["cells"].items() for row in column}
        kept -= {(layout(spec), row) for spec, column in results["cells"].items() for row in column}
        mixed = sorted({row for _, row in kept} & rows)
        if mixed:
            raise ValueError(f"recorded with {former['versions']}: run all cells of {', '.join(mixed)} again")
        older = {name: number for name, number in former["versions"].items() if results["versions"][name] != number}
        told = " with " + ", ".join(f"{name} {number}" for name, number in older.items())
        commits.update({row: name + told * (" with " not in name) for row, name in commits.items()})
    cells: dict[str, dict[str, str]] = {}
    for spec, rows_of_spec in [*former["cells"].items(), *results["cells"].items()]:
        cells.setdefault(layout(spec), {}).update(rows_of_spec)
    return {"versions": results["versions"], "commits": {**commits, **results.get("commits", {})}, "cells": cells}


def order(spec: str) -> tuple[int, int]:
    """Columns from few to many axes, then from few to many ranks."""
    sizes = [int(item.split("=")[1]) for item in spec.split(",")]
    return len(sizes), math.prod(sizes)


def table(results: dict, titles: tuple[str, ...] = tuple(TABLES)) -> str:
    """The markdown tables, a row per model or feature and a column per spec, and the versions below them."""
    cells = added(results, {"versions": results["versions"], "cells": {}})["cells"]
    unknown = {row for column in cells.values() for row in column} - ROWS
    if unknown:
        raise ValueError(f"rows {sorted(unknown)} are not in TABLES of tests/support_matrix.py")
    commits = results.get("commits", {})
    rows_of = {title: TABLES[title] for title in titles}
    tables = [_table(title, rows, cells) and _told(title, rows, cells, commits) for title, rows in rows_of.items()]
    tested = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    signs = f"✓ same numbers as one process, ✗ not, – refused at start, blank not tested; with {tested}."
    return "\n\n".join([*filter(None, tables), signs])


def _told(title: str, rows: tuple[str, ...], cells: dict, commits: dict[str, str]) -> str:
    """A table, what was compared, and the commits that its rows were recorded on."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if any(row in column for column in cells.values()):
            found.setdefault(commits.get(row, "unknown"), []).append(row)
    most = max(found, key=lambda name: len(found[name]))
    others = "".join(f"; {', '.join(found[name])} on {name}" for name in found if name != most)
    return f"{_table(title, rows, cells)}\n\nCompared: {COMPARED[title]}. Recorded on commit {most}{others}."


def _table(title: str, rows: tuple[str, ...], cells: dict) -> str:
    """One table, with the specs that any of its rows was tested on; empty if there are none."""
    specs = sorted((spec for spec in cells if set(rows) & set(cells[spec])), key=order)
    if not specs:
        return ""
    lines = [f"| {title} | " + " | ".join(f"`{spec}`" for spec in specs) + " |", "| --- |" + " :-: |" * len(specs)]
    for row in rows:
        if any(row in cells[spec] for spec in specs):
            signs = " | ".join(SIGNS[cells[spec].get(row)] for spec in specs)
            lines.append(f"| {row} | {signs} |")
    return "\n".join(lines)


def replaced(page: str, matrix: str) -> str:
    """A page's text with everything between the two markers replaced."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise ValueError(f"a page needs exactly one {BEGIN} and one {END}")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{matrix}\n{END}{rest.split(END)[1]}"


def main(arguments: list[str] | None = None) -> int:
    """Write or check both pages; 0 when they are right afterwards."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a page is out of date")
    parser.add_argument("--results", type=Path, default=ROOT / "tests" / "results" / "support.json")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "reference" / "support_matrix.md")
    options = parser.parse_args(arguments)
    results = json.loads(options.results.read_text(encoding="utf-8"))
    pages = ((options.readme, FIRST), (options.page, REST))
    return max(_written(path, table(results, titles), options.check) for path, titles in pages)


def _written(path: Path, matrix: str, check: bool) -> int:
    """One page; 1 if it is out of date and only checked."""
    old = path.read_text(encoding="utf-8")
    new = replaced(old, matrix)
    if check and new != old:
        print(f"{path.name} is out of date: run python -m tests.support_matrix", file=sys.stderr)
        return 1
    if new != old:
        path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Turn the parity tests' results into the support matrix of the README.

pytest tests/parity --record-support        # writes tests/results/support.json
python tests/support_matrix.py              # writes the table into README.md
python tests/support_matrix.py --check      # exit 1 if README.md says anything else
"""

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- support-matrix:begin -->", "<!-- support-matrix:end -->"
SIGNS = {"passed": "✓", "failed": "✗", None: ""}
LIBRARIES = ("torch", "transformers", "accelerate")

# Columns in the order of the README; a column no test knows is a typing error.
COLUMNS = (
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
    "from_config",
    "IterableDataset",
    "bf16",
    "checkpointing",
    "label smoothing",
    "own loss",
    "odd sizes",
    "gpipe",
    "Accelerate loop",
    "library",
)


def versions() -> dict[str, str]:
    """Versions of the libraries the results are valid for, without local build tags."""
    return {name: version(name).split("+")[0] for name in LIBRARIES}


def order(spec: str) -> tuple[int, int]:
    """Rows from few to many axes, then from few to many ranks."""
    sizes = [int(item.split("=")[1]) for item in spec.split(",")]
    ranks = 1
    for size in sizes:
        ranks *= size
    return len(sizes), ranks


def table(results: dict) -> str:
    """The markdown table, one row per spec and one column per model or variant, and the versions below it."""
    unknown = {column for row in results["cells"].values() for column in row} - set(COLUMNS)
    if unknown:
        raise ValueError(f"columns {sorted(unknown)} are not in COLUMNS of tests/support_matrix.py")
    lines = ["| spec | " + " | ".join(COLUMNS) + " |", "| --- |" + " :-: |" * len(COLUMNS)]
    for spec in sorted(results["cells"], key=order):
        row = results["cells"][spec]
        lines.append(f"| `{spec}` | " + " | ".join(SIGNS[row.get(column)] for column in COLUMNS) + " |")
    tested = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    return "\n".join([*lines, "", f"✓ same numbers as one process, ✗ not, blank not tested; with {tested}."])


def replaced(readme: str, matrix: str) -> str:
    """The README's text with everything between the two markers replaced."""
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md needs exactly one {BEGIN} and one {END}")
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{matrix}\n{END}{rest.split(END)[1]}"


def main(arguments: list[str] | None = None) -> int:
    """Write or check the README; 0 when it is right afterwards."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if README.md is out of date")
    parser.add_argument("--results", type=Path, default=ROOT / "tests" / "results" / "support.json")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    options = parser.parse_args(arguments)
    old = options.readme.read_text(encoding="utf-8")
    new = replaced(old, table(json.loads(options.results.read_text(encoding="utf-8"))))
    if options.check and new != old:
        print(f"{options.readme.name} is out of date: run python tests/support_matrix.py", file=sys.stderr)
        return 1
    if new != old:
        options.readme.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

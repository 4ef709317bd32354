"""Methods of libraries that add to Trainer: an optimizer of blocks, adapters as parametrizations."""

from pathlib import Path

from tests.outside.cases import Case

SCRIPT = str(Path(__file__).parent / "scripts" / "methods.py")


def method(name: str, more: str = "") -> Case:
    """A case of one method on the small Llama."""
    return Case(
        SCRIPT, f"--method {name} --model ROOT/llama --output_dir OUT --sources SOURCES --batch_size ROWS {more}"
    )


METHODS = {
    "BAdam": method("badam"),
    "BAdam, accumulated": method("badam", "--accumulation 2"),
    "minLoRA": method("minlora"),
    "minLoRA, before the layout": method("minlora", "--early"),
}

"""Facts that are put into single weights of a model, read from EasyEdit's checkout."""

from pathlib import Path

from tests.outside.cases import Case

EDITING = {
    f"EasyEdit FT, {objective}{', a copy' * bool(more)}": Case(
        str(Path(__file__).parent / "scripts" / "edit_facts.py"),
        f"--sources SOURCES --model ROOT/llama --output_dir OUT --objective {objective} {more}",
    )
    for objective, more in (("target_new", ""), ("target_new", "--copy"), ("prompt_last", ""))
}

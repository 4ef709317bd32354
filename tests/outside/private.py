"""Opacus, whose hooks keep the gradient of each example."""

from pathlib import Path

from tests.outside.cases import Case

SCRIPT = str(Path(__file__).parent / "scripts" / "private.py")
GIVEN = "--train_file ROOT/pairs/full.jsonl --output_dir OUT"
PRIVATE = {
    f"opacus{more}": Case(SCRIPT, f"--model ROOT/{model} {GIVEN} {words}", needs=("opacus",))
    for more, model, words in (
        ("", "bert", ""),
        (", prepared", "bert", "--prepare"),
        (", a decoder", "scores", "--trained score"),
        (", a decoder and layers", "scores", "--trained score+down_proj+q_proj"),
    )
}

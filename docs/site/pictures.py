"""One picture per axis: which of four ranks holds what of the model, and which part of the batch it computes.

    python docs/site/pictures.py        writes docs/images/AXIS.svg

A model is drawn as layers (rows) of columns, a batch as sequences (rows) of tokens. Ranks are told apart
without their colours, too: each cell has its rank's number. Texts take the colour of the page they stand on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

FOLDER = Path(__file__).parents[1] / "images"
COLOURS = ("#77aadd", "#ee8866", "#44bb99", "#eedd88")  # told apart by colour-blind readers (Paul Tol, light)
CELL, SIDE, LEFT, TOP = 30, 8, 20, 74

#: A cell's place -> its ranks' number, or None where every rank has it.
Owner = Callable[[int, int], "int | None"]


@dataclass(frozen=True)
class Axis:
    """What a picture says of an axis of four ranks; cells are (row, column) of eight by eight."""

    title: str
    model: Owner
    batch: Owner
    rows: str  # what the model's rows are
    sent: str


AXES = {
    "dp_replicate": Axis(
        "dp_replicate=4: the model on every rank, rows of the batch on each",
        lambda layer, column: None, lambda row, token: row // 2, "layers",
        "gradients, once per step",
    ),
    "dp_shard": Axis(
        "dp_shard=4: a quarter of each layer stored on every rank, rows of the batch on each",
        lambda layer, column: column // 2, lambda row, token: row // 2, "layers",
        "weights of a layer before it runs, its gradients after",
    ),
    "tp": Axis(
        "tp=4: a quarter of each matrix on every rank, the whole batch on all",
        lambda layer, column: column // 2, lambda row, token: None, "layers",
        "activations, gathered and scattered twice per layer",
    ),
    "pp": Axis(
        "pp=4: a quarter of the layers on every rank, through which the batch passes",
        lambda layer, column: layer // 2, lambda row, token: None, "layers",
        "activations to the next stage, their gradients to the one before",
    ),
    "cp": Axis(
        "cp=4: the model on every rank, an early and a late part of each sequence",
        lambda layer, column: None, lambda row, token: min(token, 7 - token), "layers",
        "keys and values in a ring, or heads for tokens (Ulysses)",
    ),
    "ep": Axis(
        "ep=4: two of eight experts on every rank, rows of the batch on each",
        lambda expert, column: expert // 2, lambda row, token: row // 2, "experts",
        "tokens to their experts, and what these answer",
    ),
}  # fmt: skip


def draw(axis: Axis) -> str:
    """The picture as SVG."""
    width, right = 2 * (8 * CELL + SIDE) + 3 * LEFT + 20, LEFT * 2 + 8 * CELL + SIDE + 20
    height = TOP + 8 * CELL + 58
    parts = [
        _text(LEFT, 24, axis.title, "bold"),
        _text(LEFT, TOP - 12, f"model: {axis.rows} ↓, columns →"),
        _text(right, TOP - 12, "batch: sequences ↓, tokens →"),
        *_grid(LEFT, axis.model),
        *_grid(right, axis.batch),
        _text(LEFT, TOP + 8 * CELL + 36, f"sent: {axis.sent}"),
    ]
    style = "text{font:13px system-ui,sans-serif;fill:#222}@media(prefers-color-scheme:dark){text.page{fill:#ddd}}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
    return "\n".join([head, f"<title>{escape(axis.title)}</title><style>{style}</style>", *parts, "</svg>", ""])


def _grid(left: int, owner: Owner) -> list[str]:
    cells = []
    for row in range(8):
        for column in range(8):
            x, y, rank = left + column * CELL, TOP + row * CELL, owner(row, column)
            colour = "#bbbbbb" if rank is None else COLOURS[rank]
            cells.append(f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" rx="3" fill="{colour}"/>')
            name = "all" if rank is None else str(rank)
            cells.append(f'<text x="{x + CELL / 2 - 1}" y="{y + CELL / 2 + 4}" text-anchor="middle">{name}</text>')
    return cells


def _text(x: int, y: int, words: str, weight: str = "normal") -> str:
    return f'<text class="page" x="{x}" y="{y}" font-weight="{weight}">{escape(words)}</text>'


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, axis in AXES.items():
        (FOLDER / f"{name}.svg").write_text(draw(axis))

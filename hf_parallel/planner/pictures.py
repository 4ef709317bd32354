"""Memory per layout as stacked bars: SVG written by hand, PNG with matplotlib where it is installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.pipeline import timeline as picture
from hf_parallel.planner.choices import Choice, Found
from hf_parallel.planner.pipeline import make_stages
from hf_parallel.planner.predict import predict_timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: From what stays to what passes; told apart in grey too.
COLOURS = ["#1f4e8c", "#5b8fd6", "#a9c7ee", "#d9822b", "#f1c27d", "#8d7bb5", "#66727f", "#c9ced6"]
_INK, _QUIET, _LINE = "#1f2933", "#66727f", "#d3d9e0"
_LEFT, _TOP, _PLOT, _ROW, _STEP, _MARGIN = 380, 78, 760, 26, 36, 90  # pixels


def write_memory(path: str | Path, found: Found) -> None:
    """Draw a bar per layout, its kinds of memory side by side, the GPU's memory as a line.

    Raises:
        SpecError: a PNG without matplotlib, or another kind of file.
    """
    if not found.choices:
        refuse(path, "no layout fits, so there is nothing to draw")
    kinds = list[str]()  # those that some layout has more than a thousandth of, in one order
    for choice in found.choices:
        memory, least = choice.prediction.breakdown.memory, 1e-3 * choice.prediction.memory_gib
        kinds += [kind for kind, size in memory.items() if size > least and kind not in kinds]
    if str(path).endswith(".png"):
        names, left = [choice.config.to_spec() for choice in found.choices], [0.0] * len(found.choices)
        with _open_png(path, (12, 1.5 + 0.4 * len(names))) as axes:
            for i, kind in enumerate(kinds):
                sizes = [choice.prediction.breakdown.memory.get(kind, 0.0) for choice in found.choices]
                axes.barh(names, sizes, left=left, label=kind, color=COLOURS[i % len(COLOURS)])
                left = [a + b for a, b in zip(left, sizes, strict=True)]
            axes.axvline(found.goal.cluster.gpu.memory_gib, color=_INK, linestyle="--")
            axes.set_xlabel("GiB on the fullest rank")
            axes.legend(fontsize=8, ncols=4, loc="upper center", bbox_to_anchor=(0.3, -0.15))
    elif str(path).endswith(".svg"):
        Path(path).write_text(_render_memory_picture(found, kinds), encoding="utf-8")
    else:
        refuse(path, "pictures are .svg or .png", "memory.svg")


def _render_memory_picture(found: Found, kinds: list[str]) -> str:
    choices, limit = found.choices, found.goal.cluster.gpu.memory_gib
    scale = _PLOT / max(limit, *(choice.prediction.memory_gib for choice in choices))
    foot = _TOP + len(choices) * _STEP
    width, height = _LEFT + _PLOT + _MARGIN, foot + 74
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _render_text(24, 34, f"{found.goal.shape.name}: memory of the fullest rank", size=19),
        _render_text(24, 56, found.goal.where, fill=_QUIET),
    ]
    for row, choice in enumerate(choices):  # a bar of each layout
        y, x = _TOP + row * _STEP, float(_LEFT)
        spec = choice.config.to_spec()
        shown = spec if len(spec) < 56 else spec[:53] + "…"
        lines.append(_render_text(_LEFT - 12, y + 17, shown, anchor="end", title=spec))
        for i, kind in enumerate(kinds):
            size = choice.prediction.breakdown.memory.get(kind, 0.0)
            wide = size * scale
            if wide > 0:
                lines.append(
                    f'<g><title>{escape(kind)}: {size:.2f} GiB</title><rect class="part" x="{x:.2f}" y="{y}" '
                    f'width="{wide:.2f}" height="{_ROW}" fill="{COLOURS[i % len(COLOURS)]}"/></g>'
                )
            x += wide
        lines.append(_render_text(x + 8, y + 17, f"{choice.prediction.memory_gib:.1f}", fill=_QUIET))
    x = _LEFT + limit * scale
    lines.append(f'<path d="M{x:.1f} {_TOP - 8}V{foot}" stroke="{_INK}" stroke-dasharray="4 3"/>')
    lines.append(_render_text(x, _TOP - 12, f"{limit:.0f} GiB", anchor="middle"))
    x, y = 24.0, foot + 34
    for i, kind in enumerate(kinds):  # the legend
        colour = COLOURS[i % len(COLOURS)]
        lines.append(f'<rect x="{x}" y="{y - 11}" width="14" height="14" rx="2" fill="{colour}"/>')
        lines.append(_render_text(x + 20, y, kind))
        x += 44 + 6.6 * len(kind)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _render_text(
    x: float, y: float, text: str, fill: str = _INK, anchor: str = "start", size: int = 12, title: str = ""
) -> str:
    full = f"<title>{escape(title)}</title>" if title else ""
    style = f'fill="{fill}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text x="{x:.2f}" y="{y:.2f}" {style}>{full}{escape(text)}</text>'


def write_timeline(path: str | Path, choice: Choice) -> str:
    """Draw the simulated step of a pipeline, with its stages' predicted times; return a line about it.

    Raises:
        SpecError: the layout has no pipeline, or a PNG is asked for without matplotlib.
    """
    if choice.config.pp_size == 1:
        refuse(path, f"{choice.config.to_spec()} has no pipeline to draw", "--parallel pp=4")
    p = choice.prediction
    timeline, shown = predict_timeline(make_stages(p.shape, p.layout, p.job), p.layout, p.job, p.cluster)
    name = choice.config.pipeline_schedule
    if str(path).endswith(".png"):
        with _open_png(path, (14, 1.2 + 0.45 * timeline.ranks)) as axes:
            for kind, (colour, label) in picture.COLOURS.items():
                for i, span in enumerate(span for span in timeline.spans if span.kind == kind):
                    place = [(span.start - timeline.start, span.end - span.start)]
                    label_once = None if i else label
                    axes.broken_barh(place, (span.rank - 0.4, 0.8), color=colour, edgecolor="white", label=label_once)
            axes.set_yticks(range(timeline.ranks), [f"rank {rank}" for rank in range(timeline.ranks)])
            axes.set_xlabel("seconds")
            axes.set_title(f"{name}, bubble {timeline.bubble:.1%}")
            axes.legend(fontsize=8, ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    else:
        picture.write_timeline_picture(path, timeline, name, predicted=timeline.bubble)
    return f"{path}: {name}, {shown} micro-batches, bubble {timeline.bubble:.1%}"


@contextlib.contextmanager
def _open_png(path: str | Path, size: tuple[float, float]) -> Iterator[Axes]:
    """Yield the axes of a picture that is written at the end."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as pyplot
    except ImportError as error:
        refuse(path, "PNG needs matplotlib (pip install 'hf-parallel[plots]')", ".svg", cause=error)
    figure, axes = pyplot.subplots(figsize=size)
    yield axes
    axes.invert_yaxis()
    figure.savefig(path, bbox_inches="tight", dpi=110)
    pyplot.close(figure)

"""A timeline as a picture: one row per rank, time to the right, one box per action. Plain SVG, written by hand.

write("step.svg", timeline, "1f1b", predicted=3 / 11, measured=timeline.bubble)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from html import escape
from pathlib import Path

from hf_parallel.axes.pipeline.orders import BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, FORWARD
from hf_parallel.axes.pipeline.timeline import COMMUNICATION, Span, Timeline

#: Told apart by hue and by lightness, so that the picture also reads in grey and without red and green.
COLOURS = {
    FORWARD: ("#2f6fba", "forward"),
    BACKWARD: ("#d9822b", "backward"),
    BACKWARD_INPUT: ("#c8553d", "backward, input"),
    BACKWARD_WEIGHT: ("#e9b949", "backward, weights"),
    COMMUNICATION: ("#8d7bb5", "communication"),
}
IDLE, INK, QUIET, LINE = "#eceff3", "#1f2933", "#66727f", "#d3d9e0"
_LEFT, _TOP, _PLOT, _ROW, _STEP, _MARGIN = 76, 78, 1120, 32, 40, 24  # pixels; a row and its distance to the next


def write(
    path: str | Path, timeline: Timeline, name: str, predicted: float | None = None, measured: float | None = None
) -> None:
    """Write the picture of a timeline; the arguments are those of `svg`."""
    Path(path).write_text(svg(timeline, name, predicted, measured), encoding="utf-8")


def svg(timeline: Timeline, name: str, predicted: float | None = None, measured: float | None = None) -> str:
    """The picture as text.

    Args:
        name: of the schedule, for the title.
        predicted, measured: bubbles for the caption, as parts of one.
    """
    foot = _TOP + timeline.ranks * _STEP
    width, height = _LEFT + _PLOT + _MARGIN, foot + 76
    lines = [
        *head(width, height, _LEFT, name, _caption(timeline, predicted, measured)),
        *_rows(timeline),
        *_boxes(timeline),
        *time_axis(timeline.duration, _LEFT, foot, _PLOT),
        *_legend(timeline, foot + 52),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def _caption(timeline: Timeline, predicted: float | None, measured: float | None) -> str:
    stages, micro_batches = ({span[field] for span in timeline.spans} for field in (2, 3))
    values = (("predicted", predicted), ("measured", measured))
    bubble = ", ".join(f"{value:.1%} {word}" for word, value in values if value is not None)
    text = f"{timeline.ranks} ranks · {len(stages)} stages · {len(micro_batches)} micro-batches"
    return f"{text} · bubble {bubble}" if bubble else text


def _rows(timeline: Timeline) -> Iterator[str]:
    """What stays visible of a row is idle time."""
    for rank in range(timeline.ranks):
        y = _TOP + rank * _STEP
        yield text_at(_LEFT - 12, y + _ROW / 2 + 4, f"rank {rank}", fill=QUIET, anchor="end")
        yield f'<rect class="idle" x="{_LEFT}" y="{y}" width="{_PLOT}" height="{_ROW}" rx="3" fill="{IDLE}"/>'


def _boxes(timeline: Timeline) -> Iterator[str]:
    scale = _PLOT / timeline.duration
    shades = _shades(timeline)
    # Communication first: it may run beside a computation, which stays in front of it.
    for span in sorted(timeline.spans, key=lambda span: span.kind != COMMUNICATION):
        x, wide = _LEFT + (span.start - timeline.start) * scale, (span.end - span.start) * scale
        if wide > 0:  # the first stage's input gradient takes no time
            yield _box(
                span, x, _TOP + span.rank * _STEP, wide, _mix(COLOURS[span.kind][0], shades[span.rank, span.stage])
            )


def _box(span: Span, x: float, y: float, wide: float, colour: str) -> str:
    label, thin = str(span.micro_batch), span.kind == COMMUNICATION
    high = _ROW / 4 if thin else _ROW
    about = f"{COLOURS[span.kind][1]}, stage {span.stage}, micro-batch {label}: {span.start:.4g} to {span.end:.4g}"
    text = ""
    if not thin and wide >= 7 * len(label) + 4:
        ink = "#ffffff" if _luminance(colour) < 0.45 else INK
        text = text_at(x + wide / 2, y + _ROW / 2 + 4, label, fill=ink, anchor="middle")
    return (
        f'<g><title>{escape(about)}</title><rect class="box {span.kind}" x="{x:.2f}" y="{y + _ROW - high:.2f}" '
        f'width="{wide:.2f}" height="{high:.2f}" rx="2" fill="{colour}" stroke="#ffffff"/>{text}</g>'
    )


def _shades(timeline: Timeline) -> dict[tuple[int, int], float]:
    """How much white to mix in: the later a stage among those of its rank, the lighter."""
    shades = {}
    for rank in range(timeline.ranks):
        stages = sorted({span.stage for span in timeline.spans if span.rank == rank})
        for place, stage in enumerate(stages):
            shades[rank, stage] = 0.55 * place / max(1, len(stages) - 1)
    return shades


def head(width: float, height: float, x: float, name: str, caption: str) -> Iterator[str]:
    """The picture's begin: a white page with a title."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, DejaVu Sans, sans-serif" font-size="12">'
    )
    yield f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    yield text_at(x, 34, name, size=19, weight=600)
    yield text_at(x, 56, caption, fill=QUIET, size=13)


def time_axis(duration: float, left: float, y: float, wide: float, unit: str = "") -> Iterator[str]:
    """The axis of time below the rows."""
    yield f'<path d="M{left} {y}h{wide}" stroke="{LINE}"/>'
    for tick in _ticks(duration):
        x = left + tick / duration * wide
        yield f'<path d="M{x:.2f} {y}v5" stroke="{LINE}"/>'
        yield text_at(x, y + 19, f"{tick:.6g}{unit}", fill=QUIET, anchor="middle", size=11)


def _ticks(duration: float) -> list[float]:
    """From 0 on, at 1, 2 or 5 times a power of ten, about ten of them."""
    power = 10.0 ** math.floor(math.log10(duration / 10))
    step = next(power * n for n in (1, 2, 5, 10) if power * n * 12 >= duration)
    return [tick * step for tick in range(int(duration / step * (1 + 1e-9)) + 1)]


def _legend(timeline: Timeline, y: float) -> Iterator[str]:
    shown = {span.kind for span in timeline.spans if span.end > span.start}
    entries = [pair for kind, pair in COLOURS.items() if kind in shown] + [(IDLE, "idle")]
    x = float(_LEFT)
    for colour, label in entries:
        yield f'<rect class="key" x="{x}" y="{y - 11}" width="14" height="14" rx="2" fill="{colour}"/>'
        yield text_at(x + 20, y, label)
        x += 44 + 6.6 * len(label)
    if max(len({s.stage for s in timeline.spans if s.rank == rank}) for rank in range(timeline.ranks)) > 1:
        yield text_at(x, y, "lighter: a later stage of the same rank", fill=QUIET)


def text_at(
    x: float, y: float, text: str, fill: str = INK, anchor: str = "start", size: int = 12, weight: int = 400
) -> str:
    """A line of text."""
    style = f'fill="{fill}" text-anchor="{anchor}" font-size="{size}" font-weight="{weight}"'
    return f'<text x="{x:.2f}" y="{y:.2f}" {style}>{escape(text)}</text>'


def _mix(colour: str, white: float) -> str:
    return "#" + "".join(f"{round(value + (255 - value) * white):02x}" for value in bytes.fromhex(colour[1:]))


def _luminance(colour: str) -> float:
    red, green, blue = bytes.fromhex(colour[1:])
    return (0.299 * red + 0.587 * green + 0.114 * blue) / 255

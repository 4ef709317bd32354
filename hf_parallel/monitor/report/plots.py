"""Curves and stacked bars as SVG to be put into a page: matplotlib draws, the page's style sheet has the colours.

Widths suit a phone; a page that is wider shows several side by side. Text stays text.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hf_parallel.spec import refuse

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.container import BarContainer


#: Colours that the page has as --c0, --c1, …
COLOURS = 9
_INK = "#010101"  # becomes that of the text around
_WIDE = 4.6  # inches
_INKS = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
_SETTINGS: Any = {
    "svg.fonttype": "none",  # text, in the font of the page
    "font.size": 8.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "legend.frameon": False,
    "text.parse_math": False,  # names come from files
    **dict.fromkeys(_INKS, _INK),
}


@dataclass(frozen=True)
class Curve:
    """One line of a diagram."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    colour: int = 0


@dataclass(frozen=True)
class Bar:
    """A row of stacked parts: name, value, colour."""

    label: str
    parts: Sequence[tuple[str, float, int]]


def curves(name: str, lines: Sequence[Curve], unit: str) -> str:
    """Values over steps; what is not finite leaves a gap."""
    with _figure(name, 2.6) as drawing:
        axes = drawing.figure.subplots()
        for line in lines:
            values = [value if math.isfinite(value) else math.nan for value in line.values]
            few = "o" if len(values) < 40 else None
            style: dict = {"color": _colour(line.colour), "linewidth": 1.6, "marker": few, "markersize": 3}
            axes.plot(line.steps, values, label=_plain(line.label), **style)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("step")
        axes.set_ylabel(_plain(unit))
        axes.grid(True, axis="y", linewidth=0.4, alpha=0.4)
        if len(lines) > 1:
            drawing.legend(axes)
    return drawing.text


def bars(name: str, groups: Sequence[Sequence[Bar]], unit: str) -> str:
    """Rows of stacked parts; each group has a scale of its own."""
    rows = [len(group) for group in groups]
    with _figure(name, 1.1 + 0.24 * sum(rows) + 0.45 * len(groups)) as drawing:
        drawn = drawing.figure.subplots(len(groups), squeeze=False, height_ratios=[count + 0.5 for count in rows])
        seen: dict[str, BarContainer] = {}
        for axes, group in zip(drawn[:, 0], groups, strict=True):
            seen |= _stacked(axes, group)
            axes.locator_params(axis="x", nbins=6)
            axes.set_xlabel(_plain(unit))
        drawing.legend(drawn[0, 0], seen)
    return drawing.text


def _stacked(axes: Axes, group: Sequence[Bar]) -> dict[str, BarContainer]:
    """Draw a group; a handle for each kind of part."""
    seen: dict[str, BarContainer] = {}
    for row, bar in enumerate(group):
        left = 0.0
        for part, value, colour in bar.parts:
            drawn = axes.barh(row, value, left=left, height=0.72, color=_colour(colour))
            seen.setdefault(part, drawn)
            left += value
    axes.set_yticks(range(len(group)), [_plain(bar.label) for bar in group])
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    return seen


class _figure:
    """A figure, and afterwards its SVG as `text`."""

    def __init__(self, name: str, high: float) -> None:
        try:
            import matplotlib
            from matplotlib.figure import Figure
        except ImportError as error:
            refuse("report", "draws with matplotlib", do="pip install 'hf-parallel[plots]'", cause=error)
        self.name, self.text = name, ""
        self._settings = matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name})
        self._settings.__enter__()
        self.figure: Any = Figure(figsize=(_WIDE, high), layout="constrained", facecolor="none")
        engine: Any = self.figure.get_layout_engine()
        engine.set(w_pad=0.1, h_pad=0.06)  # fonts of browsers differ in width

    def __enter__(self) -> _figure:
        return self

    def __exit__(self, *error: Any) -> None:
        try:
            if error[0] is None:
                for axes in self.figure.axes:
                    axes.set_facecolor("none")
                file = io.StringIO()
                self.figure.savefig(file, format="svg", transparent=True)
                self.text = _inline(file.getvalue(), self.name)
        finally:
            self._settings.__exit__(*error)

    def legend(self, axes: Axes, entries: dict[str, Any] | None = None) -> None:
        """Below the diagram."""
        handles, labels = axes.get_legend_handles_labels()
        if entries is not None:
            handles, labels = list(entries.values()), [_plain(label) for label in entries]
        narrow = {"handlelength": 1.0, "columnspacing": 1.2, "handletextpad": 0.4}
        self.figure.legend(handles, labels, loc="outside lower left", ncols=3, fontsize=8, **narrow)


def _plain(text: str) -> str:
    """Not too long."""
    return text if len(text) <= 32 else text[:31] + "…"


def _colour(number: int) -> str:
    return f"#0201{number % COLOURS:02x}"


def _inline(text: str, name: str) -> str:
    """A part of a page: without a head and addresses, ids and colours those of the page."""
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    head, tag, rest = text.partition(">")
    view = re.search(r'viewBox="[^"]*"', head)
    rest = rest.replace("xlink:href=", "href=")
    rest = re.sub(r'\bid="', f'id="{name}-', rest)
    rest = re.sub(r"url\(#", f"url(#{name}-", rest)
    rest = re.sub(r'href="#', f'href="#{name}-', rest)
    rest = rest.replace(_INK, "currentColor")
    rest = re.sub(r"#0201([0-9a-f]{2})", lambda found: f"var(--c{int(found[1], 16)})", rest)
    rest = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px system-ui, sans-serif", rest)
    return f'<svg class="plot" role="img" {view[0] if view else ""}>{rest}'

"""A page about a training, made of what it has left in its output folder: HTML, and nothing beside it.

    path = write("OUTPUT_DIR")                 # OUTPUT_DIR/report.html

The page is one text without scripts and without addresses. All that comes from files is escaped.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import io
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from hf_parallel.ask.spec import refuse
from hf_parallel.monitor.expected import BUBBLE, COMMUNICATION, COMPUTE, OTHER, find_term_of
from hf_parallel.monitor.report_facts import (
    PARTS,
    Facts,
    as_mapping,
    compute_shares,
    list_advice,
    list_finite_numbers,
    number,
    read_facts,
)
from hf_parallel.ranks.mesh import compute_coordinates, compute_data_rank

if TYPE_CHECKING:
    from hf_parallel.monitor.report_facts import Line


# ---- Curves and stacked bars as SVG to be put into a page: matplotlib draws, the page's style sheet has the colours
# Widths suit a phone; a page that is wider shows several side by side. Text stays text.


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
    """A line of a diagram."""

    label: str
    steps: Sequence[float]
    values: Sequence[float]
    colour: int = 0


@dataclass(frozen=True)
class Bar:
    """A row of stacked parts: name, value, colour."""

    label: str
    parts: Sequence[tuple[str, float, int]]


def draw_curves(name: str, lines: Sequence[Curve], unit: str) -> str:
    """Draw values over steps; a value that is not finite leaves a gap."""
    with _plot(name, 2.6) as drawing:
        axes = drawing.figure.subplots()
        for line in lines:
            values = [value if math.isfinite(value) else math.nan for value in line.values]
            few = "o" if len(values) < 40 else None
            style: dict = {
                "color": f"#0201{line.colour % COLOURS:02x}",
                "linewidth": 1.6,
                "marker": few,
                "markersize": 3,
            }
            [shown] = axes.plot(line.steps, values, label=_shorten_text(line.label), **style)
            if len(lines) > 1:
                drawing.legend[line.label] = shown
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("step")
        axes.set_ylabel(_shorten_text(unit))
        axes.grid(True, axis="y", linewidth=0.4, alpha=0.4)
    return drawing.text


def draw_bars(name: str, groups: Sequence[Sequence[Bar]], unit: str) -> str:
    """Draw rows of stacked parts; each group has a scale of its own."""
    rows = [len(group) for group in groups]
    with _plot(name, 1.1 + 0.24 * sum(rows) + 0.45 * len(groups)) as drawing:
        drawn = drawing.figure.subplots(len(groups), squeeze=False, height_ratios=[count + 0.5 for count in rows])
        for axes, group in zip(drawn[:, 0], groups, strict=True):
            for row, bar in enumerate(group):
                left = 0.0
                for part, value, colour in bar.parts:
                    shown = axes.barh(row, value, left=left, height=0.72, color=f"#0201{colour % COLOURS:02x}")
                    drawing.legend.setdefault(part, shown)
                    left += value
            axes.set_yticks(range(len(group)), [_shorten_text(bar.label) for bar in group])
            axes.tick_params(axis="y", length=0)
            axes.invert_yaxis()
            axes.locator_params(axis="x", nbins=6)
            axes.set_xlabel(_shorten_text(unit))
    return drawing.text


@dataclass
class _Drawing:
    """A figure of matplotlib, what its legend names, and its SVG once it is drawn."""

    figure: Any
    legend: dict[str, Any] = field(default_factory=dict)
    text: str = ""


@contextlib.contextmanager
def _plot(name: str, high: float) -> Iterator[_Drawing]:
    """Make a figure to draw into; at the end its legend is added, and its SVG is there."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        refuse("report", "draws with matplotlib", do="pip install 'hf-parallel[plots]'", cause=error)
    with matplotlib.rc_context({**_SETTINGS, "svg.hashsalt": name}):
        drawing = _Drawing(Figure(figsize=(_WIDE, high), layout="constrained", facecolor="none"))
        figure = drawing.figure
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.06)  # fonts of browsers differ in width
        yield drawing
        if drawing.legend:
            handles, labels = list(drawing.legend.values()), [_shorten_text(label) for label in drawing.legend]
            narrow = {"handlelength": 1.0, "columnspacing": 1.2, "handletextpad": 0.4}
            figure.legend(handles, labels, loc="outside lower left", ncols=3, fontsize=8, **narrow)
        for axes in figure.axes:
            axes.set_facecolor("none")
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True)
    # A part of a page: without a head and addresses, ids and colours those of the page
    text = file.getvalue()
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
    drawing.text = f'<svg class="plot" role="img" {view[0] if view else ""}>{rest}'


def _shorten_text(text: str) -> str:
    """Cut a text that is too long."""
    return text if len(text) <= 32 else text[:31] + "…"


# ---- The figures of a page: which numbers of a training are drawn, and what is said below them ----------------------


_COPIES, _RANKS = 8, 16  # shown one by one
_GIB = 2**30
_SEEN = 0.002  # of a step: less is no part of a legend
#: Colours of what a step's time goes to.
_PART_COLOURS = {"compute": 0, "tp": 1, "dp": 2, "cp": 3, "ep": 4, "all": 6, "pp": 5, "data": 7, "rest": 8}
#: What torch's allocator never sees, and on a CPU nobody holds.
_OUTSIDE = ("context", "communication buffers")
_DEVICE_ONLY = (*_OUTSIDE, "held by the allocator")


def _render_figure(name: str, title: str, content: str, caption: str = "") -> str:
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f'<figure id="figure-{name}"><h3>{escape(title)}</h3>{content}{below}</figure>'


# ---- the layout -----------------------------------------------------------------------------------------------------


def render_layout(facts: Facts) -> str:
    """Show which rank holds which part of which copy of the model."""
    config = facts.config
    if config is None:
        return ""
    copies: dict[int, dict[int, list[int]]] = {}
    for rank in range(config.world_size):
        stage = compute_coordinates(config, rank)["pp"]
        copies.setdefault(compute_data_rank(config, rank), {}).setdefault(stage, []).append(rank)
    shown = ""
    for number_of_copy in sorted(copies)[:_COPIES]:
        stages = ""
        for stage, members in sorted(copies[number_of_copy].items()):
            name = f"stage {stage}" if config.pp_size > 1 else "ranks"
            ranks = "".join(f"<i>{rank}</i>" for rank in members)
            stages += f'<div class="stage"><span>{name}</span>{ranks}</div>'
        shown += f'<div class="copy"><b>data rank {number_of_copy}</b>{stages}</div>'
    more = f'<p class="quiet">and {len(copies) - _COPIES} more like these</p>' if len(copies) > _COPIES else ""
    told = as_mapping(as_mapping(facts.layout.get("plan")).get("facts"))
    caption = " · ".join(f"{name} {value}" for name, value in told.items())
    title = ", ".join(f"{axis}={size}" for axis, size in config.sizes.items() if size > 1) or "one process"
    return _render_figure("layout", title, f'<div class="copies">{shown}</div>{more}', caption)


# ---- curves ---------------------------------------------------------------------------------------------------------


def render_curve_figures(facts: Facts) -> Iterator[str]:
    """Show loss, gradient norm, throughput and step time, each where it was logged."""
    wanted = [
        ("loss", "Loss", "", [("training", "loss", 0), ("evaluation", "eval_loss", 1)]),
        ("grad-norm", "Gradient norm", "", [("gradient norm", "grad_norm", 5)]),
        ("throughput", "Throughput", "tokens per second", [("tokens per second", "perf/tokens_per_second", 3)]),
        ("step-time", "Time of a step", "seconds", [("step time", "perf/step_time_s", 0)]),
    ]
    for name, title, unit, lines in wanted:
        drawn = []
        for label, key, colour in lines:
            found = {number(line.get("step")): number(line[key]) for line in facts.log if key in line}
            if any(map(math.isfinite, found.values())):
                drawn.append(Curve(label, list(found), list(found.values()), colour))
        if drawn:
            # Steps at which a number is none
            bad = [
                step
                for line in drawn
                for step, value in zip(line.steps, line.values, strict=True)
                if not math.isfinite(value)
            ]
            gaps = f"not finite at {len(bad)} logs, first at step {bad[0]:.0f}" if bad else ""
            yield _render_figure(name, title, draw_curves(name, drawn, unit), gaps)


# ---- time and memory ------------------------------------------------------------------------------------------------


def time(facts: Facts) -> Iterator[str]:
    """Show seconds of a step by kind: each rank, and the plan where there is one for this hardware."""
    ranks = facts.ranks
    if not any(sum(rank.get(part, 0.0) for part in PARTS) for rank in ranks):
        return
    used = [part for part, share in compute_shares(facts).items() if share > _SEEN]
    rows = [
        Bar(f"rank {rank}", [(PARTS[part], own.get(part, 0.0), _PART_COLOURS[part]) for part in used])
        for rank, own in enumerate(ranks[:_RANKS])
    ]
    planned = list_finite_numbers(facts.plan.get("time")) if facts.is_predicted else {}
    caption = "measured, a mean of all logs but the first"
    if planned:
        # The planner's kinds under the names of what is measured
        found = dict.fromkeys(PARTS, 0.0)
        parts = {COMPUTE: "compute", BUBBLE: "pp", OTHER: "rest"}
        for kind, seconds in planned.items():
            term, axis = find_term_of(kind), kind.partition(" ")[0]
            part = (axis if axis in ("tp", "cp", "ep") else "dp") if term == COMMUNICATION else parts[term]
            found[part] += seconds
        planned_parts = [(PARTS[part], seconds, _PART_COLOURS[part]) for part, seconds in found.items() if seconds > 0]
        rows.insert(0, Bar("planned", planned_parts))
        caption += "; planned: what the planner predicts for this layout"
    yield _render_figure(
        "time",
        "Where a step's time goes",
        draw_bars("time", [rows], "seconds per step"),
        caption + _describe_more_ranks(len(ranks)),
    )


def render_memory(facts: Facts) -> Iterator[str]:
    """Show what the planner counts by kind, beside what each rank has measured."""
    on_cpu = facts.run.get("device") == "cpu"
    kinds = list_finite_numbers(facts.plan.get("memory"))
    left_out = _DEVICE_ONLY if on_cpu else _OUTSIDE
    kept = [(kind, size) for kind, size in kinds.items() if size > 0 and kind not in left_out]
    planned = [Bar("planned", [(kind, size, place) for place, (kind, size) in enumerate(kept)])] if kept else []
    measured = []
    for rank, own in enumerate(facts.ranks[:_RANKS]):
        peak, reserved = own.get("memory_peak", 0.0) / _GIB, own.get("memory_reserved", 0.0) / _GIB
        parts = [("tensors, measured", peak, 6), ("reserved", max(0.0, reserved - peak), 8)]
        if peak:
            measured.append(Bar(f"rank {rank}", [("process, measured", peak, 6)] if on_cpu else parts))
    groups = [rows for rows in ([planned, measured] if on_cpu else [[*planned, *measured]]) if rows]
    if not groups:
        return
    caption = (
        "planned: tensors of the fullest rank by kind; measured on a CPU: the whole process, libraries included"
        if on_cpu
        else "the fullest moment; planned: of the fullest rank, without what torch's allocator does not see"
    )
    yield _render_figure(
        "memory", "Memory", draw_bars("memory", groups, "GiB"), caption + _describe_more_ranks(len(facts.ranks))
    )


def _describe_more_ranks(ranks: int) -> str:
    return f"; ranks 0 to {_RANKS - 1} of {ranks}" if ranks > _RANKS else ""


#: How much of a folder's pictures and lines goes into a page.
_PROFILES, _PICTURE_BYTES, _LINES = 4, 2 << 20, 50

STYLE = """
:root { color-scheme: light dark; --ink: #1f2933; --quiet: #5c6773; --page: #f6f7f9; --card: #ffffff; --line: #d9dee4;
  --accent: #2f6fba; --warn: #b4541f;
  --c0: #2f6fba; --c1: #c8553d; --c2: #c9930f; --c3: #3d8f6a; --c4: #a05195; --c5: #8d7bb5; --c6: #66727f;
  --c7: #5aa9c9; --c8: #b9c1ca; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --quiet: #9aa5b1; --page: #14181d; --card: #1d2329;
  --line: #38414b; --accent: #6fa8e8; --warn: #e8935a;
  --c0: #6fa8e8; --c1: #e07a63; --c2: #e3b341; --c3: #62b78f; --c4: #c77dbb; --c5: #ab9cd3; --c6: #8f9ba8;
  --c7: #7cc4e0; --c8: #56606b; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 16px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Helvetica, Arial, "DejaVu Sans", sans-serif; }
h1 { font-size: 1.5rem; margin: 0; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin: 28px 0 8px; }
p { margin: 4px 0; overflow-wrap: anywhere; } .quiet, figcaption, dt { color: var(--quiet); font-size: .85rem; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 8px; margin: 16px 0; }
dl > div, figure, .card { background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: 10px 12px; }
dd { margin: 0; font-size: 1.15rem; font-weight: 600; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr)); gap: 12px;
  align-items: start; } .figures.rows { grid-template-columns: minmax(0, 1fr); }
figure { margin: 0; min-width: 0; } figure h3 { font-size: .95rem; margin: 0 0 4px; }
.plot { display: block; width: 100%; height: auto; color: var(--ink); }
.wide { overflow-x: auto; background: #fff; border-radius: 4px; }
.wide img { display: block; width: 100%; min-width: 860px; height: auto; }
.advice { border-left: 4px solid var(--accent); } .advice li { margin: 6px 0; overflow-wrap: anywhere; }
.advice ul { margin: 0; padding-left: 18px; }
.bad { border-left: 4px solid var(--warn); }
.table { overflow-x: auto; } table { border-collapse: collapse; font-size: .85rem; width: 100%; }
td, th { text-align: left; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top;
  overflow-wrap: anywhere; } td.number { text-align: right; white-space: nowrap; }
.copies { display: flex; flex-wrap: wrap; gap: 8px; } .copy { border: 1px solid var(--line); border-radius: 6px;
  padding: 6px 8px; } .copy b { font-size: .8rem; } .stage { display: flex; flex-wrap: wrap; gap: 4px; margin-top: 4px;
  align-items: center; font-size: .8rem; } .stage span { color: var(--quiet); min-width: 52px; }
.stage i { font-style: normal; background: var(--accent); color: var(--card); border-radius: 4px; padding: 1px 8px; }
"""


def render_page(facts: Facts) -> str:
    """Return the whole page."""
    title = os.path.basename(os.path.abspath(facts.folder))
    figures = [*render_curve_figures(facts), *time(facts), *render_memory(facts)]
    shown = "".join(_render_profile_image(path) for path in facts.profiles[-_PROFILES:])
    profiles = f'<div class="figures rows">{shown}</div>' if shown else ""
    # The newest value of all that is logged, whatever its name
    newest: Line = {}
    for line in facts.log:
        newest |= line
    rows = [(str(name), f"{number(value):.6g}" if math.isfinite(number(value)) else str(value)[:200])
            for name, value in sorted(newest.items(), key=lambda item: str(item[0]))]  # fmt: skip
    logged = (
        f"<details><summary>{len(rows)} numbers</summary>{_render_table(('name', 'value'), rows)}</details>"
        if rows
        else ""
    )
    advice = "".join(f"<li>{escape(line)}</li>" for line in list_advice(facts))
    notes = []
    for note in facts.notes[-_LINES:]:
        step = number(note.get("step"))
        notes.append(
            (f"{step:.0f}" if math.isfinite(step) else "", str(note.get("about", "")), str(note.get("text", "")))
        )
    said = _render_table(("step", "about", "what"), notes) if notes else '<p class="quiet">Nothing was said.</p>'
    places = [(name, line) for name, line in facts.hangs if name]
    hangs = "".join(f'<p class="card bad">{escape(line)}</p>' for name, line in facts.hangs if not name)
    hangs += _render_table(("rank", "where"), places[:_LINES]) if places else ""
    saved = [
        (item.name, _format_size(item.bytes), _format_time(item.time), "" if item.whole else "no manifest")
        for item in facts.checkpoints[-_LINES:]
    ]
    checkpoints = _render_table(("folder", "size", "written (UTC)", ""), saved) if saved else ""
    versions = [f"{name} {value}" for name, value in as_mapping(facts.layout.get("versions")).items()]
    body = [
        _render_head(facts, title),
        f'<section id="advice" class="card advice"><ul>{advice}</ul></section>' if advice else "",
        *_render_section("Layout", render_layout(facts)),
        *_render_section("Training", f'<div class="figures">{"".join(figures)}</div>' if figures else ""),
        *_render_section("Steps in detail", profiles),
        *_render_section("Slow ranks, and what else was said", said),
        *_render_section("Hangs", hangs),
        *_render_section("Checkpoints", checkpoints),
        *_render_section("Last logged", logged),
        *_render_section("Versions", f'<p class="quiet">{escape(", ".join(versions))}</p>' if versions else ""),
    ]
    rule = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{rule}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}: training report</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _render_section(title: str, content: str) -> list[str]:
    name = title.partition(",")[0].lower().replace(" ", "-")
    return [f'<section id="{name}"><h2>{title}</h2>\n{content}</section>'] if content else []


def _render_head(facts: Facts, title: str) -> str:
    """Show the title, what was trained and when, the last numbers, and the planner's beside them."""
    run, layout = facts.run, facts.layout
    told = [run.get("model") or layout.get("model"), run.get("spec") or layout.get("spec")]
    device = run.get("device")
    told += [f"{run.get('world_size')} ranks on {device}"] if device else []
    if layout.get("batch"):
        told += [f"{layout.get('global_batch')} sequences per step ({layout['batch']})"]
        told += [layout.get("batch_of_one_process")]
    told += [f"{facts.runs} runs, the newest is shown"] if facts.runs > 1 else []
    when = [_format_time(number(line.get("time"))) for line in (run, *facts.metrics[-1:])]
    told += [f"{when[0]} to {when[-1]} UTC"] if all(when) else []
    about = escape(" · ".join(str(word) for word in told if word))
    shown = [
        ("steps", "step", "{:.0f}", None),
        ("loss", "loss", "{:.4g}", None),
        ("evaluation loss", "eval_loss", "{:.4g}", None),
        ("step time", "perf/step_time_s", "{:.3g} s", "step_time_s"),
        ("tokens per second", "perf/tokens_per_second", "{:,.0f}", None),
        ("MFU", "perf/mfu", "{:.1%}", "mfu"),
        ("fullest rank", "perf/memory_peak_gib", "{:.3g} GiB", "tensors_gib"),
    ]
    cells = []
    for name, key, form, planned in shown:
        value = next((found for line in reversed(facts.log) if math.isfinite(found := number(line.get(key)))), None)
        if value is not None:
            plan = number(facts.plan.get(planned)) if planned and facts.is_predicted else math.nan
            beside = f'<div class="quiet">planned {form.format(plan)}</div>' if math.isfinite(plan) else ""
            cells.append(f"<div><dt>{name}</dt><dd>{form.format(value)}</dd>{beside}</div>")
    numbers = f"<dl>{''.join(cells)}</dl>" if cells else ""
    return f'<header><h1>{escape(title)}</h1><p class="quiet">{about}</p></header>\n{numbers}'


def _format_time(seconds: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return ""


def _render_profile_image(path: str) -> str:
    try:
        with open(path, "rb") as file:
            content = file.read(_PICTURE_BYTES + 1)
    except OSError:
        return ""
    name = escape(os.path.basename(path))
    if len(content) > _PICTURE_BYTES:
        return f"<p>{name} is too large for this page.</p>"
    source = f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}"
    return f'<figure><h3>{name}</h3><div class="wide"><img alt="{name}" src="{source}"></div></figure>'


def _format_size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def _render_table(heads: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="table card"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def write(folder: str, out: str | None = None) -> str:
    """Write the page and return its path.

    Raises:
        SpecError: the folder is not that of a training under a layout, or the page cannot be drawn.
    """
    page = render_page(read_facts(folder))
    path = out or os.path.join(folder, "report.html")
    with open(path, "w", encoding="utf-8") as file:
        file.write(page)
    return path

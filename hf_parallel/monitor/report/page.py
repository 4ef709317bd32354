"""The page: one text without scripts and without addresses. All that comes from files is escaped."""

from __future__ import annotations

import base64
import datetime
import math
import os
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from hf_parallel.monitor.report.advice import advice
from hf_parallel.monitor.report.facts import Facts, mapping, number
from hf_parallel.monitor.report.figures import curve_figures, layout, memory, time

if TYPE_CHECKING:
    from hf_parallel.monitor.report.facts import Line


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
.advice { border-left: 4px solid var(--accent); } .advice li { margin: 6px 0; }
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


def render(facts: Facts) -> str:
    """The whole page."""
    title = os.path.basename(os.path.abspath(facts.folder))
    figures = [*curve_figures(facts), *time(facts), *memory(facts)]
    body = [
        f"<header><h1>{escape(title)}</h1>{_about(facts)}</header>",
        _numbers(facts),
        _advice(facts),
        *_section("Layout", layout(facts)),
        *_section("Training", f'<div class="figures">{"".join(figures)}</div>' if figures else ""),
        *_section("Steps in detail", _profiles(facts)),
        *_section("Slow ranks, and what else was said", _notes(facts)),
        *_section("Hangs", _hangs(facts)),
        *_section("Checkpoints", _checkpoints(facts)),
        *_section("Last logged", _logged(facts)),
        *_section("Versions", _versions(facts)),
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


def _section(title: str, content: str) -> list[str]:
    name = title.partition(",")[0].lower().replace(" ", "-")
    return [f'<section id="{name}"><h2>{title}</h2>\n{content}</section>'] if content else []


def _about(facts: Facts) -> str:
    run, layout = facts.run, facts.layout
    told = [run.get("model") or layout.get("model"), run.get("spec") or layout.get("spec")]
    device = run.get("device")
    told += [f"{run.get('world_size')} ranks on {device}"] if device else []
    told += [f"{facts.runs} runs, the newest is shown"] if facts.runs > 1 else []
    when = [_when(number(line.get("time"))) for line in (run, *facts.metrics[-1:])]
    told += [f"{when[0]} to {when[-1]} UTC"] if all(when) else []
    return f'<p class="quiet">{escape(" · ".join(str(word) for word in told if word))}</p>'


def _when(seconds: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc).strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return ""


def _numbers(facts: Facts) -> str:
    """The last ones, and the planner's beside them."""
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
    return f"<dl>{''.join(cells)}</dl>" if cells else ""


def _advice(facts: Facts) -> str:
    lines = "".join(f"<li>{escape(line)}</li>" for line in advice(facts))
    return f'<section id="advice" class="card advice"><ul>{lines}</ul></section>' if lines else ""


def _profiles(facts: Facts) -> str:
    """As images: nothing in them runs."""
    shown = "".join(_profile(path) for path in facts.profiles[-_PROFILES:])
    return f'<div class="figures rows">{shown}</div>' if shown else ""


def _profile(path: str) -> str:
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


def _notes(facts: Facts) -> str:
    rows = [(_step(note), str(note.get("about", "")), str(note.get("text", ""))) for note in facts.notes]
    return _table(("step", "about", "what"), rows[-_LINES:]) if rows else '<p class="quiet">Nothing was said.</p>'


def _step(note: Line) -> str:
    step = number(note.get("step"))
    return f"{step:.0f}" if math.isfinite(step) else ""


def _hangs(facts: Facts) -> str:
    if not facts.hangs:
        return ""
    sentences = [f'<p class="card bad">{escape(line)}</p>' for name, line in facts.hangs if not name]
    places = [(name, line) for name, line in facts.hangs if name]
    return "".join(sentences) + (_table(("rank", "where"), places[:_LINES]) if places else "")


def _checkpoints(facts: Facts) -> str:
    rows = [
        (item.name, _size(item.bytes), _when(item.time), "" if item.whole else "no manifest")
        for item in facts.checkpoints[-_LINES:]
    ]
    return _table(("folder", "size", "written (UTC)", ""), rows) if rows else ""


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def _logged(facts: Facts) -> str:
    """The newest value of all that is logged, whatever its name."""
    newest: Line = {}
    for line in facts.log:
        newest |= line
    rows = [(str(name), f"{number(value):.6g}" if math.isfinite(number(value)) else str(value)[:200])
            for name, value in sorted(newest.items(), key=lambda item: str(item[0]))]  # fmt: skip
    return (
        f"<details><summary>{len(rows)} numbers</summary>{_table(('name', 'value'), rows)}</details>" if rows else ""
    )


def _versions(facts: Facts) -> str:
    versions = mapping(facts.layout.get("versions"))
    return (
        f'<p class="quiet">{escape(", ".join(f"{name} {value}" for name, value in versions.items()))}</p>'
        if versions
        else ""
    )


def _table(heads: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="table card"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

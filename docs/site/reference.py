"""The page "API reference" of the site: public names with their signatures and docstrings.

`make site` makes it anew each time; `PYTHONPATH=. python docs/site/reference.py` prints it.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from typing import Any

HEAD = """# API reference

Most scripts need none of these names: the command line and the spec do everything. Use them in hand-written
[loops](idioms.md), notebooks and tools. The keys of a spec have [a page of their own](keys.md)."""
#: Title -> module, the names that are shown, what the part is about.
PARTS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "Train": (
        "hf_parallel",
        ("activate", "parallelize", "clip_grad_norm", "full_state_dict", "full_tensor", "notebook_launcher"),
        "`import hf_parallel` also gives `TrainingArguments` the field `parallel`.",
    ),
    "Ask for a layout": ("hf_parallel", ("ParallelConfig", "SpecError"), ""),
    "Plan": ("hf_parallel", ("plan",), ""),
    "Search for layouts": ("hf_parallel.planner.search", ("search",), ""),
    "Predict": (
        "hf_parallel.planner",
        (
            *("predict", "predict_step", "Prediction", "Layout", "Job", "ModelShape", "shape_of", "make_cluster"),
            *("find_gpu", "find_link", "Cluster", "Gpu", "Link"),
        ),
        "Formulas only: no process, no GPU, no weights.",
    ),
    "Run dry": (
        "hf_parallel.planner.dryrun",
        ("dry_run",),
        "One rank of a world that is not there, with the real code on tensors without memory.",
    ),
    "Watch": ("hf_parallel", ("metrics",), ""),
    "Read what a run has recorded": ("hf_parallel.monitor.session", ("read_records",), ""),
    "Write the report page": ("hf_parallel.monitor.report", ("write",), ""),
    "Plan with what a run has recorded": ("hf_parallel.monitor.expected", ("calibrated",), ""),
}
#: So many fields are a table of their own, which is somewhere else.
_MANY = 20
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields):$")


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for title, (module, names, about) in PARTS.items():
        parts += [f"## {title}", *([about] if about else [])]
        parts += ["\n\n".join(_entry(module, name)) for name in names]
    return "\n\n".join(parts).rstrip() + "\n"


def _entry(module: str, name: str) -> Iterator[str]:
    """Heading, signature, docstring; of a class its fields and methods, too."""
    item = getattr(importlib.import_module(module), name)
    place = f"{module}.{name}".replace(".", "-").replace("_", "-").lower()
    yield f"### {module}.{name} {{ #{place} data-toc-label={name!r} }}"
    if not inspect.isclass(item):
        yield _code(name, item)
    yield _prose(inspect.getdoc(item) or "")
    if inspect.isclass(item):
        yield from _members(item)


def _members(item: type) -> Iterator[str]:
    fields = dataclasses.fields(item) if dataclasses.is_dataclass(item) else ()
    if 0 < len(fields) <= _MANY:
        yield "\n".join(f"- `{field.name}: {field.type}`{_default(field)}" for field in fields)
    elif fields:
        yield "Its fields are the [keys of a spec](keys.md)."
    members = [(key, value) for key, value in vars(item).items() if not key.startswith("_")]
    methods = [_method(key, value) for key, value in members if inspect.getdoc(value) and _is_method(value)]
    if methods:
        yield "\n".join(methods)


def _is_method(value: object) -> bool:
    return inspect.isfunction(value) or isinstance(value, classmethod | property)


def _method(name: str, value: Any) -> str:
    """A line: how it is called, and what it does."""
    function = value.__func__ if isinstance(value, classmethod) else value
    called = name if isinstance(value, property) else f"{name}{_signature(function, drop_first=True)}"
    first = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    return f"- `{called}`: {first}"


def _default(field: dataclasses.Field) -> str:
    if field.default is dataclasses.MISSING or " object at 0x" in repr(field.default):
        return ""
    text = repr(field.default)
    return f", default `{text}`" if len(text) <= 30 else ""


def _signature(function: Any, drop_first: bool = False) -> str:
    """`(model: nn.Module, rows: int = 4) -> Found`, as the source has it."""
    signature = inspect.signature(function)
    parts, before = [], None
    for parameter in list(signature.parameters.values())[drop_first:]:
        if parameter.kind is parameter.KEYWORD_ONLY and before not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            parts.append("*")
        before = parameter.kind
        stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        value = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{stars}{parameter.name}: {parameter.annotation}{value}")
    return f"({', '.join(parts)}) -> {signature.return_annotation}"


def _code(name: str, function: Any) -> str:
    """A call as code; a long one with a line for each parameter."""
    text = _signature(function)
    if len(name + text) > 100:
        inside, _, returned = text[1:].rpartition(") -> ")
        text = "(\n" + "".join(f"    {part},\n" for part in _split(inside)) + f") -> {returned}"
    return f"```python\n{name}{text}\n```"


def _split(parameters: str) -> list[str]:
    """The parameters of a signature; commas inside brackets do not separate."""
    parts, depth = [""], 0
    for char in parameters:
        depth += (char in "[(") - (char in "])")
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts if part.strip()]


def _prose(docstring: str) -> str:
    """A docstring as markdown: sections become bold words, and their entries lists."""
    lines, in_section = [], False
    for line in docstring.splitlines():
        section = _SECTION.match(line)
        if section:
            lines += [f"**{section[1]}**", ""]
            in_section = True
        elif in_section and line.startswith("    ") and not line.startswith("        "):
            lines.append(re.sub(r"^    ([\w, *]+): ", r"- `\1`: ", line))
        elif in_section and line.startswith("        "):
            lines[-1] += f" {line.strip()}"
        else:
            in_section = in_section and not line
            lines.append(line)
    return textwrap.dedent("\n".join(lines)).strip()


if __name__ == "__main__":
    print(page())

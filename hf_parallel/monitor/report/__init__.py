"""A page about a training, made of what it has left in its output folder: HTML, and nothing beside it.

path = write("OUTPUT_DIR")                 # OUTPUT_DIR/report.html

facts    what the folder holds             advice   what to change, with numbers
plots    curves and bars, as SVG           page     all of it as one text
"""

from __future__ import annotations

import os

from hf_parallel.monitor.report.facts import read_facts
from hf_parallel.monitor.report.page import render_page


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

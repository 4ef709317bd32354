"""What the site adds to the pages of docs/: README, the integrations, the list of changes, the API reference.

mkdocs calls `on_files` and `on_page_markdown`. Links between all of these become links of the site; files that are no
pages (specs, scripts) keep their names without a link.
"""

from __future__ import annotations

import posixpath
import re
import runpy
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
#: Pages made of files outside docs/, by their names on the site.
OUTSIDE = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "slurm.md": "integrations/slurm/README.md",
    "kubernetes.md": "integrations/kubernetes/README.md",
    "skypilot.md": "integrations/skypilot/README.md",
    "trl_files.md": "integrations/trl/README.md",
    "skill.md": "integrations/skill/SKILL.md",
}
_PAGES = {source: page for page, source in OUTSIDE.items()}
_LINK = re.compile(r"(!?)\[([^\]]+)\]\(([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie outside docs/, and the one that is written from docstrings."""
    for page, source in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    reference = runpy.run_path(str(Path(__file__).parent / "reference.py"))
    files.append(File.generated(config, "api.md", content=reference["page"]()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are in the repository become those of the site."""
    name = page.file.src_uri
    folder = posixpath.dirname(OUTSIDE.get(name, f"docs/{name}"))
    return _LINK.sub(lambda match: _of_site(match, folder, posixpath.dirname(name)), markdown)


def _of_site(match: re.Match[str], folder: str, site_folder: str) -> str:
    image, text, target, place = match.groups(default="")
    if not target or "://" in target or target.startswith("mailto:"):
        return match[0]
    path = posixpath.normpath(posixpath.join(folder, target))
    page = _PAGES.get(path) or _PAGES.get(posixpath.join(path, "README.md"))
    if page is None and path.startswith("docs/"):
        page = path.removeprefix("docs/")
    if page is None:
        return text if text.startswith("`") else f"`{path}`" if path.endswith(text) else f"{text} (`{path}`)"
    place = re.sub("-+", "-", place)  # GitHub writes `a --b` as a---b, this site as a-b
    return f"{image}[{text}]({posixpath.relpath(page, site_folder or '.')}{place})"

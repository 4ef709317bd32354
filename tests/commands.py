"""The commands that README and docs show: what a reader may paste into a shell, from blocks, `$` lines and cells."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "AGENTS.md", *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
PAGES += sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("integrations/*/*.md"))
PROGRAM = re.compile(r"(?:[A-Z_]+=\S+ )*(?:hf-parallel|torchrun|accelerate|python|pip|make|sbatch|export) \S")
PYTHON = re.compile(r"^(?:import|from) hf_parallel|\bhf_parallel\.[a-z_.]+\(")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^    .*\n?)+", re.MULTILINE)


@dataclass(frozen=True)
class Shown:
    """A command and the page that shows it."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        """As a shell splits it, without the ellipses that stand for a script's own arguments."""
        return [word for word in shlex.split(self.text) if word not in ("…", "args…", "…args")]


def shown(pages: list[str] | None = None) -> list[Shown]:
    """Every command of the pages, once."""
    found = [Shown(page, text) for page in pages or PAGES for text in commands((ROOT / page).read_text())]
    return list({item.text: item for item in found}.values())


def commands(page: str) -> list[str]:
    """The commands of one page's text."""
    found, text = [], page
    for language, block in FENCED.findall(page):
        found += _lines(block, everything=language == "bash")
    text = FENCED.sub("", text)
    for block in INDENTED.findall(text):
        found += _lines(re.sub("^    ", "", block, flags=re.MULTILINE))
    spans = re.findall(r"`([^`]+)`", INDENTED.sub("\n", text))
    spans = [" ".join(span.split()) for span in spans]
    return found + [span for span in spans if PROGRAM.match(span) or PYTHON.search(span)]


def _lines(block: str, everything: bool = False) -> list[str]:
    """A block's commands: lines that continue are joined, comments left out."""
    lines = re.sub(r"\\\n\s*", "", block).splitlines()
    found = []
    for line in lines:
        line = re.sub(r"(^|\s+)#.*", "", line).strip()
        asked = line.startswith("$ ")
        line = line.removeprefix("$ ")
        if line and (everything or asked or PROGRAM.match(line) or PYTHON.search(line)):
            found.append(line)
    return found

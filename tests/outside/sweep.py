"""Run scripts of other projects as they are, under every layout, and write down how each compares with one process.

    python -m tests.outside.sweep --sources FOLDER --work FOLDER [--only WORDS] [--specs tp=2 pp=2] [--again]

The layout `ddp=2` is accelerate's own: two processes without this package. `--like-ddp` compares with it what is not
equal to one process on two data ranks, and adds a row to WORK/results.jsonl whose layout is `SPEC like ddp=2`.

`--sources` holds a checkout of each project (transformers, accelerate, trl, …): none of their text is kept here. A row
per script and layout is added to WORK/results.jsonl as it is known, so that a run that is stopped goes on later;
WORK/logs has what went wrong in full. `--table` prints the table of docs/reference/outside_scripts.md.
"""

import argparse
import atexit
import contextlib
import importlib
import json
import os
import pickle
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import tests.outside.operators  # noqa: F401 - before Transformers
from tests.distributed import RankFailure, run, run_alone
from tests.outside import materials, stand_ins, watching
from tests.outside.cases import Case
from tests.outside.notebooks import code_of_notebook
from tests.outside.originals import ORIGINALS, SPECS
from tests.training import axes

LIMIT_S = 170.0
#: Two processes of accelerate's own DDP.
DDP = "ddp=2"
#: The errors of this package whose words say what to do.
REFUSALS = ("SpecError", "UsageError")


class Desk:
    """A folder with models, data, edited copies of scripts, and results."""

    def __init__(self, sources: str, work: str):
        self.sources, self.work = Path(sources), Path(work)
        self.root, self.results = self.work / "root", self.work / "results.jsonl"
        (self.work / "logs").mkdir(parents=True, exist_ok=True)
        if not (self.root / "written").exists():
            run_alone(write_materials, str(self.root), timeout=600)
            (self.root / "written").touch()

    def script(self, case: Case, places: dict[str, str] | None = None) -> Path:
        """The script, or a copy beside it whose numbers and names are those of the tests, ROOT and others included."""
        original = self.sources / case.script
        if not case.edits:
            return original
        text = code_of_notebook(original) if original.suffix == ".ipynb" else original.read_text()
        if not any(old in text for old, _ in case.edits):
            raise ValueError(f"{case.script}: nothing to edit in this version")
        for old, new in case.edits:
            text = text.replace(old, new)
        return self.edited(original, self.placed(text, places or {}))

    def placed(self, text: str, places: dict[str, str]) -> str:
        """The text with the names of folders and numbers in the place of words for them."""
        for word, value in places.items():
            text = re.sub(rf"\b{word}\b", value, text)
        return text

    def edited(self, original: Path, text: str) -> Path:
        folder = self.work / "edited" / original.parent.relative_to(self.sources)
        folder.mkdir(parents=True, exist_ok=True)
        for file in original.parent.glob("*.py"):  # what it imports from its own folder
            (folder / file.name).write_text(file.read_text())
        copy = folder / f"{original.stem}_edited.py"
        copy.write_text(text)
        return copy

    def launch(self, name: str, spec: str | None) -> list[watching.Seen]:
        """What each rank of the layout does with the script, or one plain process."""
        case, plain = ORIGINALS[name], spec in (None, DDP)
        sizes = {"world": 2, "data_ranks": 2} if spec == DDP else axes(spec)
        out = str(self.work / "out" / f"{slug(name)}-{slug(spec or 'alone')}")
        (self.work / "out").mkdir(exist_ok=True)
        subprocess.run(["rm", "-rf", out, f"{out}.said"], check=True)
        places = {
            "ROOT": str(self.root),
            "OUT": out,
            "SOURCES": str(self.sources),
            "ROWS": str(8 // sizes["data_ranks"]),
        }
        script = self.script(case, places)
        arguments = case.arguments.replace("SOURCES", str(self.sources)).replace("ROWS", places["ROWS"])
        words = case.words(arguments, str(self.root), out, None if plain else spec)
        modules = tuple(
            (end, tuple((old, self.placed(new, places)) for old, new in pairs)) for end, pairs in case.modules
        )
        call = partial(run_stood_in, str(script), words, str(self.root), out, None if plain else spec, modules)
        environment = {"TQDM_DISABLE": "1", "ACCELERATE_USE_CPU": "true", "WANDB_MODE": "disabled"}
        if spec is None:
            return [run_alone(call, env=environment, timeout=LIMIT_S)]
        return run(call, sizes["world"], init=False, env=environment, timeout=LIMIT_S)

    def reference(self, name: str) -> watching.Seen:
        """What one plain process does, which is kept: layouts may be asked for later."""
        kept = self.work / "references" / f"{slug(name)}.pkl"
        key = (ORIGINALS[name], self.script(ORIGINALS[name]).read_text())
        if kept.exists():
            asked, seen = pickle.loads(kept.read_bytes())
            if asked == key:
                return seen
        (seen,) = self.launch(name, None)
        kept.parent.mkdir(exist_ok=True)
        kept.write_bytes(pickle.dumps((key, seen)))
        return seen

    def compare(self, name: str, reference: watching.Seen, spec: str) -> tuple[str, str]:
        """The outcome in a word, and what it says."""
        try:
            ranks = self.launch(name, spec)
        except RankFailure as failure:
            (self.work / "logs" / f"{slug(name)}-{slug(spec)}.txt").write_text(str(failure))
            return judged(failure)
        found = watching.differences(ranks, reference, ORIGINALS[name].tolerance)
        (self.work / "logs" / f"{slug(name)}-{slug(spec)}.txt").write_text("\n".join(found))
        return ("other numbers", "; ".join(found[:3])) if found else ("equal", counted(reference))

    def compare_with_ddp(self, name: str, spec: str) -> tuple[str, str]:
        """Are the numbers of each data rank those that the script has there under DDP? Its files are rank 0's."""
        try:
            theirs, ours = self.launch(name, DDP), self.launch(name, spec)
        except RankFailure as failure:
            (self.work / "logs" / f"{slug(name)}-{DDP}.txt").write_text(str(failure))
            return judged(failure)
        tolerance, found = ORIGINALS[name].tolerance, []
        for one, other in zip(ours, theirs, strict=True):
            found += watching.differences([one], other, tolerance)
        (self.work / "logs" / f"{slug(name)}-{slug(spec)}-like-{DDP}.txt").write_text("\n".join(found))
        return ("other numbers", "; ".join(found[:3])) if found else ("equal", counted(theirs[0]))

    def note(self, name: str, spec: str, outcome: str, words: str, seconds: float) -> None:
        row = {"script": name, "spec": spec, "outcome": outcome, "words": words[:600], "seconds": round(seconds, 1)}
        with open(self.results, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{name:44} {spec:24} {outcome:14} {words[:300]!r}", flush=True)

    def known(self) -> dict[tuple[str, str], dict]:
        """The latest row of each script and layout."""
        if not self.results.exists():
            return {}
        rows = [json.loads(line) for line in self.results.read_text().splitlines()]
        return {(row["script"], row["spec"]): row for row in rows}


#: A cell of the table. What is not in it has not been run.
MARKS = {"equal": "✓", "refused": "–", "other numbers": "✗", "error": "!", "stands still": "!", "does not run": "?"}


def table(known: dict[tuple[str, str], dict]) -> str:
    """A line per script, a column per layout, and below it in words what is not equal."""
    lines = [f"| script | {' | '.join(f'`{spec}`' for spec in SPECS)} |", f"| --- |{' :-: |' * len(SPECS)}"]
    said: dict[str, list[str]] = {}
    for name in ORIGINALS:
        rows = [known.get((name, spec)) for spec in SPECS]
        if not any(rows):
            continue
        lines.append(f"| {name} | {' | '.join(MARKS[row['outcome']] if row else '' for row in rows)} |")
        for spec, row in zip(SPECS, rows, strict=True):
            if row and row["outcome"] != "equal":
                words = row["words"].split("; rank 0")[0] if row["outcome"] == "other numbers" else row["words"]
                said.setdefault(f"{MARKS[row['outcome']]} {words[:240]}", []).append(f"{name} on `{spec}`")
    notes = [f"- {words}: {'; '.join(places[:6])}{' and more' * (len(places) > 6)}" for words, places in said.items()]
    return "\n".join([*lines, "", *notes, ""])


def write_materials(root: str) -> None:
    """Models and data, in a process that ends then."""
    stand_ins.install()
    from tests.outside import documents, media, notebook_models

    materials.write_all(root)
    media.write_all(root)
    documents.write_all(root)
    notebook_models.write_all(root)


def preload() -> None:
    """Import here, once, what most scripts import: ranks are forked from this process."""
    for module in ("datasets", "pandas", "pyarrow", "sklearn.metrics", "transformers.trainer", "peft", "torchmetrics"):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    importlib.import_module("transformers").set_seed(1)  # of scripts that set none before they draw a head


def run_stood_in(script: str, words: list[str], root: str, out: str, spec: str | None, modules=()) -> watching.Seen:
    """A script among its stand-ins; what it says goes to a file beside what it writes."""
    said = os.open(f"{out}.said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 2)
    sys.path.append(str(next((p for p in Path(script).parents if (p / "llava").is_dir()), Path(script).parent)))
    stand_ins.install()
    stand_ins.edit_imports(dict(modules))
    seen = watching.run_script(script, words, root, out, spec)
    if spec is not None:
        atexit._run_exitfuncs()  # a rank whose script is at its end still answers those that save alone
    return seen


def judged(failure: RankFailure) -> tuple[str, str]:
    """A refusal is an error of ours with words; anything else is an error of the script's life here."""
    words = " ".join(failure.message.split())
    if words.startswith("hf_parallel: ") or any(kind in REFUSALS for kind in failure.kinds.values()):
        return "refused", words
    return ("stands still" if failure.kind == "Hung" else "error"), f"{failure.kind}: {words}"


def counted(seen: watching.Seen) -> str:
    """How much was compared."""
    steps = len(seen.gradient_keys) or len(seen.losses)
    weights = len(list(Path(seen.folder).rglob("*.safetensors")))
    return f"{steps} steps, {len(seen.logs)} logs, {len(seen.gathered)} gathers, {weights} files of weights"


def slug(text: str) -> str:
    return re.sub(r"[^\w.=-]+", "_", text)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--sources", required=True)
    options.add_argument("--work", required=True)
    options.add_argument("--only", nargs="*", default=[""], help="parts of names")
    options.add_argument("--specs", nargs="*", default=SPECS)
    options.add_argument("--again", action="store_true", help="run what is known, too")
    options.add_argument("--outcomes", nargs="*", help="run again what had these outcomes")
    options.add_argument("--like-ddp", action="store_true", help="compare with DDP what is not equal to one process")
    options.add_argument("--table", action="store_true", help="print what is known, and run nothing")
    args = options.parse_args()
    if "PYTHONHASHSEED" not in os.environ:  # sets have another order in each process, and references are kept
        words = [sys.executable, "-m", "tests.outside.sweep", *sys.argv[1:]]  # the interpreter's own may be pytest's
        os.execve(sys.executable, words, {**os.environ, "PYTHONHASHSEED": "0"})
    if args.table:
        print(table(Desk(args.sources, args.work).known()))
        return
    preload()
    desk = Desk(args.sources, args.work)
    for name in (name for name in ORIGINALS if any(part in name for part in args.only)):
        known = desk.known()
        if args.like_ddp:
            for spec in args.specs:
                if known.get((name, spec), {}).get("outcome") == "other numbers" and axes(spec)["data_ranks"] == 2:
                    start = time.monotonic()
                    outcome = desk.compare_with_ddp(name, spec)
                    desk.note(name, f"{spec} like {DDP}", *outcome, time.monotonic() - start)
            continue
        wanted = [
            spec
            for spec in args.specs
            if args.again
            or (name, spec) not in known
            or (args.outcomes and known[name, spec]["outcome"] in args.outcomes)
        ]
        if not wanted:
            continue
        start = time.monotonic()
        try:
            reference = desk.reference(name)
        except (RankFailure, ValueError, OSError) as error:
            (desk.work / "logs" / f"{slug(name)}-alone.txt").write_text(str(error))
            kind = getattr(error, "kind", type(error).__name__)
            words = f"{kind}: {' '.join(getattr(error, 'message', str(error)).split())}"
            desk.note(name, "one process", "does not run", words, time.monotonic() - start)
            continue
        if not (reference.gradient_keys or reference.losses):
            desk.note(name, "one process", "trains nothing", counted(reference), time.monotonic() - start)
        for spec in wanted:
            start = time.monotonic()
            desk.note(name, spec, *desk.compare(name, reference, spec), time.monotonic() - start)


if __name__ == "__main__":
    main()

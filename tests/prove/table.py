"""Prove 30 classes of Transformers, the scripts of tests/outside and other projects' own; write the page of proofs.

python -m tests.prove.table                          # all that is not known yet; an hour and a half on two cores
python -m tests.prove.table --kind lora --only Llama Qwen3 --specs tp=2 pp=2
python -m tests.prove.table --kind originals --sources FOLDER       # of checkouts: tests/outside/sweep.py
python -m tests.prove.table --kind clean --again     # 200 runs without an error: none may differ
python -m tests.prove.table --write                  # docs/reference/proofs.md from the results
"""

import argparse
import contextlib
import hashlib
import io
import json
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

import transformers

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.spec import SpecError
from hf_parallel.cli.prove import NotProvedError, Proof, Script
from hf_parallel.model.shrink import list_small_values
from hf_parallel.prove.small_run import Sizes
from tests.distributed import run_alone  # one thread, everything imported
from tests.training import axes

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "tests" / "results" / "proofs.jsonl", ROOT / "docs" / "reference" / "proofs.md"
SPECS = (
    *("tp=2", "dp_shard=2", "dp_replicate=2", "pp=2", "cp=2", "dp_shard=2,zero_stage=1"),
    *("tp=2,dp_shard=2", "tp=2,pp=2", "pp=2,dp_shard=2", "cp=2,context_parallel=ulysses"),
)
CLASSES = (
    *("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GemmaForCausalLM"),
    *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM", "GPT2LMHeadModel"),
    *("GPTNeoXForCausalLM", "OPTForCausalLM", "BloomForCausalLM", "FalconForCausalLM", "StableLmForCausalLM"),
    *("Olmo2ForCausalLM", "CohereForCausalLM", "SmolLM3ForCausalLM", "GraniteForCausalLM", "Starcoder2ForCausalLM"),
    *("MixtralForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM", "DeepseekV3ForCausalLM"),
    *("BertForMaskedLM", "RobertaForSequenceClassification", "DebertaV2ForSequenceClassification"),
    *("DistilBertForTokenClassification", "T5ForConditionalGeneration", "BartForConditionalGeneration"),
)
#: What is trained -> the arguments of the script.
KINDS = {"plain": [], "packed": ["--packed"], "lora": ["--lora", "4"]}
SCRIPTS, ORIGINALS, BF16, CLEAN = "scripts", "originals", "bf16", "clean"
#: Runs of `script.py` whose proofs keep the script's own dtype.
OWN_DTYPE = {"bf16=True": ["--bf16"], "bf16=True, checkpointing": ["--bf16", "--gradient_checkpointing"]}
#: What runs on every layout: with and without bf16 these are 200 runs, none of which may differ.
CLEAN_CLASSES = (
    *("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GemmaForCausalLM", "PhiForCausalLM"),
    *("Phi3ForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "Olmo2ForCausalLM", "MixtralForCausalLM"),
)
ORIGINAL_SPECS = ("tp=2", "dp_shard=2", "pp=2", "cp=2")
SCRIPT_SPECS = ("tp=2", "dp_shard=2", "pp=2", "cp=2", "dp_shard=2,zero_stage=1", "tp=2,dp_shard=2")
MARKS = {"proved": "✓", "refused": "–", "differs": "✗", "fails": "!"}


def write_config(name: str, folder: Path) -> None:
    """The config of a small model of this class."""
    cls = getattr(transformers, name)
    config = cls.config_class(**list_small_values(cls.config_class()))
    config.architectures, config.num_labels = [name], 3
    if config.is_encoder_decoder:
        config.decoder_start_token_id = config.pad_token_id  # as T5's configs on the Hub have it
    folder.mkdir()
    config.save_pretrained(folder)


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder that goes in the end; a TemporaryDirectory would go with the first forked process."""
    folder = Path(tempfile.mkdtemp(prefix="table-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def subjects(kind: str, parts: list[str], sources: str | None = None) -> Iterator[Iterator[tuple[str, Script]]]:
    """What is proved of a kind: names that have one of the parts, each with its script; `sources`: of originals."""
    with scratch() as folder:
        if kind == SCRIPTS:
            from tests.outside import cases, materials

            run_alone(materials.write_all, str(folder))
            scripts, places = Path(materials.__file__).parent / "scripts", (str(folder), f"{folder}/out", None)
            made = (
                (name, Script(str(scripts / case.script), case.words(case.arguments, *places)))
                for name, case in cases.CASES.items()
            )
        elif kind == ORIGINALS:
            from tests.prove.originals import original_scripts

            made = original_scripts(sources, folder, parts)
        elif kind == CLEAN:
            made = (
                (f"{name}{words}", _script_of_class(name, folder, flags))
                for name in CLEAN_CLASSES
                for words, flags in (("", []), (", bf16", ["--bf16"]))
            )
        elif kind == BF16:
            from tests.prove.test_faults import ARGUMENTS, SCRIPT

            made = ((name, Script(str(SCRIPT), [*ARGUMENTS, *flags])) for name, flags in OWN_DTYPE.items())
        else:
            made = ((name, _script_of_class(name, folder, KINDS[kind])) for name in CLASSES)
        yield ((name, script) for name, script in made if any(part in name for part in parts))


def _script_of_class(name: str, folder: Path, arguments: list[str]) -> Script:
    if not (folder / name).exists():
        write_config(name, folder / name)
    return Script("hf_parallel.cli.prove_model", [str(folder / name), *arguments], is_module=True)


def cell(spec: str, script: Script, work: Path, references: dict, keep_dtype: bool) -> tuple[str, str]:
    """Prove one script under one layout; return the outcome, and what it says."""
    config = ParallelConfig.parse(spec).resolve(axes(spec)["world"])
    key = str(Sizes.of_layout(config, 4, keep_dtype))
    folder = work / hashlib.sha256(key.encode()).hexdigest()[:8]  # the references of these sizes, and what they saved
    proof = Proof(folder, config, script, keep_dtype=keep_dtype, limit_s=600)
    try:
        proof.reuse(references.get(key))
        ranks = proof.run_layout()
        references[key] = proof.references()
        verdict = proof.judge(ranks)
    except (NotProvedError, SpecError) as error:
        words = " ".join(str(error).split())
        return ("refused" if getattr(error, "refused", True) else "fails"), words[:300]
    if verdict.compared.differences:
        told = verdict.told(spec, 0).splitlines()
        return "differs", " ".join(line.strip() for line in told if line.startswith("  "))[:400]
    return "proved", f"{max(verdict.compared.worst.values()):.0%} of what rounding allows"


def known(kind: str) -> dict[tuple[str, str], dict]:
    """The latest row of each class and layout."""
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    return {(row["class"], row["spec"]): row for row in rows if row.get("kind", "plain") == kind}


def tables() -> dict[str, dict[tuple[str, str], dict]]:
    """The known rows of each kind."""
    return {kind: known(kind) for kind in (*KINDS, SCRIPTS, ORIGINALS, BF16, CLEAN)}


def page(tables: dict[str, dict[tuple[str, str], dict]]) -> str:
    """The tables, and below each in words what is not proved."""
    rows = [row for table in tables.values() for row in table.values()]
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in MARKS}
    seconds = sorted(row["seconds"] for row in rows) or [0.0]
    of_four = [row["seconds"] for (_, spec), row in tables[SCRIPTS].items() if spec == "tp=2,dp_shard=2"] or [0.0]
    lines = [
        "# Proofs of model classes and scripts",
        "",
        f"`python -m tests.prove.table` wrote this page on {date.today()}. Each cell is `hf-parallel prove` of",
        "a class with a small config on generated examples (padded, rows of several documents, adapters), or of",
        "an example script of another project with a small model; on CPUs, in fp32 but for the last table.",
        "",
        f"{counts['proved']} proved (✓), {counts['refused']} refused by name (–), {counts['differs']} differ (✗),",
        f"{counts['fails']} fail (!). Half of the proofs took {seconds[len(rows) // 2]:.0f} s at most, nine of ten",
        f"{seconds[9 * len(rows) // 10]:.0f} s, on two cores with other work beside them.",
        f"Of {len(of_four)} scripts with four processes none took more than {max(of_four):.0f} s, and half of them",
        f"{sorted(of_four)[len(of_four) // 2]:.0f} s at most; the command adds its imports, some 8 s.",
    ]
    for kind, table in tables.items():
        if table:
            names = CLASSES if kind in KINDS else list(dict.fromkeys(name for name, _ in table))
            lines += ["", f"## {_TITLES.get(kind, kind.capitalize())}", "", *_INTRODUCTIONS.get(kind, ())]
            if kind == CLEAN:
                own, dates = list(table.values()), sorted(row["date"] for row in table.values())
                alarms = sum(row["outcome"] != "proved" for row in own)
                words = f"{len(own)} of 200 pairs, {alarms} without a proof."
                lines += [f"Last run: {dates[0]} to {dates[-1]}, {words}", ""]
            lines += _table(table, names, _SPECS.get(kind, SPECS), seconds=kind == ORIGINALS)
    return "\n".join([*lines, *_planted(), ""])


_TITLES = {
    **{"lora": "LoRA", ORIGINALS: "Other projects' own scripts", BF16: "tests/prove/script.py in bf16"},
    CLEAN: "Clean runs",
}
_SPECS = {SCRIPTS: SCRIPT_SPECS, ORIGINALS: ORIGINAL_SPECS}
_INTRODUCTIONS = {
    ORIGINALS: [
        "`python -m tests.prove.table --kind originals --sources FOLDER` proved these, unchanged but for names and",
        "sizes that they have written into them (tests/outside/originals.py, tests/prove/originals.py). Numbers are",
        "seconds; the first layout of a row, and of a number of data ranks, pays for the two runs in one process.",
        "",
    ],
    CLEAN: [
        "`python -m tests.prove.table --kind clean --again` proves ten classes under ten layouts in fp32 and in",
        "bf16 (`--dtype own`). Nothing is wrong in them, so that a difference would be a false alarm.",
    ],
}


def _planted() -> list[str]:
    """Return the lists of errors that tests plant, each of which a proof has to find."""
    from tests.prove.faults import FAULTS
    from tests.prove.test_mends import MENDS

    named = sum(bool(fault.where) for fault in FAULTS)
    return [
        *("", "## Planted errors", ""),
        "`python -m pytest --all tests/prove` plants these. A proof must find each, and",
        f"name the module of {named} of the {len(FAULTS)}.",
        *("", "| error | layout | named |", "| --- | --- | --- |"),
        *(f"| {one.name} | `{one.spec}` | {one.where or ', '.join(one.kinds)} |" for one in FAULTS),
        *("", "## Mends taken out", ""),
        "Former versions trained on other numbers without a word. With its mend taken out",
        "a proof finds each; with the mend it proves the layout, or the layout is refused.",
        *("", "| mend | layout |", "| --- | --- |"),
        *(f"| {mend.name.replace('_', ' ')} | `{mend.spec}` |" for mend in MENDS),
    ]


def _table(
    rows: dict[tuple[str, str], dict], names: Sequence[str], specs: Sequence[str], seconds: bool = False
) -> list[str]:
    lines = [f"| name | {' | '.join(f'`{spec}`' for spec in specs)} |", f"| --- |{' :-: |' * len(specs)}"]
    said: dict[str, list[str]] = {}
    for name in names:
        found = [rows.get((name, spec)) for spec in specs]
        if not any(found):
            continue
        cells = [
            MARKS[row["outcome"]] + (f"{round(row['seconds']):>3}" if seconds else "") if row else "" for row in found
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
        for row in (row for row in found if row and row["outcome"] != "proved"):
            words = re.sub(r"^in [^:]*, rank \d+: (hf_parallel: )?", "", row["words"])[:240]
            said.setdefault(f"{MARKS[row['outcome']]} {words}", []).append(f"{name} on `{row['spec']}`")
    notes = [f"- {words}: {'; '.join(places[:6])}{' and more' * (len(places) > 6)}" for words, places in said.items()]
    return [*lines, *([""] if notes else []), *notes]


def main() -> None:
    """Prove what is asked for and not known."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="*", default=[""], help="parts of names")
    options.add_argument("--kind", choices=(*KINDS, SCRIPTS, ORIGINALS, BF16, CLEAN), default="plain")
    options.add_argument("--sources", metavar="FOLDER", help="originals: checkouts of transformers, accelerate, …")
    options.add_argument("--specs", nargs="*")
    options.add_argument("--again", action="store_true", help="what was proved before today, too")
    options.add_argument("--write", action="store_true", help="write the page, and prove nothing")
    args = options.parse_args()
    if args.write:
        PAGE.write_text(page(tables()))
        return
    today = str(date.today())  # a sweep that was stopped goes on
    done = {key for key, row in known(args.kind).items() if not args.again or row["date"] == today}
    specs = args.specs or _SPECS.get(args.kind, SPECS)
    if args.kind == ORIGINALS and not args.sources:
        options.error("--kind originals needs --sources FOLDER")
    with subjects(args.kind, args.only, args.sources) as chosen:
        for name, script in chosen:
            _prove_row(args.kind, name, script, [spec for spec in specs if (name, spec) not in done])


def _prove_row(kind: str, name: str, script: Script, specs: list[str]) -> None:
    """Prove one script under layouts, and write down what comes out; its references run once per size."""
    references: dict = {}
    with scratch() as work:
        for spec in specs:
            begin = time.monotonic()
            with contextlib.redirect_stderr(io.StringIO()):
                outcome, words = cell(spec, script, work, references, kind == BF16 or name.endswith(", bf16"))
            row = {"kind": kind, "class": name, "spec": spec, "outcome": outcome, "words": words}
            row["date"] = str(date.today())
            with open(RESULTS, "a") as file:
                file.write(json.dumps({**row, "seconds": round(time.monotonic() - begin, 1)}) + "\n")
            print(f"{name:40} {spec:28} {outcome:8} {words[:200]}", flush=True)


if __name__ == "__main__":
    main()

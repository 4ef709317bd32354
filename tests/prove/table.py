"""Prove the 30 most used classes of Transformers under ten layouts, and write the table of docs/reference/proofs.md.

python -m tests.prove.table                          # all that is not known yet; an hour and a half on two cores
python -m tests.prove.table --kind lora --only Llama Qwen3 --specs tp=2 pp=2
python -m tests.prove.table --write                  # the page from the results
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
from datetime import date
from pathlib import Path

import transformers

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.spec import SpecError
from hf_parallel.cli.prove import NotProvedError, Proof, Script
from hf_parallel.model.shrink import small_values
from hf_parallel.prove.small_run import Sizes
from tests import distributed  # noqa: F401 - one thread, everything imported
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
MARKS = {"proved": "✓", "refused": "–", "differs": "✗", "fails": "!"}


def write_config(name: str, folder: Path) -> None:
    """The config of a small model of this class."""
    cls = getattr(transformers, name)
    config = cls.config_class(**small_values(cls.config_class()))
    config.architectures, config.num_labels = [name], 3
    if config.is_encoder_decoder:
        config.decoder_start_token_id = config.pad_token_id  # as T5's configs on the Hub have it
    folder.mkdir()
    config.save_pretrained(folder)


def cell(spec: str, arguments: list[str], work: Path, references: dict) -> tuple[str, str]:
    """The outcome of one class under one layout, and what it says."""
    config = ParallelConfig.parse(spec).resolve(axes(spec)["world"])
    key = str(Sizes.of_layout(config, 4, False))
    folder = work / hashlib.sha256(key.encode()).hexdigest()[:8]  # the references of these sizes, and what they saved
    proof = Proof(folder, config, Script("hf_parallel.cli.prove_model", arguments, is_module=True), limit_s=150)
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
    return {kind: known(kind) for kind in KINDS}


def page(tables: dict[str, dict[tuple[str, str], dict]]) -> str:
    """The tables, and below each in words what is not proved."""
    rows = [row for table in tables.values() for row in table.values()]
    counts = {outcome: sum(row["outcome"] == outcome for row in rows) for outcome in MARKS}
    seconds = sum(row["seconds"] for row in rows) / max(1, len(rows))
    lines = [
        "# Proofs of model classes",
        "",
        f"`python -m tests.prove.table` wrote this page on {date.today()}. Each cell is `hf-parallel prove` of the",
        "class with a small config on generated examples, on CPUs, in fp32: padded examples,",
        "rows of several documents, adapters.",
        "",
        f"{counts['proved']} proved (✓), {counts['refused']} refused by name (–), {counts['differs']} differ (✗),",
        f"{counts['fails']} fail (!). A proof took {seconds:.0f} s on two cores, with other work beside it.",
    ]
    for kind, table in tables.items():
        if table:
            lines += ["", f"## {kind.capitalize() if kind != 'lora' else 'LoRA'}", "", *_table(table)]
    return "\n".join([*lines, ""])


def _table(rows: dict[tuple[str, str], dict]) -> list[str]:
    lines = [f"| class | {' | '.join(f'`{spec}`' for spec in SPECS)} |", f"| --- |{' :-: |' * len(SPECS)}"]
    said: dict[str, list[str]] = {}
    for name in CLASSES:
        found = [rows.get((name, spec)) for spec in SPECS]
        if not any(found):
            continue
        lines.append(f"| {name} | {' | '.join(MARKS[row['outcome']] if row else '' for row in found)} |")
        for row in (row for row in found if row and row["outcome"] != "proved"):
            words = re.sub(r"^in [^:]*, rank \d+: (hf_parallel: )?", "", row["words"])[:240]
            said.setdefault(f"{MARKS[row['outcome']]} {words}", []).append(f"{name} on `{row['spec']}`")
    notes = [f"- {words}: {'; '.join(places[:6])}{' and more' * (len(places) > 6)}" for words, places in said.items()]
    return [*lines, *([""] if notes else []), *notes]


def main() -> None:
    """Prove what is asked for and not known."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="*", default=[""], help="parts of class names")
    options.add_argument("--kind", choices=KINDS, default="plain")
    options.add_argument("--specs", nargs="*", default=SPECS)
    options.add_argument("--again", action="store_true")
    options.add_argument("--write", action="store_true", help="write the page, and prove nothing")
    args = options.parse_args()
    if args.write:
        PAGE.write_text(page(tables()))
        return
    for name in (name for name in CLASSES if any(part in name for part in args.only)):
        work, references, done = Path(tempfile.mkdtemp(prefix="table-")), {}, known(args.kind)
        write_config(name, work / "model")
        for spec in (spec for spec in args.specs if args.again or (name, spec) not in done):
            begin = time.monotonic()
            with contextlib.redirect_stderr(io.StringIO()):
                outcome, words = cell(spec, [str(work / "model"), *KINDS[args.kind]], work, references)
            row = {"kind": args.kind, "class": name, "spec": spec, "outcome": outcome, "words": words}
            with open(RESULTS, "a") as file:
                file.write(json.dumps({**row, "seconds": round(time.monotonic() - begin, 1)}) + "\n")
            print(f"{name:40} {spec:28} {outcome:8} {words[:200]}", flush=True)
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()

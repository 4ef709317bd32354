"""Every architecture of transformers that has experts, split inside and shared out, as `tests.sweep` does for all.

Not part of the test run: it takes a quarter of an hour. One head of each model type, the first that can be built.

python -m tests.sweep_experts                    # all, into tests/results/sweep_experts.json; goes on where it stopped
python -m tests.sweep_experts mixtral,qwen3_moe  # some model types, afresh
python -m tests.sweep_experts --table            # their part of docs/reference/models.md from the results
"""

import argparse
import json
import math
import re
import time
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.utils import logging

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.model.experts import iterate_experts
from tests import sweep
from tests.distributed import RankFailure, run_alone

RESULTS = sweep.ROOT / "tests" / "results" / "sweep_experts.json"
HEADS = ("causal", "seq2seq", "caption", "sequence", "masked")
#: Layouts, with the length of the rows: padding ends some of 15, so no two ranks hold as many tokens.
CASES = (
    ("tp=2", 16),
    ("tp=2", 15),
    ("pp=2", 15),
    ("tp=2,pp=2", 15),
    ("dp_shard=2,ep=2", 15),
    ("tp=2,ep=2", 15),
    ("dp_shard=2,ep=2,pp=2", 15),
)
#: What decides which layers have experts: one dense layer, where there are some, and experts in all others.
DENSE_LAYERS = r"first_k_dense_replace|num_dense_layers|moe_layer_start_index|n_dense_layers|mlp_only_layers"


def small_config(default: PretrainedConfig, head: str) -> PretrainedConfig:
    """The sweep's, with experts in most layers."""
    config = sweep.small_config(default, head)
    text = config.get_text_config()
    for key, value in text.to_dict().items():
        if re.fullmatch(DENSE_LAYERS, key) and isinstance(value, int) and value > 1:
            setattr(text, key, 1)
    return config


def has_experts(cls: Any, config: PretrainedConfig) -> tuple[int, str]:
    """Parameters, and how experts are kept: side by side, in lists of modules, or not at all."""
    with torch.device("meta"):
        model = cls(config)
    beside = any(True for _ in iterate_experts(model))
    named = any(name.rpartition(".")[2] == "experts" for name, _ in model.named_modules())
    size = sum(parameter.numel() for parameter in model.parameters())
    return size, "side by side" if beside else "modules" if named else ""


def ranks_of(spec: str) -> int:
    """How many ranks a layout has."""
    return math.prod(size for size in ParallelConfig.parse(spec).sizes.values() if size > 0)


def outcome(head: str, cls: Any, kind: type[PretrainedConfig]) -> dict[str, Any] | None:
    """All layouts of one architecture; None if it has no experts."""
    try:
        config = small_config((getattr(cls, "config_class", None) or kind)(), head)
        size, kept = run_alone(has_experts, cls, config, timeout=sweep.LIMIT_S)
        if not kept:
            return None
        if size > sweep.LARGEST:
            return {"skipped": f"{size} parameters"}
        batches = {length: sweep.batch_for(head, cls, config, length) for length in (16, 15)}
        alone = {n: run_alone(sweep.step, cls, config, batches[n], None, timeout=sweep.LIMIT_S) for n in batches}
    except RankFailure as failure:
        return {"skipped": f"{failure.kind}: {failure.message[:300]}"} if _names_experts(kind) else None
    except Exception as error:
        return {"skipped": f"{type(error).__name__}: {str(error)[:300]}"} if _names_experts(kind) else None
    if math.isnan(alone[16][0]):
        return {"skipped": "the loss is not a number"}
    found: dict[str, Any] = {"class": cls.__name__, "kept": kept, "cases": {}}
    for spec, length in CASES:
        axes = [part.partition("=")[0] for part in spec.split(",") if not part.startswith("dp_shard")]
        first = {axis: found["cases"].get(f"{alone_} {n}", {}) for axis, alone_, n in _SINGLE}
        if any(first[axis].get("class") == "refused" for axis in axes if axis in first):
            continue
        found["cases"][f"{spec} {length}"] = sweep.case(
            cls, config, batches[length], spec, alone[length], ranks_of(spec)
        )
    return found


def _names_experts(kind: type[PretrainedConfig]) -> bool:
    """Of a model that could not be built: does its config know of experts?"""
    try:
        return "expert" in str(kind().to_dict())
    except Exception:
        return "expert" in str(vars(kind))


_SINGLE = (("tp", "tp=2", 16), ("pp", "pp=2", 15), ("ep", "dp_shard=2,ep=2", 15))

# ---- docs/reference/models.md ---------------------------------------------------------------------------------------

TEXT = """
`python -m tests.sweep_experts`, last with transformers {version} on {date:%Y-%m-%d}: one head of every model type with
experts, experts in most layers. **tp**: `tp=2` on
rows of 16 and 15 tokens, experts split inside; **sp** as above. **pp**: `pp=2` and, where tp is right, `tp=2,pp=2`.
**ep**: `dp_shard=2,ep=2`; **tp, ep**: `tp=2,ep=2`; **pp, ep**: `dp_shard=2,ep=2,pp=2`.

| model type | head | tp | sp | pp | ep | tp, ep | pp, ep |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
#: Columns, and the cases that each stands for.
COLUMNS = (
    ("tp=2 16", "tp=2 15"),
    ("pp=2 15", "tp=2,pp=2 15"),
    ("dp_shard=2,ep=2 15",),
    ("tp=2,ep=2 15",),
    ("dp_shard=2,ep=2,pp=2 15",),
)


def section(results: dict[str, Any], when: date) -> str:
    """The part of docs/reference/models.md that is about mixtures, as they were swept on a day."""
    lines, refused, skipped, wrong = [], {}, [], []
    for model_type, found in sorted(results.items()):
        if "cases" not in found:
            skipped.append(model_type)
            continue
        cases = found["cases"]
        cells = [_cell(cases, names) for names in COLUMNS]
        sequences = "" if cells[0] != "✓" else "-" if sweep.whole_sequences(cases["tp=2 16"]) else "✓"
        lines.append(
            f"| {model_type} | {sweep.WORDS[found['head']]} | {' | '.join([cells[0], sequences, *cells[1:]])} |"
        )
        for case in cases.values():
            if case["class"] == "refused":
                types = refused.setdefault(_reason(case["text"]), [])
                types += [model_type] * (model_type not in types)
        wrong += [f"{model_type} ({name})" for name, case in cases.items() if case["class"] in ("wrong", "crash")]
    text = (
        sweep.MIXTURES
        + TEXT.format(version=version("transformers"), date=when)
        + "\n".join(lines)
        + "\n\nA dash is refused, as are the products of what is refused:\n\n"
    )
    text += "\n".join(f"- {reason}: {', '.join(types)}" for reason, types in sorted(refused.items())) + "\n"
    text += f"\nNot right yet: {', '.join(wrong)}.\n" if wrong else ""
    return text + f"\nNot made small by the rules, or in need of other inputs: {', '.join(skipped)}.\n\n"


def _cell(cases: dict[str, Any], names: tuple[str, ...]) -> str:
    kinds = {case["class"] for name, case in cases.items() if name in names}
    return "-" if not kinds else "✗" if kinds - {"ok", "refused"} else "✓" if "ok" in kinds else "-"


def _reason(text: str) -> str:
    for pattern, words in sweep.GROUPS:
        if match := re.search(pattern, text):
            return words or match.group(1)
    text = re.sub(r"^([a-z]+)_size=\d+: ", r"`\1`: ", text)
    text = re.sub(r"; [a-z_]+=\d+ works$", "", text)
    return re.sub(r"^(`ep`: )\w+ (has no experts)", r"\1\2", text)


def write_page(results: dict[str, Any], when: date) -> None:
    """Put the section into the page, and take mixtures out of its other tables."""
    before, _, after = sweep.PAGE.read_text().partition(sweep.REFUSED)
    before = before.partition(sweep.MIXTURES)[0]
    types = {name for name, found in results.items() if "cases" in found}
    kept = [line for line in before.splitlines() if line.partition("| ")[2].partition(" |")[0] not in types]
    page = "\n".join(kept).rstrip() + "\n\n" + section(results, when) + sweep.REFUSED + after
    sweep.PAGE.write_text(page)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="?", default="", help="model types, by commas")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    logging.set_verbosity_error()
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    if options.table:
        write_page(results, date.fromtimestamp(options.results.stat().st_mtime))
        return
    types, begun = [word for word in options.types.split(",") if word], set()
    for head, model_type, cls, kind in sweep.architectures(list(HEADS), types):
        if "cases" in results.get(model_type, {}) and not (types and model_type not in begun):
            continue
        start, begun = time.monotonic(), begun | {model_type}
        found = outcome(head, cls, kind)
        if found is None:
            continue
        results[model_type] = {"head": head, **found}
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=1))
        print(f"{head} {model_type} ({time.monotonic() - start:.1f} s)", found.get("skipped", "")[:160], flush=True)
        for name, one in found.get("cases", {}).items():
            print(f"    {name}: {one['class']} {one['text'][:230]}", *one.get("at", [])[-1:], flush=True)


if __name__ == "__main__":
    main()

"""Every architecture of transformers under tp and pp: same loss and same gradients as one process, or refused.

Not part of the test run: it takes the better part of an hour. Each architecture is shrunk by rules on the names of its
config's attributes; what they cannot shrink is left out. The numbers are those of one training step in fp32.

python -m tests.sweep                       # all, into tests/results/sweep.json; goes on where it stopped
python -m tests.sweep causal gpt2,bloom     # one kind of head, some model types, afresh
python -m tests.sweep --table               # docs/reference/models.md from the results
"""

import argparse
import inspect
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.utils import logging

import hf_parallel.apply.parallelize  # noqa: F401 - once, before the forks
from hf_parallel.model.shrink import IMAGE, LARGEST, VOCABULARY, build_random, choose_small_sizes
from tests.distributed import RankFailure, run, run_alone

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "tests" / "results" / "sweep.json"
CLASSES, ROWS = 3, 4
TOLERANCE = 1e-4  # of a gradient's largest entry
NOISE = 1e-6  # of the largest gradient: what is zero but for rounding, such as that of key biases
LIMIT_S = 60.0

HEADS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING,
    "sequence": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
    "speech": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING,
    "image": modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
    "caption": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
}
#: Layouts, with the length of the rows.
CASES = (
    ("tp=2", 16),
    ("tp=2", 15),
    ("tp=2,sequence_parallel=false", 16),
    ("tp=4", 16),
    ("pp=2", 16),
    ("tp=2,pp=2", 16),
)

# ---- small configs ----------------------------------------------------------------------------------------------

#: What no rule can know: of each kind the variant that is swept.
OWN: dict[str, dict[str, Any]] = {
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
    "openai-gpt": {"afn": "gelu"},
    "xmod": {"default_language": "en_XX"},
    "esm": {"pad_token_id": 0, "position_embedding_type": "rotary"},
    "chameleon": {"vocabulary_map": {"<image>": 4, "IMGIMGBZ": 5}},
}


def small_config(default: PretrainedConfig, head: str = "") -> PretrainedConfig:
    """The config of a tiny model of the kind of `default`, which is not changed."""
    as_dict, changes = default.to_dict(), choose_small_sizes(default)
    if head == "causal" and "is_decoder" in as_dict:
        changes["is_decoder"] = True
    if head in ("sequence", "image"):
        changes["num_labels"] = CLASSES
    if head in ("sequence", "seq2seq", "speech") and not isinstance(as_dict.get("pad_token_id"), int):
        changes["pad_token_id"] = 0
    if head in ("sequence", "seq2seq", "speech") and getattr(default, "decoder_start_token_id", None) is None:
        changes["decoder_start_token_id"] = 0
    return type(default)(**{**changes, **OWN.get(default.model_type, {})})


def batch_for(head: str, cls: Any, config: PretrainedConfig, length: int) -> dict[str, torch.Tensor]:
    """Rows for this head, of what the model's forward reads; some end in padding."""
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(5, VOCABULARY - 8, (ROWS, length), generator=generator)
    labels = tokens.clone()
    labels[1, :3] = -100
    mask = torch.ones_like(tokens)
    classes = tokens[:, 0] % CLASSES
    batch: dict[str, torch.Tensor]
    if head == "image":
        side = getattr(config, "image_size", None) or getattr(getattr(config, "vision_config", None), "image_size", 0)
        side = side if isinstance(side, int) and side else IMAGE
        channels = getattr(config, "num_channels", 3)
        batch = {"pixel_values": torch.randn(ROWS, channels, side, side, generator=generator), "labels": classes}
        return batch
    mask[2, length - 5 :] = 0
    labels[2, length - 5 :] = -100
    if head == "seq2seq" and getattr(config, "is_encoder_decoder", False):
        labels = labels[:, : length - 4]
    batch = {"input_ids": tokens, "attention_mask": mask, "labels": classes if head == "sequence" else labels}
    if head == "speech":
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 80)
        frames = 2 * getattr(config, "max_source_positions", 64)
        batch = {"input_features": torch.randn(ROWS, bins, frames, generator=generator), "labels": labels}
    if head == "sequence" and isinstance(getattr(config, "eos_token_id", None), int):
        tokens[torch.arange(ROWS), mask.sum(-1) - 1] = config.eos_token_id  # BART's head reads there
    pad = getattr(config, "pad_token_id", None)
    if isinstance(pad, int) and "input_ids" in batch:
        batch["input_ids"] = batch["input_ids"].masked_fill(mask == 0, pad if 0 <= pad < VOCABULARY else 0)
    known = inspect.signature(cls.forward).parameters
    return {key: value for key, value in batch.items() if key in known}


# ---- one case ---------------------------------------------------------------------------------------------------

Numbers = tuple[float, dict[str, torch.Tensor], list[str]]


def step(cls: Any, config: PretrainedConfig, batch: dict[str, torch.Tensor], spec: str | None) -> Numbers:
    """Loss, every gradient in the model's own order, and the layout's notes."""
    from hf_parallel.model.anatomy import get_stored_order

    model = build_random(cls, config).train()
    if spec:
        from hf_parallel import parallelize

        parallelize(model, spec)
    torch.manual_seed(3)
    outputs = model(**{key: value.clone() for key, value in batch.items()})
    outputs.loss.backward()
    gradients = {}
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
            order = get_stored_order(model, key)
            gradients[key] = gradient if order is None else order.to_own(gradient)
    return outputs.loss.item(), gradients, model._hf_parallel.notes if spec else []


def count(cls: Any, config: PretrainedConfig) -> int:
    """Parameters of the model, without making them."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in cls(config).parameters())


def differences(alone: Numbers, ranks: list[Numbers]) -> list[str]:
    """What is not the same on some rank: the loss, or a gradient."""
    found = []
    loss, gradients, _ = alone
    floor = NOISE * max(gradient.abs().max().item() for gradient in gradients.values())
    for rank, (other, _, _) in enumerate(ranks):
        if not abs(other - loss) <= 1e-5 * max(1.0, abs(loss)):
            found.append(f"loss {other:.6f} for {loss:.6f} on rank {rank}")
            break
    for key, gradient in gradients.items():
        held = [own[key] for _, own, _ in ranks if key in own]
        largest = gradient.abs().max().item()
        if not held:
            if largest > floor:
                found.append(f"{key}: no gradient")
            continue
        if any(own.shape != gradient.shape for own in held):
            found.append(f"{key}: shape {tuple(held[0].shape)}")
            continue
        distance = max((own - gradient).abs().max().item() for own in held)
        if not distance <= max(TOLERANCE * largest, floor):
            found.append(f"{key}: {distance / (largest + 1e-12):.2g}")
    return found


def case(
    cls: Any, config: PretrainedConfig, batch: dict, spec: str, alone: Numbers, world: int | None = None
) -> dict[str, Any]:
    """The outcome of one layout, as a class and a text."""
    world = world or (4 if spec in ("tp=2,pp=2", "tp=4") else 2)
    try:
        ranks = run(step, world, cls, config, batch, spec, timeout=LIMIT_S)
    except RankFailure as failure:
        message = next((line for line in failure.message.splitlines() if line.strip()), "")
        plain = failure.kind == "SpecError" or "hf_parallel" in message
        place = [line.strip() for line in str(failure).splitlines() if line.strip().startswith("File ")]
        return {
            "class": "refused" if plain else "crash",
            "text": message[:400] if plain else f"{failure.kind}: {message[:400]}",
            "at": [] if plain else place[:40][-6:],
        }
    wrong = differences(alone, ranks)
    return {"class": "wrong" if wrong else "ok", "text": "; ".join(wrong[:6]), "notes": ranks[0][2], "n": len(wrong)}


def sweep(head: str, cls: Any, kind: type[PretrainedConfig]) -> dict[str, Any]:
    """All layouts of one architecture; those that others imply are left out."""
    try:
        config = small_config((getattr(cls, "config_class", None) or kind)(), head)
        size = run_alone(count, cls, config, timeout=LIMIT_S)
        if size > LARGEST:
            return {"skipped": f"{size} parameters"}
        batches = {length: batch_for(head, cls, config, length) for length in (16, 15)}
        alone = {n: run_alone(step, cls, config, batch, None, timeout=LIMIT_S) for n, batch in batches.items()}
        again = run_alone(step, cls, config, batches[16], None, timeout=LIMIT_S)
    except RankFailure as failure:
        lines = [line.strip() for line in str(failure).splitlines() if line.strip().startswith("File ")]
        return {"skipped": f"{failure.kind}: {failure.message[:300]}", "at": lines[-3:]}
    except Exception as error:
        return {"skipped": f"{type(error).__name__}: {str(error)[:300]}"}
    if math.isnan(alone[16][0]):
        return {"skipped": "the loss is not a number"}
    if differences(alone[16], [again]):
        return {"skipped": "two runs differ"}
    found: dict[str, Any] = {"class": cls.__name__, "cases": {}}
    for spec, length in CASES:
        done = found["cases"]
        first = done.get("tp=2 16", {})
        if "tp" in spec and first.get("class") == "refused":
            continue
        if spec == "tp=2,pp=2" and done["pp=2 16"]["class"] == "refused":
            continue
        if "false" in spec and whole_sequences(first):
            continue
        if head in ("image", "speech") and length == 15:
            continue
        if spec == "tp=4" and first.get("class") != "ok":
            continue
        done[f"{spec} {length}"] = case(cls, config, batches[length], spec, alone[length])
    return found


def whole_sequences(case: dict[str, Any]) -> bool:
    """Did a layout say that it has no sequence parallelism?"""
    return any("sequence parallelism" in note for note in case.get("notes") or ())


def architectures(wanted: list[str], types: list[str]) -> list[tuple[str, str, Any, Any]]:
    """Head, model type, model class and config class of all that transformers offers."""
    found = []
    for head, mapping in HEADS.items():
        for kind in mapping.keys() if not wanted or head in wanted else ():
            if types and kind.model_type not in types:
                continue
            try:
                cls = mapping[kind]
            except Exception as error:  # needs a package that is not here
                print(head, kind.model_type, "cannot be imported:", str(error).splitlines()[0][:100])
                continue
            for one in cls if isinstance(cls, (tuple, list)) else (cls,):
                found.append((head, kind.model_type, one, kind))
    return list(dict.fromkeys(found))


# ---- docs/reference/models.md ---------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "reference" / "models.md"
#: Where the part that `tests.sweep_experts` writes begins, and what follows it.
MIXTURES, REFUSED = "## Mixtures of experts\n", "## Tensor parallelism is refused\n"
WORDS = {
    "causal": "causal LM",
    "masked": "masked LM",
    "sequence": "sequence classification",
    "seq2seq": "seq2seq LM",
    "speech": "speech to text",
    "image": "image classification",
    "caption": "image-text to text",
}
#: What a refusal says, and the group it belongs to.
GROUPS = (
    (r"moe_tp_experts|grouped_gemm|router", "has experts of a kind that is not split"),
    (r"no attention heads to split", "has no attention heads: recurrent, convolutional or pooling layers"),
    (r"holds several projections is not known", "keeps several projections in one weight in an order of its own"),
    (r"cannot be told apart|has no layers of attention|no one hidden_size", "has layers of an unknown structure"),
    (r"style \w+ of .* is not supported", "plans a style of tensor parallelism that is not known here"),
    (r"publishes no pipeline plan", "publishes no pipeline plan, and its order of execution is not known here"),
    (r"is not one stack of layers", "is not one stack of layers with a head behind it"),
    (r"has parts beside its language model", "has parts beside its language model, such as a vision tower"),
    (r"the pipeline plan says nothing about", "has weights about which its pipeline plan says nothing"),
    (r"how \w+ uses \w+, which has a gradient", "has attentions that are given a tensor with a gradient"),
    (r"tp_size=\d+: \w+ ([a-z].*); tp_size=1 works", None),
)
HEADER = """# Models

What `python -m tests.sweep` finds for every architecture of transformers {version} that can be shrunk by rules: one
training step in fp32 has the loss and every gradient of one process (1e-5 and 1e-4 relative). Not a part of the test
run; the families of the [README](../../README.md#what-is-tested) are tested more thoroughly.

- **tp**: `tp=2` on rows of 16 and 15 tokens, and `tp=4` on two key/value heads, which a norm over all of them (OLMo 2)
  refuses; image-text models on rows of text alone.
- **sp**: sequence parallelism, on by default with `tp`. Where there is none, rows stay whole on each rank, and each
  run says why.
- **pp**: `pp=2`, and `tp=2,pp=2` where tp is right.

A dash is a refusal at start; the reasons are below. An empty cell was not tried.

| model type | head | tp | sp | pp |
| --- | --- | --- | --- | --- |
"""


def read_mixtures(page: str) -> str:
    """Return the part of docs/reference/models.md about mixtures, which have rows there alone; "" without one."""
    before = page.partition(REFUSED)[0]
    return MIXTURES + before.partition(MIXTURES)[2] if MIXTURES in before else ""


def table(results: dict[str, Any], mixtures: str = "") -> str:
    """docs/reference/models.md around the part about mixtures."""
    from importlib.metadata import version

    elsewhere = set(re.findall(r"^\| (\S+) \|", mixtures, re.MULTILINE))
    rows: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    refused: dict[str, dict[str, list[str]]] = {"tp": {}, "pp": {}}
    skipped, wrong = set(), set()
    for key, found in results.items():
        head, model_type, _ = key.split()
        if "cases" not in found:
            skipped.add(model_type)
            continue
        cases = found["cases"]
        cells = _cells(cases)
        if "✓" in cells and model_type not in elsewhere:
            heads = rows.setdefault((model_type, cells), [])
            heads += [WORDS[head]] * (WORDS[head] not in heads)
        wrong |= {f"{model_type} ({name})" for name, case in cases.items() if case["class"] in ("wrong", "crash")}
        for axis in ("tp", "pp"):
            if (case := cases.get(f"{axis}=2 16", {})).get("class") == "refused":
                types = refused[axis].setdefault(_group(case["text"]), [])
                types += [model_type] * (model_type not in types)
    lines = [
        f"| {model_type} | {', '.join(heads)} | {' | '.join(cells)} |"
        for (model_type, cells), heads in sorted(rows.items())
    ]
    text = HEADER.format(version=version("transformers")) + "\n".join(lines) + "\n"
    text += f"\n{mixtures.rstrip()}\n" if mixtures else ""
    for axis, name in (("tp", "Tensor"), ("pp", "Pipeline")):
        text += f"\n## {name} parallelism is refused\n\n"
        text += "\n".join(f"- {reason}: {', '.join(sorted(types))}" for reason, types in sorted(refused[axis].items()))
        text += "\n"
    if wrong:
        text += f"\n## Not right yet\n\n{', '.join(sorted(wrong))}\n"
    text += "\n## Not tried with some or all heads\n\nNot made small by the rules, or in need of other inputs or "
    return text + f"packages: {', '.join(sorted(skipped))}\n"


def _cells(cases: dict[str, Any]) -> tuple[str, ...]:
    def cell(*names: str) -> str:
        kinds = {case["class"] for name, case in cases.items() if name in names}
        return "" if not kinds else "✗" if kinds - {"ok", "refused"} else "✓" if "ok" in kinds else "-"

    tp = cell("tp=2 16", "tp=2 15", "tp=4 16", "tp=2,sequence_parallel=false 16")
    whole = whole_sequences(cases.get("tp=2 16", {}))
    return tp, "" if tp != "✓" else "-" if whole else "✓", cell("pp=2 16", "tp=2,pp=2 16")


def _group(text: str) -> str:
    for pattern, words in GROUPS:
        if match := re.search(pattern, text):
            return words or match.group(1)
    return re.sub(r"^[a-z_]+=\d+:? ", "", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("heads", nargs="?", default="", help="kinds of heads, by commas")
    parser.add_argument("types", nargs="?", default="", help="model types, by commas")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--again", default="", help="also those whose outcome contains this")
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    logging.set_verbosity_error()
    results = json.loads(options.results.read_text()) if options.results.exists() else {}
    if options.table:
        PAGE.write_text(table(results, read_mixtures(PAGE.read_text())))
        return
    wanted = [word for word in options.heads.split(",") if word]
    types = [word for word in options.types.split(",") if word]
    for head, model_type, cls, kind in architectures(wanted, types):
        key = f"{head} {model_type} {cls.__name__}"
        if key in results and not types and not (options.again and options.again in json.dumps(results[key])):
            continue
        start = time.monotonic()
        results[key] = sweep(head, cls, kind)
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=1))
        print(f"{key} ({time.monotonic() - start:.1f} s)", flush=True)
        if "skipped" in results[key]:
            print("    skipped:", results[key]["skipped"].replace("\n", " ")[:160], *results[key].get("at", [])[-1:])
        for name, outcome in results[key].get("cases", {}).items():
            notes = f" ({'; '.join(outcome['notes'])})" if outcome.get("notes") else ""
            print(f"    {name}: {outcome['class']} {outcome['text'][:230]}{notes}", flush=True)


if __name__ == "__main__":
    main()

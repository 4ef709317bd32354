"""One GPU: this package's settings beside plain Trainer with its own best ones, in turns; Llamas of 1B and 8B shape.

    python -m benchmarks.single_gpu            every case; on a CPU a small one, in the same table
    python -m benchmarks.single_gpu 8B lora    one shape, one kind of training

Each run is a process of its own: weights in bf16 at random, rows of 4,096 tokens, AdamW, steps as Trainer's callbacks
see them. Of each side the fastest settings that fit count; where its fastest ones are as fast, the leanest. Plain
Trainer chooses among no checkpointing and its own, with sdpa, and with what is installed: flash-attn, liger-kernel.

Target: at least 1.3 x the tokens per second, or at most 0.6 x the memory, and never worse in both.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.setting import Setting
from benchmarks.gpu.share import config_of, fill
from benchmarks.gpu.speed import numbers, timed_trainer

SHAPES, KINDS = ("1B", "8B"), ("lora", "full")
ROUNDS = 2  # of each settings, in turns
FASTER, LEANER = 1.3, 0.6
_RANK, _GIB, _ALIKE = 16, 2**30, 0.03
_OURS = (
    "attention=auto,lean_loss=true",
    "attention=auto,lean_loss=true,activation_checkpointing=selective",
    "attention=auto,lean_loss=true,activation_checkpointing=full",
)


@dataclass(frozen=True)
class Settings:
    """Of one side: a spec, or what plain Trainer is told."""

    who: str
    name: str
    spec: str = ""
    checkpointing: bool = False
    attention: str = "sdpa"
    liger: bool = False


def settings() -> list[Settings]:
    """All that are tried, plain and ours in turns."""
    plain = [Settings("plain Trainer", "sdpa"), Settings("plain Trainer", "sdpa, checkpointing", checkpointing=True)]
    if find_spec("flash_attn") is not None:
        name = "flash_attention_2, checkpointing"
        plain.append(Settings("plain Trainer", name, checkpointing=True, attention="flash_attention_2"))
    if find_spec("liger_kernel") is not None:
        plain.append(Settings("plain Trainer", "sdpa, checkpointing, liger", checkpointing=True, liger=True))
    ours = [Settings("hf_parallel", spec, spec) for spec in _OURS]
    pairs = itertools.zip_longest(plain, ours)
    return [one for pair in pairs for one in pair if one is not None]


# ---- in a process of its own ----------------------------------------------------------------------------------------


def trained(shape: str, kind: str, rows: int, seq: int, **how: Any) -> dict[str, Any]:
    """Tokens per second, MFU and peak memory of a run; `error` in their place where it does not fit."""
    try:
        return _trained(shape, kind, rows, seq, Settings(**how))
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}


def _trained(shape: str, kind: str, rows: int, seq: int, how: Settings) -> dict[str, Any]:
    config = config_of(shape)
    model = _model(config, how)
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        targets = LoraConfig(r=_RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, targets)
    told = {"gradient_checkpointing": how.checkpointing, "use_liger_kernel": how.liger}
    told |= {"bf16": True, "use_cpu": not torch.accelerator.is_available()}
    if torch.accelerator.is_available():
        torch.get_device_module().reset_peak_memory_stats()
    found = numbers(timed_trainer(model, rows, seq, **told), config, rows * seq, seq, 1.0)
    return {"tokens_per_s": found["tokens_per_s"], "mfu": found["mfu"], "bytes": _most()}


def _model(config: Any, how: Settings) -> Any:
    from transformers import AutoModelForCausalLM

    from hf_parallel.apply.parallelize import choose_default_device

    with choose_default_device():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=how.attention)
    fill(model)
    if how.spec:
        import torch.distributed as dist

        import hf_parallel

        if not dist.is_initialized():
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        hf_parallel.parallelize(model, f"dp_shard=1,{how.spec}")
    return model


def _most() -> int:
    """Bytes at the peak: of the device's allocator; on a CPU of the process."""
    if torch.accelerator.is_available():
        return torch.get_device_module().max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- the table ------------------------------------------------------------------------------------------------------


def case(setting: Setting, shape: str, kind: str, rows: int, seq: int, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """What each settings gave, as the median of its rounds."""
    tried, found = settings(), [[] for _ in settings()]  # type: ignore[var-annotated]
    for _ in range(rounds):
        for place, how in enumerate(tried):
            if not any("error" in one for one in found[place]):
                given = {"shape": shape, "kind": kind, "rows": rows, "seq": seq}
                found[place] += setting.on_ranks("benchmarks.single_gpu:trained", 1, **given, **vars(how))
    return [_median(how, runs) for how, runs in zip(tried, found, strict=True)]


def _median(how: Settings, runs: list[dict[str, Any]]) -> dict[str, Any]:
    about = {"who": how.who, "settings": how.name}
    if "error" in runs[-1]:
        return {**about, **runs[-1]}
    kinds = [kind for kind in runs[0] if runs[0][kind] is not None]
    return {**about, **{kind: statistics.median(run[kind] for run in runs) for kind in kinds}}


def best(found: list[dict[str, Any]], who: str) -> dict[str, Any] | None:
    """Of one side: the leanest among the fastest."""
    fitting = [one for one in found if one["who"] == who and "error" not in one]
    if not fitting:
        return None
    fastest = max(one["tokens_per_s"] for one in fitting)
    return min((one for one in fitting if one["tokens_per_s"] >= (1 - _ALIKE) * fastest), key=lambda one: one["bytes"])


def lines(what: str, found: list[dict[str, Any]]) -> Iterator[str]:
    """The table's lines of a case, and how the best of both sides compare."""
    for one in found:
        if "error" in one:
            yield f"| {what} | {one['who']} | {one['settings']} | {one['error']} | | |"
            continue
        mfu = f"{one['mfu']:.1%}" if "mfu" in one else ""
        speed, size = f"{one['tokens_per_s']:,.0f}", f"{one['bytes'] / _GIB:.2f}"
        yield f"| {what} | {one['who']} | {one['settings']} | {speed} | {mfu} | {size} |"
    yield f"| {what} | best of both | {verdict(found)} | | | |"


def verdict(found: list[dict[str, Any]]) -> str:
    """Is the target met?"""
    ours, plain = best(found, "hf_parallel"), best(found, "plain Trainer")
    if ours is None or plain is None:
        return "only plain Trainer fits" if plain else "only hf_parallel fits" if ours else "neither fits"
    faster, memory = ours["tokens_per_s"] / plain["tokens_per_s"], ours["bytes"] / plain["bytes"]
    met = faster >= FASTER or memory <= LEANER
    words = "target met" if met else "worse in both" if faster < 1 and memory > 1 else "target not met"
    return f"{faster:.2f} x tokens/s, {memory:.2f} x memory: {words}"


HEAD = "| case | who | settings | tokens/s | MFU | peak GiB |\n| --- | --- | --- | ---: | ---: | ---: |"


def main(argv: list[str] | None = None) -> int:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.single_gpu", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("only", nargs="*", help=f"of {', '.join((*SHAPES, *KINDS))}; default: all")
    parser.add_argument("--rows", type=int, default=1, help="per batch (1)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each settings, in turns ({ROUNDS})")
    parser.add_argument("--out", help="a file for the figures, as JSON")
    args = parser.parse_args(argv)
    here = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    setting = Setting.here()
    shapes = [one for one in SHAPES if one in args.only] or list(SHAPES)
    shapes, seq = (["tiny"], 65) if setting.small else (shapes, 4096)
    setting.until = float("inf")  # each run has a limit of its own
    everything = {}
    if not setting.devices:
        print("no GPU here: small sizes on the CPU, whose figures say nothing of a GPU")
    print(HEAD)
    for shape, kind in itertools.product(shapes, [one for one in KINDS if one in args.only] or KINDS):
        found = everything[f"{shape} {kind}"] = case(setting, shape, kind, args.rows, seq, args.rounds)
        print("\n".join(lines(f"{shape} {kind}, {args.rows} x {seq}", found)), flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps(everything, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())

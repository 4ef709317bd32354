"""Plans for well-known questions, each with its reasons, its memory, the line that runs it, and a dry run beside it.

python -m benchmarks.six_plans                     # docs/reference/six_plans.md; minutes of one core
python -m benchmarks.six_plans --only "8B LoRA"    # questions whose name begins so
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from transformers import DeepseekV3Config, PretrainedConfig

from hf_parallel import plan
from hf_parallel.ask.config import SpecError
from hf_parallel.cli.recipe_file import read_shipped_config
from hf_parallel.hooks.peft.planned_adapters import plan_lora
from hf_parallel.planner.choices import Choice
from hf_parallel.planner.dryrun.run import dry_run, end_ranks
from hf_parallel.planner.memory import GIB

#: What is asked -> the shipped model (None: DeepSeek-V3's own numbers) and the options of `plan`.
QUESTIONS: dict[str, tuple[str | None, dict[str, Any]]] = {
    "8B LoRA on 1 x 24 GB": (
        "llama-3.1-8b",
        {"gpu": "rtx4090-24gb", "gpus": 1, "seq": 2048, "global_batch": 16, "lora": 16},
    ),
    "70B, all weights, on 8 x 80 GB": ("llama-3.1-70b", {"gpus": 8, "seq": 4096, "global_batch": 64}),
    "70B on 4 nodes with 25 Gbit/s": (
        "llama-3.1-70b",
        {"gpus": 32, "network": "ethernet-25g", "seq": 4096, "global_batch": 256},
    ),
    "8B, 128k tokens, on 8 x H100": ("llama-3.1-8b", {"gpus": 8, "seq": 131072, "global_batch": 8}),
    "8B, 1M tokens, on 8 x H100": ("llama-3.1-8b", {"gpus": 8, "seq": 1048576, "global_batch": 1}),
    "30B mixture on 8 x H200": (
        "qwen3-30b-a3b",
        {"gpu": "h200-141gb", "gpus": 8, "seq": 4096, "global_batch": 64},
    ),
    "671B mixture on 256 x H100": (
        None,
        {"gpus": 256, "network": "infiniband-ndr", "seq": 4096, "global_batch": 2048},
    ),
}


def write_answer(question: str, dry: bool) -> Iterator[str]:
    """Yield the lines of one question's answer."""
    name, options = QUESTIONS[question]
    model = DeepseekV3Config() if name is None else read_shipped_config(name)
    adapt = plan_lora(options["lora"]) if "lora" in options else None
    found = plan(model, **options)
    yield f"\n## {question}\n"
    asked = ", ".join(f"{key}={value}" for key, value in options.items())
    yield f"{asked}; {found.looked_at:,} layouts.\n"
    if found.best is None:
        yield f"Nothing fits: {found.advice}"
        return
    best = found.best
    yield (
        f"Run `--num_processes {options['gpus']} --parallel {best.config.to_spec()}` with "
        f"`--per_device_train_batch_size {best.rows} --gradient_accumulation_steps {best.accumulation}`.\n"
    )
    held = best.prediction
    memory = f"{held.allocated_gib:.1f} allocated, {held.reserved_gib:.1f} reserved, {best.free_gib:.1f} free"
    speed = f"{best.step_time_s:,.1f} s per step, {best.prediction.tokens_per_s_per_gpu:,.0f} tokens/s per GPU"
    yield f"{speed}. GiB of the fullest GPU: {memory}; {best.host_gib:,.0f} of a node's host.\n"
    yield from (f"- {who}: {why}" for who, why in found.why_not)
    yield from (f"- {line}" for line in (*best.warnings, *found.notes))
    yield ""
    if dry:
        yield from compare_with_dry_runs(model, best, options["seq"], adapt)


def compare_with_dry_runs(model: PretrainedConfig, best: Choice, seq: int, adapt: Any) -> Iterator[str]:
    """Yield a row for the first and the last pipeline rank: tensors as planned, and as a dry run counts them."""
    planned = {memory.rank: memory.tensors / GIB for memory in best.prediction.breakdown.ranks}
    yield "| rank | planned GiB of tensors | dry run | difference | s |\n| --- | --- | --- | --- | --- |"
    for rank in end_ranks(best.config):
        try:
            ran = dry_run(
                model,
                best.config,
                rank=rank,
                rows=best.rows,
                seq=seq,
                accumulation=min(best.accumulation, 2),  # a third call holds what the second does
                adapt=adapt,
            )
        except SpecError as error:
            yield f"| {rank} | | {error} | | |"
            continue
        expected, counted = planned[ran.place["pp"]], ran.peak_bytes / GIB
        yield f"| {rank} | {expected:.1f} | {counted:.1f} | {expected / counted - 1:+.1%} | {ran.seconds:.0f} |"


def main() -> None:
    """Print the answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="questions whose name begins so")
    parser.add_argument("--no-dry-run", action="store_true", help="plans alone")
    args = parser.parse_args()
    for question in QUESTIONS:
        if question.startswith(args.only):
            for line in write_answer(question, not args.no_dry_run):
                print(line, flush=True)


if __name__ == "__main__":
    main()

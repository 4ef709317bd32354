"""`make demo`: one unchanged Trainer script in one process, then under tp=2,pp=2 on four; the numbers side by side.

The first run is plain Python, without the plugin. The second is the same file and the same arguments behind
`accelerate launch … -m hf_parallel --parallel tp=2,pp=2`. Both see the same batches: tp and pp ranks share theirs, so
four processes are one data rank here. At the end plain transformers loads the folder that the four saved.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPT = "examples/train_language_model.py"
LAUNCH_FILE = "configs/accelerate/cpu_4.yaml"
#: fp32 on both sides: what remains is the order in which sums are taken, carried through all steps of Adam.
TOLERANCE = 1e-3


def main() -> None:
    args = _parse_args()
    os.chdir(REPOSITORY)
    single, parallel = (Path(args.output_dir) / name for name in ("one_process", "four_processes"))
    python = [sys.executable]
    launch = [
        *(sys.executable, "-m", "accelerate.commands.launch", "--config_file", LAUNCH_FILE),
        *("-m", "hf_parallel", "--parallel", args.parallel),
    ]
    seconds_single = run("1. One process, plain Python, no plugin", python, single, args)
    seconds_parallel = run(f"2. The same script, four processes, {args.parallel}", launch, parallel, args)

    title("3. Losses side by side, means over the steps since the line above")
    difference = compare_losses(read_history(single), read_history(parallel))
    print(f"\nlargest difference: {difference:.1e} (runs of {seconds_single:.0f} s and {seconds_parallel:.0f} s)")
    title("4. Parameters that each rank holds")
    show_parameters(parallel)
    title("5. Plain transformers loads the folder that the four processes saved")
    write_sentence(parallel, args.prompt)
    if not difference <= TOLERANCE:  # also catches nan
        sys.exit(f"\nThe losses differ by more than {TOLERANCE:g}: this is a defect, please report it.")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="outputs/demo")
    parser.add_argument("--parallel", default="tp=2,pp=2", help="a layout of four processes with one data rank")
    parser.add_argument("--max_steps", type=int, default=150, help="optimizer steps of each run")
    parser.add_argument("--prompt", default="If the object is")
    return parser.parse_args()


def title(text: str) -> None:
    print(f"\n=== {text} ===", flush=True)


def script_arguments(output: Path, max_steps: int) -> list[str]:
    """What both runs give to the script, word for word but for the folder."""
    return [
        *("--output_dir", str(output), "--max_steps", str(max_steps)),
        *("--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "8"),
        *("--learning_rate", "1e-3", "--lr_scheduler_type", "cosine", "--warmup_steps", "10", "--weight_decay", "0.1"),
        # Adam divides by the root of squares that are nearly 0: a larger epsilon keeps rounding from being magnified.
        # No clipping: on the CPU torch's fp32 norm of a million numbers is itself off by 1e-4, in one process most.
        *("--adam_beta2", "0.95", "--adam_epsilon", "1e-6", "--max_grad_norm", "0"),
        *("--logging_steps", str(max(1, max_steps // 10)), "--save_strategy", "no", "--report_to", "none"),
        *("--use_cpu", "True", "--seed", "42"),
    ]


def run(heading: str, start: list[str], output: Path, args: argparse.Namespace) -> float:
    """Run the script behind `start` with its output on this terminal; returns its seconds."""
    title(heading)
    shutil.rmtree(output, ignore_errors=True)
    words = [*start, SCRIPT, *script_arguments(output, args.max_steps)]
    shown = " ".join(["python", *words[1:]]).replace("python -m accelerate.commands.launch", "accelerate launch")
    print(f"$ {shown}", flush=True)
    # No GPU: the comparison is about fp32 sums. One thread per rank: four of them share the cores.
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    environment.pop("HF_PARALLEL", None)
    if len(start) > 1:
        environment["OMP_NUM_THREADS"] = "1"
    began = time.perf_counter()
    code = subprocess.run(words, env=environment).returncode
    if code:
        sys.exit(f"\nThe run ended with exit code {code}; see its last lines above.")
    return time.perf_counter() - began


def read_history(output: Path) -> list[tuple[str, float, float]]:
    """(what, loss, gradient norm or nan) for every logged step and the evaluation."""
    history = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    rows = [(f"step {row['step']}", row["loss"], row["grad_norm"]) for row in history if "loss" in row]
    return rows + [("evaluation", row["eval_loss"], float("nan")) for row in history if "eval_loss" in row]


def compare_losses(single: list[tuple[str, float, float]], parallel: list[tuple[str, float, float]]) -> float:
    """Print both histories next to each other; returns the largest difference of their losses."""
    print(f"{'':>12}  {'one process':>12}  {'parallel':>12}  {'difference':>10}")
    largest = 0.0
    for (name, left, _), (_, right, _) in zip(single, parallel, strict=True):
        difference = abs(left - right)
        largest = difference if difference != difference else max(largest, difference)
        print(f"{name:>12}  {left:12.6f}  {right:12.6f}  {difference:10.1e}")
    return largest


def show_parameters(output: Path) -> None:
    """Print the counts that the parallel run wrote at its start."""
    report = json.loads((output / "hf_parallel.json").read_text(encoding="utf-8"))
    for rank, count in enumerate(report["parameters_per_rank"]):
        print(f"rank {rank}: {count:>10,}")


def write_sentence(folder: Path, prompt: str) -> None:
    """Load `folder` as anyone would and continue `prompt`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    unexpected = {kind: sorted(keys) for kind, keys in loading.items() if keys and "conversion" not in kind}
    print(f"{model.num_parameters():,} parameters, every tensor found" if not unexpected else f"defect: {unexpected}")
    tokens = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    written = model.generate(**tokens, num_beams=4, no_repeat_ngram_size=2, repetition_penalty=1.3, max_new_tokens=32)
    print(f"\n{tokenizer.decode(written[0], skip_special_tokens=True)}")
    print("\n(A minute of training makes an exact model, not yet a good writer.)")


if __name__ == "__main__":
    main()

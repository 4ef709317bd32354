"""`make demo`: one unchanged Trainer script in one process, then under a layout on two; both losses in one picture.

The first run is plain Python, without the plugin. The second is the same file and the same arguments behind
`hf-parallel launch --num_processes 2 --parallel pp=2`. Both see the same batches: the stages of a pipeline
share them, so two processes are one data rank here. At the end plain transformers loads the folder that the two saved.
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
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPT = "examples/train_language_model.py"
#: fp32 on both sides: what remains is the order in which sums are taken, carried through all steps of Adam.
TOLERANCE = 1e-3
#: Of a parameter in fp32: its value, its gradient and two moments of Adam.
BYTES_PER_PARAMETER = 16


class Run(NamedTuple):
    """What one run has logged: a loss per step, and the parameters that each of its processes holds."""

    losses: list[float]
    parameters: list[int]
    seconds: float

    @property
    def megabytes(self) -> list[float]:
        """Of weights, gradients and optimizer state, per process."""
        return [count * BYTES_PER_PARAMETER / 1e6 for count in self.parameters]


def main() -> None:
    args = _parse_args()
    os.chdir(REPOSITORY)
    folder = Path(args.output_dir)
    launch = ["-m", "hf_parallel.cli", "launch", "--num_processes", "2", "--parallel", args.parallel]
    alone = train("1. One process, plain Python, no plugin", [], folder / "one_process", args)
    spread = train(f"2. The same script, two processes, {args.parallel}", launch, folder / "two_processes", args)

    title("3. What came out")
    difference = max(abs(one - two) for one, two in zip(alone.losses, spread.losses, strict=True))
    last = f"{alone.losses[-1]:.6f} and {spread.losses[-1]:.6f}"
    print(f"losses of {len(alone.losses)} steps: largest difference {difference:.1e}; of the last step {last}")
    sizes = " and ".join(f"{size:.0f} MB" for size in spread.megabytes)
    print(f"weights, gradients and optimizer state: {alone.megabytes[0]:.0f} MB in one process, {sizes} in two")
    load_as_anyone(folder / "two_processes", args.prompt)
    print(f"picture  {draw(alone, spread, args.parallel, folder / 'demo.png')}")
    print("report   ", end="", flush=True)
    from hf_parallel import cli

    cli.main(["report", str(folder / "two_processes")])
    if not difference <= TOLERANCE:  # also catches nan
        sys.exit(f"\nThe losses differ by more than {TOLERANCE:g}: this is a defect, please report it.")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", default="outputs/demo")
    parser.add_argument("--parallel", default="pp=2", help="a layout of two processes with one data rank")
    parser.add_argument("--max_steps", type=int, default=30, help="optimizer steps of each run")
    parser.add_argument("--prompt", default="If the object is")
    return parser.parse_args()


def title(text: str) -> None:
    print(f"\n=== {text} ===", flush=True)


def script_arguments(output: Path, max_steps: int) -> list[str]:
    """What both runs give to the script, word for word but for the folder."""
    return [
        *("--output_dir", str(output), "--max_steps", str(max_steps)),
        *("--per_device_train_batch_size", "4", "--per_device_eval_batch_size", "8"),
        *("--learning_rate", "1e-3", "--lr_scheduler_type", "cosine", "--warmup_steps", "5", "--weight_decay", "0.1"),
        # Adam divides by the root of squares that are nearly 0: a larger epsilon keeps rounding from being magnified.
        # No clipping: on the CPU torch's fp32 norm of a million numbers is itself off by 1e-4, in one process most.
        *("--adam_beta2", "0.95", "--adam_epsilon", "1e-6", "--max_grad_norm", "0"),
        *("--logging_steps", "1", "--save_strategy", "no", "--report_to", "none", "--use_cpu", "True", "--seed", "42"),
    ]


def train(heading: str, launch: list[str], output: Path, args: argparse.Namespace) -> Run:
    """Run the script behind `launch`; its log lines go to a file, its progress bar to this terminal."""
    title(heading)
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    words = [*launch, SCRIPT, *script_arguments(output, args.max_steps)]
    shown = " ".join(["python", *words]).replace("python -m hf_parallel.cli", "hf-parallel")
    print(f"$ {shown}", flush=True)
    # No GPU: the comparison is about fp32 sums. One thread each: more would wait for one another on a busy machine.
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    environment.pop("HF_PARALLEL", None)
    began = time.perf_counter()
    with open(output / "log.txt", "w", encoding="utf-8") as log:
        code = subprocess.run([sys.executable, *words], env=environment, stdout=log).returncode
    if code:
        sys.exit(f"\nThe run ended with exit code {code}; see its last lines above, and {output / 'log.txt'}.")
    return read_run(output, time.perf_counter() - began)


def read_run(output: Path, seconds: float) -> Run:
    """Read the losses that Trainer has logged, and what the layout says about each process, if there is one."""
    history = json.loads((output / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    facts = output / "hf_parallel.json"
    if facts.is_file():
        parameters = json.loads(facts.read_text(encoding="utf-8"))["parameters_per_rank"]
    else:
        parameters = [count_parameters(output)]
    return Run([row["loss"] for row in history if "loss" in row], parameters, seconds)


def count_parameters(folder: Path) -> int:
    """Count the numbers in a saved model."""
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", "pt") as file:
        return sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - no mapping


def load_as_anyone(folder: Path, prompt: str) -> None:
    """Load `folder` by plain transformers and continue `prompt`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    unexpected = {kind: sorted(keys) for kind, keys in loading.items() if keys and "conversion" not in kind}
    found = "every tensor found" if not unexpected else f"defect: {unexpected}"
    tokens = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    written = model.generate(**tokens, num_beams=2, no_repeat_ngram_size=2, max_new_tokens=12)
    print(f"plain transformers loads what two processes saved: {model.num_parameters():,} parameters, {found}")
    print(f"it writes, after {len(prompt.split())} words and seconds of training: {tokenizer.decode(written[0])!r}")


def draw(alone: Run, spread: Run, spec: str, path: Path) -> Path:
    """Draw both curves of losses on top of each other, and the memory of each process."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    steps = range(1, len(alone.losses) + 1)
    left.plot(steps, alone.losses, color="#f2a65a", linewidth=6, label="one process")
    left.plot(steps, spread.losses, color="#1f4e79", linewidth=1.5, label=f"two processes, {spec}")
    left.set(title="Loss", xlabel="step")
    left.legend(frameon=False)
    names = ["one\nprocess", *(f"rank {rank}\n{spec}" for rank in range(len(spread.parameters)))]
    sizes = [*alone.megabytes, *spread.megabytes]
    bars = right.bar(names, sizes, color=["#f2a65a", *("#1f4e79" for _ in spread.parameters)], width=0.6)
    right.bar_label(bars, fmt="%.0f MB")
    right.set(title="Weights, gradients, optimizer state", ylim=(0, 1.15 * max(sizes)))
    right.set_yticks([])
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    figure.savefig(path)
    return path


if __name__ == "__main__":
    main()

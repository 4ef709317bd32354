"""Losses of several runs in one picture, from the states that Trainer saved.

    python -m benchmarks.loss_curves docs/images/pipeline_losses.svg 1f1b=out/1f1b pipedream_2bw=out/2bw …

Each point is the mean of the steps since the one before, as Trainer logs it (`--logging_steps`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from matplotlib.figure import Figure


def read_losses(folder: Path) -> tuple[list[int], list[float]]:
    """Return steps and losses of the longest training that was saved below `folder`."""
    states = [json.loads(file.read_text()) for file in folder.rglob("trainer_state.json")]
    history = max(states, key=lambda state: state["global_step"])["log_history"]
    logged = [(entry["step"], entry["loss"]) for entry in history if "loss" in entry]
    return [step for step, _ in logged], [loss for _, loss in logged]


def draw(path: str, runs: dict[str, Path]) -> None:
    """Draw the losses of named runs."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for number, (name, folder) in enumerate(runs.items()):
        axes.plot(*read_losses(folder), label=name, linestyle=("-", "--", "-.", ":")[number % 4], linewidth=1.6)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


if __name__ == "__main__":
    target, *given = sys.argv[1:]
    draw(target, {name: Path(folder) for name, _, folder in (one.partition("=") for one in given)})

"""Are six layouts' steps as long as planned on this machine, after `hf-parallel check --calibrate`, and in order?

    OMP_NUM_THREADS=1 python -m benchmarks.learned_here           # 3 minutes; on a machine that does nothing else
    OMP_NUM_THREADS=1 python -m benchmarks.learned_here --turns 1 # coarser

Calibrates two processes into a file of its own, predicts a step of a small Llama under six layouts with it, measures
each of them in turns, and prints both: the aim is 15 % for each layout, and no two of unlike times in the wrong order.
Ranks share the machine's cores; the processor's seconds beside the clock's show whether something else ran.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist

from benchmarks.published import spearman
from hf_parallel import parallelize
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.planner.calibration import VARIABLE
from tests import distributed, models

SIX = (
    "dp_shard=2",
    "dp_replicate=2",
    "tp=2",
    "pp=2,pipeline_microbatches=4",
    "cp=2",
    "dp_shard=2,activation_checkpointing=full",
)
SIZES = {
    **{"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "vocab_size": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512},
}
ROWS, SEQ, FIRST, STEPS = 8, 256, 2, 5  # sequences of a step, their tokens; steps before those that count
GOAL = 0.15
MOST_WAITED = 1.2  # the clock's seconds in parts of the busier process's


def calibrate(path: str) -> None:
    """Write the calibration of one and of two processes. Collective."""
    from hf_parallel.check import run as checking

    checking.check(checking.Wanted(calibrate=path))


def measure_steps(spec: str) -> list[tuple[float, float]]:
    """Return the clock's and this process's own seconds of each step."""
    config = ParallelConfig.parse(spec).resolve(2)
    model = parallelize(models.build("llama", **SIZES), spec).train()
    rows = ROWS // config.data_parallel_size
    ids = torch.arange(rows * SEQ).view(rows, SEQ) % SIZES["vocab_size"]
    optimizer = torch.optim.AdamW(model.parameters())
    took = []
    for _ in range(FIRST + STEPS):
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        model(input_ids=ids, labels=ids)["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        own = time.process_time() - used
        dist.barrier()
        took.append((time.perf_counter() - began, own))
    return took[FIRST:]


def predict_steps() -> dict[str, tuple[float, dict[str, float]]]:
    """Return each layout's planned seconds, and of what they are."""
    from hf_parallel.planner.choices import predict_choice
    from hf_parallel.planner.detect import detect
    from hf_parallel.planner.search import make_goal

    found = {}
    for spec in SIX:
        config = ParallelConfig.parse(spec).resolve(2)
        rows = ROWS // config.data_parallel_size
        batch = {"global_batch": None, "rows": rows, "accumulation": 1, "whole_logits": False}
        goal = make_goal(model=models.llama(**SIZES), cluster=detect(2), seq=SEQ, precision="fp32", **batch)
        choice = predict_choice(goal, config, rows // (config.pipeline_microbatches or 1))
        found[spec] = (choice.step_time_s, choice.prediction.breakdown.time)
    return found


@dataclasses.dataclass(frozen=True)
class Compared:
    """Seconds of a layout's step: planned, of what kinds, measured by the clock and by the busier process."""

    planned: float
    kinds: dict[str, float]
    clock: float
    own: float

    @property
    def error(self) -> float:
        """How much longer the step was planned than it took, in parts of what it took."""
        return self.planned / self.clock - 1


def compare_layouts(turns: int, path: str | None = None) -> dict[str, Compared]:
    """Return each layout's planned and measured step; a calibration at `path` is used, or one made that is dropped."""
    with tempfile.TemporaryDirectory() as folder:
        own = path or os.path.join(folder, "calibration.json")
        if path is None:
            distributed.run(calibrate, 2, own, timeout=600)
        took: dict[str, list[tuple[float, float]]] = {spec: [] for spec in SIX}
        for _ in range(turns):  # in turns: what slows the machine for a while slows all
            for spec in SIX:
                ranks = distributed.run(measure_steps, 2, spec, timeout=600)
                took[spec] += [tuple(map(max, zip(*step, strict=True))) for step in zip(*ranks, strict=True)]
        former = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = own
        try:
            planned = predict_steps()
        finally:
            os.environ.pop(VARIABLE)
            os.environ.update({} if former is None else {VARIABLE: former})
    medians = {spec: [statistics.median(times) for times in zip(*took[spec], strict=True)] for spec in SIX}
    return {spec: Compared(*planned[spec], *medians[spec]) for spec in SIX}


def is_disturbed(found: dict[str, Compared]) -> bool:
    """Did ranks wait for cores? Those of data parallelism wait for hardly anything else."""
    return any(own.clock > MOST_WAITED * own.own for spec, own in found.items() if spec.startswith("dp"))


def list_misplaced(found: dict[str, Compared]) -> list[tuple[str, str]]:
    """Return pairs of layouts whose steps differ by more than the goal and are planned the other way round."""
    pairs = itertools.permutations(found, 2)
    return [
        (fast, slow)
        for fast, slow in pairs
        if found[fast].clock * (1 + GOAL) < found[slow].clock and found[fast].planned > found[slow].planned
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2, help="times that each layout is measured (2)")
    parser.add_argument("--calibration", help="a file that is there already")
    args = parser.parse_args()
    found = compare_layouts(args.turns, args.calibration)
    print("| layout | planned ms | measured ms | processor's ms | off | of it |\n" + "| --- " * 6 + "|")
    for spec, own in found.items():
        parts = ", ".join(f"{kind} {part * 1e3:.0f}" for kind, part in own.kinds.items() if part > own.planned / 50)
        figures = f"{own.planned * 1e3:.0f} | {own.clock * 1e3:.0f} | {own.own * 1e3:.0f} | {own.error:+.1%}"
        print(f"| {spec} | {figures} | {parts} |")
    order = spearman([own.planned for own in found.values()], [own.clock for own in found.values()])
    within = sum(abs(own.error) <= GOAL for own in found.values())
    print(f"\n{within} of {len(SIX)} within {GOAL:.0%}; rank correlation {order:.2f}", end="; ")
    print(f"in the wrong order: {list_misplaced(found) or 'none'}")
    if is_disturbed(found):
        print("Something else ran: ranks waited for cores.")


if __name__ == "__main__":
    main()

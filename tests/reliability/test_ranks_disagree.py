"""Ranks that would go different ways after an evaluation, or a callback: one word holds, or it is said who waits."""

import os
import time

import pytest
from transformers import AutoModelForCausalLM, EarlyStoppingCallback, TrainerCallback

from tests.distributed import RankFailure, run
from tests.rows import data
from tests.training import activate, arguments_of, axes, trainer_of

pytestmark = pytest.mark.clock


def quick() -> None:
    """Less patience than a cluster needs."""
    from hf_parallel.ranks import desync

    desync.LOOK_S, desync.STILL_S, desync.DEADLOCK_S = 0.2, 0.5, 2.0


def train(spec: str, folder: str, out: str, callback, score=None) -> tuple[int, list]:
    """Steps made, and the scores that callbacks saw."""
    quick()
    ranks = activate(spec)
    settings = {"max_steps": 6, **({"eval_strategy": "steps", "eval_steps": 1} if score else {})}
    arguments = arguments_of(out, ranks, metric_for_best_model="score", greater_is_better=True, **settings)
    options = {"train_dataset": data("llama", 60, 1), "eval_dataset": data("llama", 5, 2) if score else None}
    model = AutoModelForCausalLM.from_pretrained(folder)
    trainer, _ = trainer_of(
        model, out, settings=arguments, callbacks=[callback()], compute_metrics=score and score(), **options
    )
    trainer.train()
    return trainer.state.global_step, [log["eval_score"] for log in trainer.state.log_history if "eval_score" in log]


def score():
    """A metric that gets worse on rank 0 and better on the others."""
    calls, sign = [], -1 if os.environ["RANK"] == "0" else 1
    return lambda predictions: calls.append(0) or {"score": float(sign * len(calls))}


@pytest.mark.parametrize("spec", ["tp=2,dp_shard=2", "pp=2", "dp_shard=2"])
def test_metrics_that_differ_by_rank(runs, tmp_path, capfd, spec):
    world = axes(spec)["world"]
    out = run(
        train, world, spec, runs.initial("llama"), str(tmp_path), lambda: EarlyStoppingCallback(1), score, init=False
    )
    assert out[0] == (2, [-1.0, -2.0])  # rank 0's second score is worse: all stop after the second step
    assert {steps for steps, _ in out} == {2}
    assert capfd.readouterr().err.count("eval_score differs between ranks; rank 0's holds for all") == 1


class Reads(TrainerCallback):
    """Rank 0 alone reduces sharded parameters."""

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if os.environ["RANK"] == "0" and state.global_step == 2:
            sum(parameter.detach().norm() for parameter in model.parameters())


def test_a_callback_of_one_rank_is_named(runs, tmp_path, capfd):
    start = time.monotonic()
    with pytest.raises(RankFailure):
        run(train, 4, "tp=2,dp_shard=2", runs.initial("llama"), str(tmp_path), Reads, init=False, timeout=100)
    said = capfd.readouterr().err
    assert "all ranks stand still" in said or "all ranks wait for each other" in said or "was called on rank 0" in said
    assert time.monotonic() - start < 60

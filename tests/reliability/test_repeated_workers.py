"""Workers of data loaders, forked beside the threads of the monitor, 200 times over: no repetition may stand still.

Once in 31 runs such an evaluation did. A plain run makes none of these; `--all` makes all.
"""

import math

import pytest

from tests import models
from tests.distributed import run
from tests.rows import Rows
from tests.training import activate, trainer_of

PARTS, EACH = 20, 10
#: Of one repetition, which takes three seconds on a free machine.
LIMIT_S = 100.0


def summed(seen) -> dict[str, float]:
    """A metric of logits, labels and inputs."""
    return {"tokens": float(seen.inputs.sum()), "labels": float((seen.label_ids != -100).sum())}


def evaluated(spec: str, out: str) -> list[float]:
    """Two evaluations of two sets each, in four steps; loaders of training and evaluation have two workers each."""
    data_ranks = activate(spec)
    settings = {
        **{"max_steps": 4, "num_train_epochs": 2, "eval_strategy": "steps", "eval_steps": 2},
        **{"dataloader_num_workers": 2, "eval_accumulation_steps": 1, "include_for_metrics": ["inputs", "loss"]},
    }
    sets = {"train_dataset": Rows(22, 11), "eval_dataset": {"a": Rows(13, 12), "b": Rows(5, 13)}}
    trainer, _ = trainer_of(models.build("llama"), out, data_ranks, settings, compute_metrics=summed, **sets)
    trainer.train()
    return [
        log[key]
        for log in trainer.state.log_history
        for key in ("eval_a_loss", "eval_b_loss", "eval_a_tokens")
        if key in log
    ]


@pytest.mark.timeout(EACH * LIMIT_S)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("spec", ["pp=2"])
def test_no_repetition_stands_still(tmp_path, spec, part):
    found = [run(evaluated, 2, spec, str(tmp_path), init=False, timeout=LIMIT_S) for _ in range(EACH)]
    first = found[0][0]
    assert len(first) == 6
    assert all(math.isfinite(number) for number in first)
    for ranks in found:
        assert ranks == [pytest.approx(first, rel=1e-6)] * 2

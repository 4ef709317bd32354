"""`use_liger_kernel=True` under layouts: numbers of one process without it."""

import contextlib
import os
from functools import partial

import pytest
import torch

from tests import liger, models, training
from tests.distributed import RankFailure, run, run_alone
from tests.loops import losses, rows
from tests.training import Script, Tolerance, axes, differences, none, spec_id

LIGER = Script(model="qwen3", arguments=(("use_liger_kernel", True),))
#: With its own loss, in one with the head.
FUSED = ("dp_shard=2", "dp_replicate=2", "dp_shard=2,pp=2", "pp=2")
OTHER = ("tp=2", "tp=2,sequence_parallel=false", "tp=2,pp=2", "dp_shard=2,tp=2", "cp=2", "tp=4")


def with_stand_ins(spec: str, script: Script, initial: str, out: str) -> tuple[object, int]:
    """One rank's training, and in how many calls head and loss were one kernel."""
    with liger.stand_ins():
        return training.train_rank(spec, script, initial, out), len(liger.fused_calls)


@pytest.mark.parametrize("spec", [*FUSED, *OTHER], ids=spec_id)
def test_numbers_of_one_process_without_it(runs, spec):
    """Weight gradients of norms are sums over parts of the sequence; queries and keys have norms of their own."""
    call = partial(with_stand_ins, f"{spec},lean_loss=false", LIGER, runs.initial(LIGER.model), runs._folder())
    ranks = run(call, axes(spec)["world"], init=False, timeout=90)
    reference = runs.reference(Script(model=LIGER.model))
    none(differences([outcome for outcome, _ in ranks], reference, Tolerance()))
    assert any(calls for _, calls in ranks) == (spec in FUSED)

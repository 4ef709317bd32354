"""Accumulation over runs of a pipeline's schedule: what data ranks reduce, and the gradients of one process."""

import contextlib

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests import models
from tests.counting import CountCollectives
from tests.distributed import run

#: Rows of a data rank's micro-steps, and their losses' weights; a single row cannot be cut, and runs unscheduled.
STEPS = ((4, 0.5), (1, 0.3), (2, 0.2))
SIZES = {"num_hidden_layers": 7, "vocab_size": 515}


def batches(data_rank):
    generator = torch.Generator().manual_seed(7 + data_rank)
    return [(torch.randint(0, 515, (rows, 33), generator=generator), weight) for rows, weight in STEPS]


def whole(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def expected(tied):
    """Gradients of one process that sees the rows of both data ranks."""
    model = models.build("llama", tie_word_embeddings=tied, **SIZES)
    for data_rank in range(2):
        for tokens, weight in batches(data_rank):
            (model(input_ids=tokens, labels=tokens).loss * weight / 2).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def accumulated(specs):
    """Per spec: what a second step reduced, in whole models of this rank, and the largest error of a gradient."""
    import hf_parallel
    from hf_parallel.axes.data.gradients import run_before_the_last

    found = []
    for spec, tied in specs:
        model = hf_parallel.parallelize(models.build("llama", tie_word_embeddings=tied, **SIZES), spec)
        state = model._hf_parallel
        size = 4 * sum(parameter.numel() for parameter in model.parameters())
        for _ in range(2):
            model.zero_grad()
            with CountCollectives() as counted:
                for i, (tokens, weight) in enumerate(batches(state.mesh.data_rank)):
                    more = i < len(STEPS) - 1
                    with run_before_the_last(state.root, state.config) if more else contextlib.nullcontext():
                        (model(input_ids=tokens, labels=tokens).loss * weight).backward()
        known = expected(tied)
        errors = [
            float((whole(p.grad) - known[name]).abs().max() / known[name].abs().max())
            for name, p in model.named_parameters()
        ]
        kind = "reduce" if spec.endswith("=0") else "scatter"
        found.append((counted.whole[kind] / size, max(errors)))
    return found


CASES = (
    ("pp=2,dp_shard=2,zero_stage=0", False, 1),
    ("pp=2,dp_shard=2,zero_stage=1", False, 1),
    ("pp=2,dp_shard=2,zero_stage=1", True, 1),
    ("pp=2,dp_shard=2,zero_stage=2", False, len(STEPS)),
    ("pp=2,dp_shard=2,zero_stage=2,gradient_reduction=step", False, 1),
    ("pp=2,dp_shard=2,zero_stage=1,pipeline_schedule=zbv_zero_bubble", False, 1),
)


def test_gradients_are_reduced_once_per_step():
    """At stages 0 and 1, and where that is asked for; at stage 2 in each run, which holds less."""
    for rank in run(accumulated, 4, [(spec, tied) for spec, tied, _ in CASES]):
        for (spec, tied, times), (reduced, error) in zip(CASES, rank, strict=True):
            assert reduced == pytest.approx(times, rel=0.25 if tied else 0.04), (spec, tied)  # uneven sizes are padded
            assert error < 1e-5, (spec, tied)  # fp32, summed in another order

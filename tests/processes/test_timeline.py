"""Torch runs the order of the timeline; the recorder puts ranks on one clock."""

import time

import pytest
import torch
import torch.distributed as dist

from benchmarks import pipeline as benchmark
from hf_parallel.axes.pipeline.timeline import (
    SIMPLEST_FIRST,
    count_virtual_stages,
    flatten_overlaps,
    order,
)
from hf_parallel.axes.pipeline.torch_stage import Recorder
from tests.distributed import run
from tests.unit.test_timeline import shapes


@pytest.mark.parametrize("name", SIMPLEST_FIRST)
def test_torch_really_runs_this_order(name):
    """Under its own runtime, of a model whose layers do nothing."""
    timeline = run(benchmark.measure, 2, name, benchmark.Setting(ranks=2, micro_batches=6, seconds=0.0, steps=1))[0]
    for rank, actions in order(name, 2, count_virtual_stages(name), 6).items():
        ran = [span[1:4] for span in timeline.spans if span.rank == rank and span.kind != "communication"]
        assert ran == [a[:3] for a in flatten_overlaps(actions)]


def record(kinds, path):
    recorder, group = Recorder(torch.device("cpu")), dist.group.WORLD
    clock, hosts = time.perf_counter, 1000.0 * group.rank()
    time.perf_counter = lambda: hosts + clock()  # each host counts from its own start
    with recorder.span("forward", 9, 9):
        pass
    recorder.start(group)
    for i, kind in enumerate(kinds):
        with recorder.span(kind, group.rank(), i):
            time.sleep(0.05)
    timeline = recorder.draw(group, f"{path}.{group.rank()}", "measured")
    return timeline.spans, timeline.ranks, timeline.duration, recorder.active


def test_recorder_puts_ranks_on_one_clock(tmp_path):
    results = run(record, 2, ["forward", "backward"], str(tmp_path / "step.svg"))
    spans, ranks, duration, active = results[0]
    assert spans == results[1][0]
    assert [span[:4] for span in spans] == [
        (r, k, r, i) for r in (0, 1) for i, k in enumerate(("forward", "backward"))
    ]
    assert ranks == 2
    assert 0.1 <= duration < 100
    assert not active
    assert [path.name for path in tmp_path.iterdir()] == ["step.svg.0"]
    assert len(shapes((tmp_path / "step.svg.0").read_text(), "box")) == 4

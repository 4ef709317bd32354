"""What a profiled step's time goes to, from traces as torch.profiler writes them; sets of moments."""

import gzip
import json

import pytest

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.monitor import profile, trace
from hf_parallel.monitor.meter import intersect_intervals, sum_lengths, unite_intervals, without
from hf_parallel.monitor.trace import Wait

BEGIN = 1_795_358_309_000_000_000  # ns
BASE = 1_790_857_026_000_000_000


def box(cat, name, begin, end, tid=1, **args):
    """An event of torch's trace; begin and end in microseconds of the step."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 7, "tid": tid, "ts": begin + (BEGIN - BASE) / 1000,
            "dur": end - begin, "args": {"External id": 3, **args}}  # fmt: skip


def traced(*events):
    names = [{"ph": "M", "name": "thread_name", "pid": 7, "tid": 1, "args": {"name": "thread 1 (python)"}}]
    return {"baseTimeNanoseconds": BASE, "traceEvents": [*names, *events, {"ph": "s", "cat": "fwdbwd"}]}


def wait(axis, begin, end):
    return Wait(axis, BEGIN + 1000 * begin, BEGIN + 1000 * end)


WINDOW = BEGIN, BEGIN + 10_000_000  # 10 ms


def test_sets_of_moments():
    some = unite_intervals([(5, 6), (0, 2), (1, 3)])
    assert some == [(0, 3), (5, 6)]
    assert unite_intervals(some, gap=2) == [(0, 6)]
    assert intersect_intervals(some, [(2, 5.5)]) == [(2, 3), (5, 5.5)]
    assert without(some, [(1, 2), (5, 9)]) == [(0, 1), (2, 3)]
    assert without(some, []) == some
    assert sum_lengths(some) == 4


def test_of_a_cpu():
    """A node of autograd covers a wait inside of it; a message under way while operators run is hidden."""
    part = trace.make_part_of(
        traced(
            box("cpu_op", "autograd::engine::evaluate_function: X", 0, 4000),
            box("cpu_op", "aten::mm", 4100, 5000),  # 100 us of the host in between
            box("cpu_op", "c10d::allreduce_", 1000, 1050),
            box("user_annotation", "gloo:all_reduce", 1010, 2990, tid=9),
            box("user_annotation", "gloo:send", 4010, 4910, tid=9),
            box("cpu_op", "aten::mm", 12_000, 13_000),  # after the step
        ),
        WINDOW,
        [
            wait("tp", 1000, 3000),
            wait("pp", 4000, 4060),
            wait("dp_shard", 6000, 7000),
            wait("dp_replicate", 7000, 7500),
        ],
        {},
        most=3,
    )
    assert part.exposed == {"dp": [(6000, 7500)], "pp": [(4000, 4060)], "tp": [(1000, 3000)]}
    assert part.busy == [(0, 1000), (3000, 4000), (4060, 5000)]
    assert sum_lengths(part.hidden["pp"]) == pytest.approx(850, abs=1)
    assert sum_lengths(part.hidden["tp"]) == 0
    assert part.idle == pytest.approx(10_000 - 6500)
    assert [event.name for event in part.events] == [
        "autograd::engine::evaluate_function: X",
        "gloo:all_reduce",
        "aten::mm",
    ]
    assert part.left_out == 3


def test_of_a_gpu():
    """Kernels of collectives are exposed where no other kernel runs."""
    nccl = {"Process Group Name": "5", "Collective name": "all_reduce"}
    part = trace.make_part_of(
        traced(
            box("cpu_op", "aten::mm", 0, 9000),
            box("kernel", "gemm", 1000, 3000, tid=7),
            box("gpu_memcpy", "Memcpy HtoD", 3000, 3500, tid=7),
            box("kernel", "ncclDevKernel_AllReduce_Sum", 2000, 5000, tid=20, **nccl),
            box("kernel", "ncclDevKernel_AllGather", 6000, 6500, tid=21),
        ),
        WINDOW,
        [],
        {"5": "tp"},
        most=100,
    )
    assert part.busy == [(1000, 3500)]
    assert part.exposed == {"all": [(6000, 6500)], "tp": [(3500, 5000)]}
    assert part.hidden["tp"] == [(2000, 3500)]
    assert part.idle == 10_000 - 2500 - 2000
    told = next(event.args for event in part.events if "AllReduce" in event.name)
    assert told == {"axis": "tp", "Collective name": "all_reduce"}


def test_one_trace_of_all_ranks(tmp_path):
    events = [box("cpu_op", "aten::<mm>", 10 * i, 10 * i + 5) for i in range(50)]
    parts = [trace.make_part_of(traced(*events), WINDOW, [wait("tp", 600, 700)], {}, most=20) for _ in range(3)]
    path = tmp_path / "profile.json.gz"
    trace.write_trace(str(path), parts, {"step": 5})
    with gzip.open(path, "rt") as file:
        merged = json.load(file)
    boxes = [event for event in merged["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in boxes} == {0, 1, 2}
    assert len([event for event in boxes if event["name"] == "aten::<mm>"]) == 3 * 20
    assert merged["otherData"] == {
        "step": 5,
        "shorter events left out": {"rank 0": 30, "rank 1": 30, "rank 2": 30},
    }
    lanes = {event["args"]["name"] for event in merged["traceEvents"] if event["name"] == "thread_name"}
    assert {"compute", "tp, exposed", "thread 1 (python)"} <= lanes


def test_a_picture_stays_small():
    """10,000 boxes of each of 100 ranks."""
    busy = [(10.0 * i, 10.0 * i + 3) for i in range(10_000)]
    waits = [(end, end + 2) for _, end in busy]
    part = trace.Part(100_000.0, busy, {"tp": waits}, {"tp": []}, [], "rank <0>")
    picture = profile.render_profile([part] * 100, "step 5 of tp=2")
    assert len(picture) < 1_000_000
    assert "ranks 0 to 63 of 100" in picture
    assert "compute 30%, tp 20%, idle 50%" in picture
    assert "rank &lt;0&gt;" in picture
    assert "pale: behind compute" not in picture


def test_an_empty_step_is_drawn():
    assert "idle 100%" in profile.render_profile([trace.Part(5.0)], "step 1")


def test_steps_count_from_one():
    assert ParallelConfig.parse("tp=2,profile_steps=[3]").profile_steps == (3,)
    with pytest.raises(SpecError, match=r"profile_steps=\[5,6\] works"):
        ParallelConfig.parse("tp=2,profile_steps=[0,1]")

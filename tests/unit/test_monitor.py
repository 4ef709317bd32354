"""What a step's time goes to, who is slow, and how far a run is from its plan: arithmetic, no processes."""

import dataclasses
import json
import threading

import pytest
import torch
from torch._C._distributed_c10d import ProcessGroup, Work

from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.monitor import expected, meter, session
from hf_parallel.monitor import expected as calibrate
from hf_parallel.monitor.meter import (
    COMPUTE,
    DATA,
    GIB,
    REST,
    Meter,
    RankRow,
    compute_figures,
    compute_mfu,
    make_own_row,
    round_to_significant,
)
from hf_parallel.monitor.session import Stragglers
from hf_parallel.monitor.waits import DeviceClock, HostClock
from hf_parallel.planner.groups import Group, MixedCluster
from hf_parallel.planner.hardware import find_link, make_cluster
from hf_parallel.planner.shape import shape_of
from tests.refusals import pattern_of_refusal

CPU = torch.device("cpu")
NUMBERS = {"layers": 3, "hidden": 96, "heads": 6, "kv_heads": 3, "ffn_hidden": 160, "vocab": 515}
ROW = RankRow(
    steps=5,
    step=1.0,
    data=0.05,
    compute=0.5,
    rest=0.05,
    tp=0.2,
    dp=0.1,
    cp=0.0,
    ep=0.0,
    pp=0.1,
    all=0.0,
    tokens=33 * 11,
    rows=11,
    calls=1,
    memory_peak=3 * GIB,
    memory_reserved=4 * GIB,
)


class Stream:
    """A device's clock of which a test says how far it is."""

    def __init__(self):
        self.now, self.done, self.released = 0.0, 0.0, 0

    def begin(self):
        pass

    def is_here(self, axis):
        return True

    def mark(self):
        return self.now

    def is_past(self, mark):
        return mark <= self.done

    def seconds(self, begin, end):
        return end - begin

    def release(self, *marks):
        self.released += len(marks)


@pytest.fixture
def metered(monkeypatch):
    monkeypatch.setattr(meter, "HostClock", Stream)
    made = Meter({}, CPU, full=True)
    yield made, made.clock
    made.stop()


def one_step(made, clock, wait=0.0):
    """2 s of data, 3 s + `wait` of compute, 1 s of the rest."""
    made.begin("trainer")
    with made.phase(DATA):
        clock.now += 1
        with made.phase(COMPUTE):  # inside of another phase it is of that
            clock.now += 1
    with made.phase(COMPUTE):
        clock.now += 3
        made.waits.note("tp", clock.now, clock.now + wait)
        clock.now += wait
    made.count(33 * 11, 11)
    clock.now += 1
    made.end("trainer")


@pytest.mark.clock
def test_parts_of_steps(metered):
    made, clock = metered
    for wait in (4, 6):
        one_step(made, clock, wait)
    made.begin("trainer")  # never ended: an epoch without a batch more
    clock.now += 100
    clock.done = clock.now
    window = made.take()
    assert (window.steps, window.tokens, window.rows) == (2, 2 * 363, 22)
    assert [window.own(part) for part in (DATA, COMPUTE, REST)] == [4, 6, 2]
    assert window.waits() == {"tp": 10}
    assert window.step_seconds == window.looked_seconds == 22


def test_one_of_four_steps_is_looked_into(monkeypatch):
    """The time of all counts; what it goes to is that of those."""
    monkeypatch.setattr(meter, "HostClock", Stream)
    made = Meter({}, CPU, full=False)
    for _ in range(6):
        one_step(made, made.clock)
    made.stop()
    made.clock.done = made.clock.now
    window = made.take()
    assert (window.steps, window.step_seconds, window.looked, window.looked_seconds) == (6, 36, 2, 12)
    assert [window.own(part) for part in (DATA, COMPUTE, REST)] == [4, 6, 2]


def test_a_device_is_not_waited_for(metered):
    """Steps that it is not past are read the next time, and their marks are free only then."""
    made, clock = metered
    one_step(made, clock)
    clock.done = clock.now
    one_step(made, clock)
    window = made.take()
    assert window.steps == 1
    made.give_back(window)  # another rank is not past it
    assert made.take() is window
    released, clock.done = clock.released, clock.now
    assert made.take().steps == 1
    assert clock.released == 2 * released > 0


def test_marks_of_a_device(monkeypatch):
    """Events are recorded in the stream of the step, used again, and only waits of that stream count."""
    streams, made = ["main"], []

    class Event:
        def __init__(self, **settings):
            made.append(settings)

        def record(self, stream):
            self.stream = stream

        def query(self):
            return True

        def elapsed_time(self, end):
            return 1500.0

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: streams[-1])
    clock = DeviceClock(torch.device("cuda"))
    clock.begin()
    one, two = clock.mark(), clock.mark()
    assert (one.stream, clock.is_past(two), clock.seconds(one, two)) == ("main", True, 1.5)
    clock.release(one, two)
    clock.mark()
    assert len(made) == 2
    assert all(settings["enable_timing"] for settings in made)
    assert clock.is_here("tp")
    streams.append("all-gather")
    assert not clock.is_here("dp")  # FSDP2's own stream: the wait for it counts


def test_streams_wait_for_those_of_data_ranks(metered):
    """FSDP2's waits count, by who calls; others, such as those of offloading, do not."""
    made, clock = metered

    def pause(stream, event):
        clock.now += 3

    made.begin("trainer")
    wait = made.waits._wait_event(pause)
    for place in ("torch/distributed/fsdp/_fully_shard/x.py", "torch/utils/x.py"):
        exec(compile("wait('stream', 'event')", f"/site/{place}", "exec"), {"wait": wait})
    made.end("trainer")
    clock.done = clock.now
    assert made.take().waits() == {"dp": 3}


def test_threads_beside_the_training_are_not_counted():
    clock, here = HostClock(), []
    clock.begin()
    thread = threading.Thread(target=lambda: here.append(clock.is_here("all")))
    thread.start()
    thread.join()
    assert (here, clock.is_here("all")) == ([False], True)


def test_a_loop_does_not_end_a_trainers_step(metered):
    made, clock = metered
    made.begin("trainer")
    made.end("loop")
    assert made.owner == "trainer"


def test_nothing_is_left_in_torch():
    before = ProcessGroup.allreduce, Work.wait, set(vars(ProcessGroup))
    made = Meter({}, CPU, full=False)
    assert ProcessGroup.allreduce is not before[0]
    made.stop()
    assert (ProcessGroup.allreduce, Work.wait, set(vars(ProcessGroup))) == before


def test_figures_of_ranks():
    """tp=2 over two data ranks; the second one waits longer and holds more."""
    other = dataclasses.replace(ROW, step=1.1, compute=0.4, tp=0.4, memory_peak=5 * GIB)
    found = compute_figures([ROW, ROW, other, other], 2, {"tp": 2, "dp_shard": 2}, full=True)
    assert found["perf/step_time_s"] == 1.1
    assert found["perf/tokens_per_second"] == round_to_significant(2 * 363 / 1.1)
    assert found["perf/tokens_per_second_per_device"] == round_to_significant(2 * 363 / 1.1 / 4)
    assert found["perf/samples_per_second"] == 20
    assert found["perf/memory_peak_gib"] == 5
    shares = ("compute", "communication", "bubble", "data_wait", "other")
    assert sum(found[f"perf/{name}_share"] for name in shares) == pytest.approx(1, abs=1e-3)
    axes = {key.rpartition("_")[2]: value for key, value in found.items() if "communication_share_" in key}
    assert axes.keys() == {"tp", "dp"}  # those that are on
    assert sum(axes.values()) == pytest.approx(found["perf/communication_share"], abs=1e-3)
    assert "perf/tokens_per_second" not in compute_figures([dataclasses.replace(ROW, tokens=0)], 1, {}, full=False)


def test_a_row_of_a_mean_step(metered):
    made, clock = metered
    for _ in range(4):
        one_step(made, clock, 2)
    clock.done = clock.now
    row = make_own_row(made.take(), CPU)
    assert (row.step, row.data, row.compute, row.rest, row.tp, row.looked) == (8, 2, 3, 1, 2, 8)
    assert row.memory_peak > row.memory_reserved / 2 > 0


def test_mfu_by_hand():
    """Llama of 3 layers, hidden 96, 6 heads of 16, 3 of keys and values, 160 inside, 515 words, rows of 33 tokens."""
    projections = 96 * 96 * 2 + 96 * 48 * 2 + 3 * 96 * 160
    attention = 2 * 2 * 33 * 96  # scores and their sums, each 2 FLOPs per key and channel, without a mask
    forward = 3 * (2 * projections + attention) + 2 * 96 * 515
    flops = 3 * shape_of(NUMBERS).forward_flops(33, full_attention=True)
    assert flops == 3 * forward
    assert compute_mfu(1000, flops, 1e12) == pytest.approx(1000 * 3 * forward / 1e12)


# ---- stragglers -----------------------------------------------------------------------------------------------------


def slowed(rank, ranks=4, **seconds):
    rows = [ROW] * ranks
    rows[rank] = dataclasses.replace(ROW, **{name: getattr(ROW, name) + more for name, more in seconds.items()})
    return rows


def test_a_slow_rank_is_named_once_when_two_looks_agree():
    looks = Stragglers([0, 0, 0, 0])
    assert looks.look(slowed(2, compute=0.6)) is None
    named = looks.look(slowed(2, compute=0.6))
    assert (named.rank, named.kind) == (2, "compute")
    assert "rank 2 (node7) is slow at computing" in named.sentence("node7")
    assert "batch_shares=auto" in named.sentence("node7", shares_evenly=True)
    assert "batch_shares" not in dataclasses.replace(named, kind="data").sentence("node7", shares_evenly=True)
    assert looks.look(slowed(2, compute=0.6)) is None  # it has been said
    assert looks.look([ROW] * 4) is None
    assert [looks.look(slowed(1, data=0.4)) is not None for _ in range(3)] == [False, True, False]


def test_a_rank_that_is_late_once_hides_no_slow_one():
    looks, slow = Stragglers([0, 0, 0, 0]), slowed(2, compute=0.6)
    once = [*slow[:3], slowed(3, rest=2.0)[3]]
    assert [named and named.rank for named in map(looks.look, (slow, once, slow, once))] == [None, 2, None, None]


@pytest.mark.parametrize(
    ("rows", "stages"),
    [
        (slowed(1, compute=0.15), [0, 0, 0, 0]),  # 15 % of a step
        (slowed(3, compute=0.4), [0, 1, 2, 3]),  # a stage of its own with more layers
        ([dataclasses.replace(row, step=0.01, **{k: getattr(row, k) / 100 for k in ("data", "compute", "rest", "tp")})
          for row in slowed(1, compute=0.4)], [0, 0, 0, 0]),  # 4 ms
        ([ROW, dataclasses.replace(ROW, compute=1.1, rows=24), ROW, ROW], [0, 0, 0, 0]),  # as many seconds per example
    ],
)  # fmt: skip
def test_what_is_not_clear_is_not_said(rows, stages):
    looks = Stragglers(stages)
    assert [looks.look(rows) for _ in range(3)] == [None] * 3


def test_alone_in_its_stage_a_rank_is_slow_at_twice_the_others_time():
    looks = Stragglers([0, 1, 2, 3])
    assert [looks.look(slowed(3, compute=0.9)) for _ in range(2)][1].rank == 3


# ---- the plan -------------------------------------------------------------------------------------------------------

CONFIG = ParallelConfig.parse("tp=2,pp=2,dp_shard=2")
SHAPE = shape_of({"layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 4, "ffn_hidden": 4096, "vocab": 32000})
BATCH = expected.Batch(rows=8, calls=2, seq=1024)


def planned(cluster=None):
    return expected.expect(SHAPE, CONFIG, cluster or make_cluster("h100-80gb", 8), BATCH)


def as_planned(prediction, tensors=1.0, **factors):
    """What ranks measure that do as planned, but for some terms."""
    seconds = expected.sum_by_term(prediction.breakdown.time)
    seconds = {name: value * factors.get(name, 1.0) for name, value in seconds.items()}
    parts = {"compute": "compute", "communication": "tp", "bubble": "pp", "other": "rest"}
    zero = dict.fromkeys(("data", "dp", "all"), 0.0)
    peak = prediction.allocated_gib * GIB * tensors
    own = {part: seconds[name] for name, part in parts.items()}
    return [dataclasses.replace(ROW, step=sum(seconds.values()), memory_peak=peak, **zero, **own)] * 8


def test_the_terms_are_the_step():
    prediction = planned()
    assert sum(expected.sum_by_term(prediction.breakdown.time).values()) == pytest.approx(prediction.step_time_s)
    assert expected.list_deviations(prediction, as_planned(prediction)) == []


@pytest.mark.parametrize(("way", "taken"), [("ulysses", "ulysses"), ("hybrid:2", "hybrid:2"), ("auto", "allgather")])
def test_the_plan_attends_as_the_layout_does(way, taken):
    config = ParallelConfig.parse(f"cp=4,dp_shard=2,context_parallel={way}")
    batch = dataclasses.replace(BATCH, rows=1, seq=256)
    assert expected.expect(SHAPE, config, make_cluster("h100-80gb", 8), batch).layout.context == taken


@pytest.mark.parametrize("term", ["compute", "communication"])
def test_the_term_that_is_off_is_named(term):
    lines = expected.list_deviations(planned(), as_planned(planned(), **{term: 4.0}))
    assert len(lines) == 1
    assert f"difference is {term}" in lines[0]


def test_memory_that_is_off_is_named():
    lines = expected.list_deviations(planned(), as_planned(planned(), tensors=3.0))
    assert ["GiB (+200%)" in line for line in lines] == [True]


def test_workspaces_of_a_tiny_model_are_no_deviation():
    """Three times a tiny plan is 0.2 GiB of cuBLAS, which no plan counts."""
    plan = planned()
    for uncounted, said in ((0.4, 0), (0.6, 1)):
        rows = as_planned(plan, tensors=1 + uncounted / plan.allocated_gib)
        assert len(expected.list_deviations(plan, rows)) == said


MIXED = MixedCluster(
    (Group("new", make_cluster("h100-80gb", 4)), Group("old", make_cluster("a100-40gb", 4))),
    find_link("infiniband-hdr"),
)


def test_the_plan_of_one_kind_is_todays():
    cluster = make_cluster("h100-80gb", 8)
    (plan,) = expected.expect_of_groups(SHAPE, CONFIG, cluster, BATCH, (8, 8))
    assert (plan.ranks, plan.batch) == (range(8), BATCH)
    assert plan.prediction.step_time_s == planned(cluster).step_time_s
    assert plan.prediction.tokens_per_s_per_gpu == pytest.approx(planned(cluster).tokens_per_s_per_gpu)
    assert plan.prediction.mfu == pytest.approx(planned(cluster).mfu)


def test_each_kind_of_gpu_counts_with_its_examples():
    """Whatever GPU rank 0 has: the slowest kind makes the step, and each kind has its own memory."""
    config = ParallelConfig.parse("dp_shard=8,batch_shares=3x4:1x4,activation_checkpointing=full@4-7").resolve(8)
    plans = expected.expect_of_groups(SHAPE, config, MIXED, BATCH, (12,) * 4 + (4,) * 4)
    turned = dataclasses.replace(MIXED, groups=MIXED.groups[::-1])
    others = expected.expect_of_groups(SHAPE, config, turned, BATCH, (4,) * 4 + (12,) * 4)
    for found, new in ((plans, range(4)), (others, range(4, 8))):
        assert {plan.prediction.cluster.gpu.name: plan.ranks == new for plan in found} == {
            **{"h100-80gb": True, "a100-40gb": False}
        }
        assert found[0].prediction.step_time_s >= found[1].prediction.step_time_s
    by_name = {plan.prediction.cluster.gpu.name: plan for plan in plans}
    new, old = by_name["h100-80gb"], by_name["a100-40gb"]
    assert (new.batch.rows, old.batch.rows) == (12, 4)
    assert (new.prediction.job.recompute, old.prediction.job.recompute) == ("none", "full")
    whole = new.prediction.tokens_per_s_per_gpu * new.prediction.step_time_s
    assert whole * 8 == pytest.approx(64 * BATCH.calls * BATCH.seq)
    even = expected.expect_of_groups(SHAPE, ParallelConfig.parse("dp_shard=8").resolve(8), MIXED, BATCH, (8,) * 8)
    assert even[0].prediction.cluster.gpu.name == "a100-40gb"
    assert even[0].prediction.step_time_s > 1.5 * even[1].prediction.step_time_s
    with pytest.raises(SpecError, match=pattern_of_refusal("pp_size=2", works="plan --cluster")):
        expected.expect_of_groups(SHAPE, CONFIG, MIXED, BATCH, (8, 8))


def test_the_step_is_compared_with_the_slowest_kind_and_memory_with_each():
    plans = expected.expect_of_groups(SHAPE, ParallelConfig.parse("dp_shard=8").resolve(8), MIXED, BATCH, (8,) * 8)
    slow, fast = plans
    rows = [*as_planned(fast.prediction)[:4], *as_planned(slow.prediction)[:4]]
    assert expected.list_deviations_of_groups(plans, rows) == []  # that new ones are done earlier is no deviation
    rows = [*as_planned(fast.prediction, tensors=3.0)[:4], *as_planned(slow.prediction, compute=4.0)[:4]]
    step, memory = expected.list_deviations_of_groups(plans, rows)
    assert "difference is compute" in step
    assert step.endswith("on a100-40gb")
    assert memory.endswith("GiB (+200%) on h100-80gb")


def written(folder, rows, prediction=None):
    """A record of a run that measured `rows` after a first look at something else."""
    prediction = prediction or planned()
    kept = session.Record(str(folder))
    kept.write(
        "run", spec=CONFIG.to_spec(), plan=expected.describe_prediction(prediction, CONFIG, BATCH), why_no_plan=""
    )
    first = [dataclasses.replace(row, step=99.0, compute=99.0) for row in rows]
    for step, ranks in ((1, first), (2, rows), (3, rows)):
        kept.write("metrics", step=step, perf={}, ranks=[row.to_dict() for row in ranks])


def test_a_plan_of_one_kind_is_calibrated_by_its_ranks(tmp_path):
    """Ranks 4 to 7 are those of the plan; the others, who wait for them, tell nothing of it."""
    slow = as_planned(planned(), compute=1.7)
    rows = [*as_planned(planned(), compute=0.5)[:4], *slow[:4]]
    written(tmp_path, rows)
    path = tmp_path / session.FILE
    path.write_text(path.read_text().replace('"batch":', '"ranks": [4, 8], "batch":', 1))
    cluster, _ = calibrate.calibrated(str(tmp_path), SHAPE)
    wanted = expected.sum_by_term(planned().breakdown.time)["compute"]
    assert expected.sum_by_term(planned(cluster).breakdown.time)["compute"] == pytest.approx(1.7 * wanted, rel=0.02)


@pytest.mark.parametrize("factors", [{"compute": 1.7}, {"communication": 3.0}, {"compute": 0.8, "other": 2.5}])
def test_calibrated_plans_are_what_was_measured(tmp_path, factors):
    rows = as_planned(planned(), **factors)
    written(tmp_path, rows)
    cluster, lines = calibrate.calibrated(str(tmp_path), SHAPE)
    after = expected.sum_by_term(planned(cluster).breakdown.time)
    wanted = expected.sum_by_term(planned().breakdown.time)
    for name in ("compute", "communication", "other"):
        assert after[name] == pytest.approx(wanted[name] * factors.get(name, 1.0), rel=0.02), name
    assert "measured" in lines[0]
    assert "calibrated" in cluster.inside.source
    assert (cluster.inside.bandwidth < 0.5 * make_cluster("h100-80gb", 8).inside.bandwidth) == (
        "communication" in factors
    )


def test_a_record_without_a_plan_calibrates_nothing(tmp_path):
    with pytest.raises(SpecError, match="holds no _hf_parallel_metrics.jsonl"):
        calibrate.calibrated(str(tmp_path), SHAPE)
    session.Record(str(tmp_path)).write("run", plan=None, why_no_plan="the planner counts neither")
    with pytest.raises(SpecError, match="counts neither"):
        calibrate.calibrated(str(tmp_path), SHAPE)
    written(tmp_path, as_planned(planned()))
    session.Record(str(tmp_path)).write("metrics", step=4, ranks=[{"step": 1.0}])
    with pytest.raises(SpecError, match="of another version"):
        calibrate.calibrated(str(tmp_path), SHAPE)


def test_plan_with_a_record(tmp_path, capsys):
    from hf_parallel import cli

    written(tmp_path, as_planned(planned(), compute=6.0))
    numbers = tmp_path / "numbers.json"
    model = {"layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 4, "ffn_hidden": 4096, "vocab": 32000}
    numbers.write_text(json.dumps(model))
    arguments = ["plan", str(numbers), "--seq", "1024", "--global-batch", "32", "--json"]
    assert cli.main([*arguments, "--calibrate", str(tmp_path)]) == 0
    slow = json.loads(capsys.readouterr().out)
    assert cli.main([*arguments, "--gpu", "h100-80gb", "--gpus", "8"]) == 0
    fast = json.loads(capsys.readouterr().out)
    assert slow["gpus"] == fast["gpus"] == 8
    assert slow["layouts"][0]["step_time_s"] > 1.5 * fast["layouts"][0]["step_time_s"]
    assert cli.main([*arguments, "--calibrate", str(tmp_path), "--detect"]) == 2
    assert "--calibrate alone" in capsys.readouterr().err


def test_a_record_that_cannot_be_written_is_told_once(tmp_path):
    (tmp_path / "file").write_text("")
    kept = session.Record(str(tmp_path / "file"))
    assert "is not written" in kept.write("run")
    assert kept.write("metrics") is None


def test_off_in_yaml(tmp_path):
    """YAML takes the word for false."""
    path = tmp_path / "spec.yaml"
    path.write_text("tp_size: 2\nmonitor: off\n")
    assert ParallelConfig.parse(str(path)).monitor == "off"
    with pytest.raises(SpecError, match=pattern_of_refusal("monitor=on", "basic", works="monitor=trace:4 works")):
        ParallelConfig.parse("monitor=on")
    with pytest.raises(SpecError, match="monitor=trace:4 works"):
        ParallelConfig.parse("monitor=trace:0")
    with pytest.raises(
        SpecError, match=pattern_of_refusal("compile=regional", "monitor=trace:4", works="compile=none works")
    ):
        ParallelConfig.parse("monitor=trace:4,compile=regional")
    ParallelConfig.parse("monitor=trace:4,compile=none")


def test_lines_of_a_record_that_are_no_mappings_are_left_out(tmp_path):
    """Part of a line may be JSON too, as of one that another process was writing."""
    (tmp_path / session.FILE).write_text('{"kind": "run"}\n33\n"metrics"\n{"kind": "met', encoding="utf-8")
    assert session.read_records(str(tmp_path)) == [{"kind": "run"}]

"""Pipelines on paper: the order of torch's schedules, their simulated bubbles, the choice among them, the picture."""

import xml.etree.ElementTree as ElementTree
from collections import Counter

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules

from hf_parallel import cli
from hf_parallel.ask.config import SpecError
from hf_parallel.axes.pipeline import timeline as orders
from hf_parallel.axes.pipeline import timeline as picture
from hf_parallel.axes.pipeline.timeline import (
    SIMPLEST_FIRST,
    Action,
    Span,
    Timeline,
    choose_fastest_schedule,
    compute_layer_costs,
    count_peak_live,
    count_virtual_stages,
    flatten_overlaps,
    needs,
    order,
    simulate,
    simulate_without_flush,
    split_evenly,
    with_communication,
)
from hf_parallel.axes.pipeline.torch_stage import Recorder
from tests.refusals import pattern_of_refusal

NUMBERS = [(2, 4), (2, 8), (4, 8), (4, 16), (8, 16)]
SKIPPED = ("backward_input", 0)  # the first stage's input has no gradient
ZERO_BUBBLE = ("interleaved_zero_bubble", "zbv_zero_bubble", "dualpipe_v")


def simulated(name, ranks, micro_batches, virtual=None, communication=0.0):
    virtual = virtual or count_virtual_stages(name)
    actions = order(name, ranks, virtual, micro_batches)
    return simulate(actions, *compute_layer_costs([1] * ranks * virtual), communication)


# ---- order -------------------------------------------------------------------------------------------------------


def test_order_of_1f1b_on_two_ranks():
    actions = order("1f1b", stages=2, virtual=1, micro_batches=3)
    spelled = {rank: " ".join(f"{a.kind[0]}{a.micro_batch}" for a in actions[rank]) for rank in actions}
    assert spelled == {0: "f0 f1 b0 f2 b1 b2", 1: "f0 b0 f1 b1 f2 b2"}


@pytest.mark.parametrize(("ranks", "micro_batches"), NUMBERS)
@pytest.mark.parametrize("name", SIMPLEST_FIRST)
def test_everything_runs_once(name, ranks, micro_batches):
    virtual = count_virtual_stages(name)
    actions = order(name, ranks, virtual, micro_batches)
    assert sorted(actions) == list(range(ranks))
    forwards = [a[1:3] for rank in actions for a in flatten_overlaps(actions[rank]) if a.kind == "forward"]
    assert sorted(forwards) == [(s, i) for s in range(ranks * virtual) for i in range(micro_batches)]


def test_stages_of_a_v_turn_around_on_the_last_rank():
    for name, stages in (("interleaved_1f1b", [{0, 4}, {3, 7}]), ("zbv_zero_bubble", [{0, 7}, {3, 4}])):
        actions = order(name, 4, 2, 8)
        assert [{a.stage for a in flatten_overlaps(actions[rank])} for rank in (0, 3)] == stages


def test_overlap_is_a_forward_and_a_backward():
    overlaps = [a for a in order("dualpipe_v", 2, 2, 4)[0] if a.kind == "overlap"]
    assert overlaps
    assert {tuple(part.kind for part in a.parts) for a in overlaps} == {("forward", "backward")}


@pytest.mark.parametrize(
    ("name", "virtual", "micro_batches", "words"),
    [
        ("1f1b", 1, 3, "Number of microbatches (3)"),
        ("interleaved_1f1b", 2, 9, "multiple of the number of rounds (2)"),
        ("dualpipe_v", 2, 4, "at least as many microbatches as stages"),
        ("gpipe", 2, 8, "cannot run 2 stages per rank; 1 works"),
        ("zbv_zero_bubble", 3, 8, "cannot run 3 stages per rank; 2 works"),
        ("gpipe", 1, 0, "pipeline_microbatches=0"),
        ("gpip", 1, 8, "not one of gpipe, 1f1b"),
    ],
)
def test_impossible_numbers_are_refused(name, virtual, micro_batches, words):
    with pytest.raises(SpecError, match="^pipeline_") as refused:
        order(name, 4, virtual, micro_batches)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_another_form_of_torchs_schedules_is_an_error(monkeypatch):
    monkeypatch.delattr(orders._StandIn, "backward_one_chunk")
    with pytest.raises(RuntimeError, match=r"\b1f1b\b.* torch \d"):
        order("1f1b", 2, 1, 2)


def test_an_order_with_a_hole_is_an_error(monkeypatch):
    make = torch_schedules.ScheduleLoopedBFS._calculate_single_rank_operations
    monkeypatch.setattr(
        torch_schedules.ScheduleLoopedBFS,
        "_calculate_single_rank_operations",
        lambda self, rank: [a for a in make(self, rank) if a is None or a.microbatch_index or rank],
    )
    with pytest.raises(RuntimeError, match="looped_bfs"):
        order("looped_bfs", 2, 2, 4)


# ---- simulation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), NUMBERS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_one_stage_per_rank(name, p, m):
    assert simulated(name, p, m).bubble == pytest.approx((p - 1) / (m + p - 1))


@pytest.mark.parametrize(("p", "m"), NUMBERS)
@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("name", ["interleaved_1f1b", "looped_bfs"])
def test_bubble_of_interleaved_stages(name, v, p, m):
    assert simulated(name, p, m, v).bubble == pytest.approx((p - 1) / (v * m + p - 1))


@pytest.mark.parametrize(("p", "m"), NUMBERS)
def test_zero_bubble_is_smaller(p, m):
    interleaved = simulated("interleaved_1f1b", p, m).bubble
    assert all(simulated(name, p, m).bubble < interleaved for name in ZERO_BUBBLE)
    assert simulated("interleaved_zero_bubble", p, m).bubble == pytest.approx((p - 1) / (6 * m + p - 1))


@pytest.mark.parametrize("communication", [0.0, 0.3])
@pytest.mark.parametrize("name", SIMPLEST_FIRST)
def test_nothing_starts_before_its_inputs(name, communication):
    timeline = simulated(name, 4, 8, communication=communication)
    stages = 4 * count_virtual_stages(name)
    home = {span.stage: span.rank for span in timeline.spans}
    done = {("backward_input" if s.kind == "backward" else s.kind, s.stage, s.micro_batch): s for s in timeline.spans}
    for span in timeline.spans:
        for need in needs(Action(*span[1:4]), stages):
            late = communication if home[need[1]] != span.rank else 0.0
            assert span.start >= done[need].end + late - 1e-9


@pytest.mark.parametrize("name", SIMPLEST_FIRST)
def test_a_rank_does_one_thing_at_a_time_in_its_order(name):
    timeline = simulated(name, 4, 8, communication=0.2)
    actions = order(name, 4, count_virtual_stages(name), 8)
    for rank in range(4):
        spans = [span for span in timeline.spans if span.rank == rank]
        assert all(a.end <= b.start + 1e-9 for a, b in zip(spans, spans[1:], strict=False))
        ran = [span[1:4] for span in spans if span.end > span.start]
        assert ran == [a[:3] for a in flatten_overlaps(actions[rank]) if a[:2] != SKIPPED]


@pytest.mark.parametrize(("p", "m"), [(2, 1), (2, 3), (3, 3), (4, 1), (4, 2), (4, 8), (8, 5)])
def test_bubble_without_a_flush(p, m):
    """Stage 0 waits for one forward per step; no rank has more forwards ahead than 1F1B."""
    timeline = simulate_without_flush(p, m, *compute_layer_costs([1] * p))
    assert timeline.bubble == pytest.approx(1 / (3 * m + 1))
    own = Counter((span.rank, span.kind) for span in timeline.spans)
    assert set(own.values()) == {m}


def test_unequal_stages_wait_for_the_slowest():
    even, uneven = (simulate(order("1f1b", 2, 1, 8), *compute_layer_costs(layers)) for layers in ([4, 4], [2, 6]))
    assert uneven.duration == pytest.approx(2 + 8 * 18 + 4)
    assert uneven.bubble > even.bubble


def test_communication_lengthens_the_step_by_its_hops():
    assert simulated("gpipe", 4, 8, communication=0.5).duration == pytest.approx((8 + 3) * 3 + 6 * 0.5)


def test_deadlock_is_named():
    crossed = {0: [Action("backward", 0, 0), Action("forward", 0, 0)], 1: [Action("forward", 1, 0)]}
    with pytest.raises(ValueError, match=r"deadlock: rank 0 at .*backward"):
        simulate(crossed, [1, 1], [1, 1], [1, 1])


# ---- memory and choice -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "m"), NUMBERS)
def test_peak_live(p, m):
    assert count_peak_live(order("1f1b", p, 1, m)) == [p - rank for rank in range(p)]
    assert count_peak_live(order("gpipe", p, 1, m)) == [m] * p
    assert count_peak_live(order("looped_bfs", p, 2, m)) == [2 * m] * p


def test_an_activation_lives_until_its_weight_gradient():
    halves = [Action(kind, 0, i) for i in (0, 1) for kind in ("forward", "backward_input")]
    assert count_peak_live({0: [*halves, Action("backward_weight", 0, 0), Action("backward_weight", 0, 1)]}) == [2]


@pytest.mark.parametrize(
    ("expected", "arguments"),
    [
        ("interleaved_zero_bubble", {}),
        ("gpipe", {"allowed": ("1f1b", "gpipe")}),  # equal bubbles
        ("1f1b", {"allowed": ("1f1b", "gpipe"), "most_live": 4}),
        ("interleaved_1f1b", {"allowed": ("1f1b", "interleaved_1f1b", "gpipe")}),
        ("1f1b", {"allowed": ("1f1b", "interleaved_1f1b"), "layers": 7}),  # too few for eight stages
        ("1f1b", {"allowed": ("1f1b", "interleaved_1f1b"), "micro_batches": 13}),
    ],
)
def test_choice(expected, arguments):
    assert choose_fastest_schedule(**{"stages": 4, "micro_batches": 8, "layers": 16, **arguments}) == expected


def test_no_choice_left():
    with pytest.raises(SpecError, match=pattern_of_refusal("pipeline_schedule=auto", 8, 3, works="")):
        choose_fastest_schedule(4, 8, 16, most_live=3)


def test_even_split():
    assert split_evenly(10, 4) == [3, 3, 2, 2]


# ---- picture -----------------------------------------------------------------------------------------------------


def shapes(text, name):
    root = ElementTree.fromstring(text)
    return [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if name in e.get("class", "").split()]


@pytest.mark.parametrize("name", SIMPLEST_FIRST)
def test_picture_has_a_box_per_action(name):
    timeline = simulated(name, 4, 8)
    text = picture.render_timeline(timeline, name, predicted=timeline.bubble, measured=0.5)
    boxes = shapes(text, "box")
    assert len(boxes) == sum(span.end > span.start for span in timeline.spans)
    assert len(shapes(text, "idle")) == 4
    assert f"bubble {timeline.bubble:.1%} predicted, 50.0% measured" in text
    right = max(float(box.get("x")) + float(box.get("width")) for box in boxes)
    idle = shapes(text, "idle")[0]
    assert right == pytest.approx(float(idle.get("x")) + float(idle.get("width")), abs=0.1)


def test_picture_tells_stages_of_a_rank_apart():
    forwards = shapes(picture.render_timeline(simulated("interleaved_1f1b", 4, 8, 3), "x"), "forward")
    assert len({box.get("fill") for box in forwards}) == 3
    assert "lighter" not in picture.render_timeline(simulated("1f1b", 4, 8), "1f1b")


def test_picture_escapes_and_draws_communication():
    spans = [Span(0, "forward", 0, 0, 1.0, 2.0), Span(0, "communication", 0, 0, 1.5, 3.0)]
    text = picture.render_timeline(Timeline(spans, 1), "a < b")
    assert len(shapes(text, "communication")) == 1
    assert "a &lt; b" in text
    assert Timeline(spans, 1).bubble == pytest.approx(0.5)


# ---- recorder ----------------------------------------------------------------------------------------------------


# dualpipe_v sends what a forward made only after the backward beside it: that looks like a slow link.
@pytest.mark.parametrize("name", [name for name in SIMPLEST_FIRST if name != "dualpipe_v"])
def test_waiting_for_what_is_ready_elsewhere_is_communication(name):
    assert with_communication(simulated(name, 4, 8)).spans == simulated(name, 4, 8).spans
    found = with_communication(simulated(name, 4, 8, communication=0.25))
    waits = [span.end - span.start for span in found.spans if span.kind == "communication"]
    assert max(waits) == pytest.approx(0.25)
    assert found.bubble == simulated(name, 4, 8, communication=0.25).bubble


def test_recorder_is_free_when_off():
    recorder = Recorder(torch.device("cpu"))
    assert recorder.span("forward", 0, 0) is recorder.span("backward", 1, 1)


# ---- hf-parallel plan --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "bubble", "boxes"),
    [
        ("1f1b", "27.3%", 4 * 8 * 2),
        ("interleaved_1f1b,pipeline_virtual_stages=3", "11.1%", 12 * 8 * 2),
        ("zbv_zero_bubble", "5.9%", 8 * 8 * 3 - 8),  # but for the first stage's input
        ("chimera", "14.3%", 4 * 8 * 2),
        ("pipedream_2bw", "4.0%", 4 * 8 * 2),
        ("pipedream", "4.0%", 4 * 8 * 2),
    ],
)
def test_plan_draws(tmp_path, capsys, schedule, bubble, boxes):
    path, spec = tmp_path / "out.svg", f"pp=4,pipeline_microbatches=8,pipeline_schedule={schedule}"
    assert cli.main(["plan", "--timeline", str(path), "--parallel", spec]) == 0
    assert f"bubble {bubble}" in capsys.readouterr().out
    assert len(shapes(path.read_text(), "box")) == boxes


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("tp=4", [], "pp_size=1"),
        ("pp=4", ["--layers", "3"], "3 layers in 4 parts: do not fill 4 stages"),
        ("pp=4", ["--micro-batches", "2"], "Number of microbatches (2)"),
        ("pp=2,pipeline_split=[3,5]", ["--layers", "9"], "--layers 8 works"),
    ],
)
def test_plan_refuses_in_one_line(tmp_path, capsys, spec, options, words):
    assert cli.main(["plan", "--timeline", str(tmp_path / "out.svg"), "--parallel", spec, *options]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out.svg").exists()


def test_plan_cannot_write(tmp_path, capsys):
    assert cli.main(["plan", "--timeline", str(tmp_path / "none" / "out.svg"), "--parallel", "pp=2"]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(("checkpointing", "chosen"), [("none", "interleaved_zero_bubble"), ("full", "1f1b")])
def test_auto_does_not_recompute_in_parts(checkpointing, chosen):
    """What splits the backward pass runs a checkpointed layer's forward again for each part."""
    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.axes.pipeline.schedules import choose_schedule

    spec = f"pp=4,pipeline_microbatches=8,pipeline_schedule=auto,activation_checkpointing={checkpointing}"
    assert choose_schedule(ParallelConfig.parse(spec), layers=16, tied=False) == chosen

"""`pipeline_energy=slack`: lower clocks that make no step longer, and what it is refused with."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import pipeline as benchmark
from hf_parallel import cli
from hf_parallel.ask.config import ParallelConfig, SpecError
from hf_parallel.axes.pipeline.energy import SHARES, StageClocks, compute_seconds_of, plan_clocks, predict_saving
from hf_parallel.axes.pipeline.gaps import Slack
from hf_parallel.axes.pipeline.timeline import compute_layer_costs, order, simulate
from tests import models
from tests.distributed import RankFailure, run
from tests.refusals import pattern_of_refusal

ENERGY = "pipeline_energy=slack"
SPLITS = [[1, 1, 1, 1], [3, 2, 2, 1], [1, 4]]


def stretched(actions, seconds, clocks):
    """Return how long the order takes at these clocks."""
    slack = Slack(actions, seconds)
    slack.seconds = {action: seconds[action[:2]] / share for action, share in clocks.items()}
    return slack.find()[1]


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("layers", SPLITS, ids=str)
def test_clocks_are_the_lowest_that_fit(name, layers):
    """The duration is the simulated one; what is one clock lower makes it longer, so nothing was left."""
    actions, costs = order(name, len(layers), 1, 8), compute_layer_costs(layers)
    seconds = compute_seconds_of(*costs)
    clocks, duration = plan_clocks(actions, seconds), simulate(actions, *costs).duration
    assert stretched(actions, seconds, clocks) == pytest.approx(duration, rel=1e-6)
    has_slack = name == "1f1b" or len(set(layers)) > 1
    assert (min(clocks.values()) < 1) == has_slack
    for action, share in clocks.items():
        lower = [one for one in SHARES if one < share]
        if lower:
            assert stretched(actions, seconds, {**clocks, action: max(lower)}) > duration * (1 + 1e-6)
    assert (0 < predict_saving(actions, seconds, clocks) < 0.3) == has_slack
    assert predict_saving(actions, seconds, dict.fromkeys(clocks, 1.0)) == 0


def test_changing_a_clock_takes_time():
    actions, seconds = order("1f1b", 4, 1, 8), compute_seconds_of(*compute_layer_costs([1] * 4))
    slow = plan_clocks(actions, seconds, switch=0.3)
    assert sum(share < 1 for share in slow.values()) < sum(
        share < 1 for share in plan_clocks(actions, seconds).values()
    )
    assert set(plan_clocks(actions, seconds, switch=100.0).values()) == {1.0}


class Sleeper(nn.Module):
    """A stage whose passes sleep, longer at a lower clock."""

    def __init__(self, seconds):
        super().__init__()
        self.weight, self.share = nn.Parameter(torch.zeros(1)), 1.0
        self.forward_s, self.backward_s = seconds[0], seconds[1] + seconds[2]

    def forward(self, hidden, *args, **kwargs):
        time.sleep(self.forward_s / self.share)
        return Asleep.apply(hidden + self.weight, self)


class Asleep(torch.autograd.Function):
    """The identity, with a backward that sleeps."""

    @staticmethod
    def forward(ctx, hidden, sleeper):
        ctx.sleeper = sleeper
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(ctx.sleeper.backward_s / ctx.sleeper.share)
        return gradient, None


class SleepersClocks:
    """The clock of a sleeping stage."""

    switch = 0.0

    def __init__(self, sleeper):
        self.sleeper, self.changes = sleeper, 0

    def lock(self, share):
        self.sleeper.share, self.changes = share, self.changes + 1


def steps(seconds: float) -> list[float]:
    """Seconds of a step at the highest clock, at the planned clocks, and with all actions at half of it."""
    setting = benchmark.Setting(4, 8, seconds, 3)
    model = benchmark.sleeping_model("1f1b", setting, Sleeper)
    pipeline, tokens = model._hf_parallel.pipeline, torch.zeros(8, 4, dtype=torch.long)
    place = dist.get_rank()
    (sleeper,) = pipeline.views[0].layers
    assert isinstance(sleeper, Sleeper)
    clocks = SleepersClocks(sleeper)
    pipeline.energy = StageClocks(pipeline, clocks)

    def timed() -> float:
        pipeline.recorder.start(dist.group.WORLD)
        model(input_ids=tokens, labels=tokens).loss.backward()
        return pipeline.recorder.gather(dist.group.WORLD).duration

    timed()  # opens the connections, and measures; its plan counts the opening of connections too
    pipeline.energy.planned.clear()
    full = [timed()]
    planned = min(timed() for _ in range(2))
    assert (clocks.changes > 0) == (place < 3)  # the last stage of 1F1B never waits
    (chosen,) = pipeline.energy.planned.values()
    pipeline.energy.planned = {8: dict.fromkeys(chosen, 1.0)}
    full.append(timed())
    pipeline.energy.planned = {8: dict.fromkeys(chosen, 0.5)}
    return [min(full), planned, timed()]


def test_steps_take_as_long():
    """Actions sleep for as long as a lower clock makes them: the step does not, unless more than slack is taken."""
    full, planned, half = run(steps, 4, 0.05)[0]
    assert planned < 1.05 * full
    assert half > 1.5 * full


@pytest.mark.parametrize(
    "spec", [ENERGY, f"pp=2,{ENERGY},pipeline_schedule=auto", f"pp=2,{ENERGY},pipeline_fill=kfac"]
)
def test_layouts_that_cannot(spec):
    with pytest.raises(SpecError) as refused:
        ParallelConfig.parse(spec)
    key, value = re.search(r"; (\S+) works$", str(refused.value))[1].split("=")
    kept = [part for part in spec.split(",") if not part.startswith(key)]
    ParallelConfig.parse(",".join([*kept, f"{key}={value}"]))


def start(spec: str) -> None:
    from hf_parallel import parallelize

    parallelize(models.build("llama"), spec)


def test_machines_without_clocks():
    with pytest.raises(
        RankFailure, match=pattern_of_refusal("pipeline_energy=slack", "GPU", works="pipeline_energy=none")
    ):
        run(start, 2, f"pp=2,{ENERGY}")
    run(start, 2, "pp=2,pipeline_energy=none")


def test_plan_says_what_is_saved(tmp_path, capsys):
    assert cli.main(["plan", "--timeline", str(tmp_path / "t.svg"), "--parallel", f"pp=4,{ENERGY}"]) == 0
    assert re.search(r"\d\.\d% of the energy .*0\.3 \+ 0\.7 f³", capsys.readouterr().out)

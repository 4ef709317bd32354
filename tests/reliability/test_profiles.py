"""Profiled steps of real runs: a trace with all ranks, and a picture, on any layout."""

import gzip
import json
import re
from pathlib import Path

import pytest

from hf_parallel.monitor.meter import sum_lengths, unite_intervals
from tests.training import Script, axes

SHARES = re.compile(r">(compute \d+%[^<]*)<")


@pytest.mark.parametrize("spec", ["tp=2,monitor=off", "tp=2,pp=2", "pp=2,dp_shard=2", "cp=2"])
def test_profiled_step(runs, spec, capfd):
    folder = Path(runs.parallel(Script(), f"{spec},profile_steps=[2,9]")[0].folder).parent
    world = axes(spec)["world"]
    with gzip.open(folder / "profile_step_2.json.gz", "rt") as file:
        trace = json.load(file)
    events = trace["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == set(range(world))
    assert any(event["name"] == "aten::mm" for event in events)
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    on = {name.partition("_")[0] for name in re.findall(r"(\w+)=2", spec)} - {"profile"}
    for rank in range(world):
        waited = {
            lane.partition(",")[0] for (pid, _), lane in lanes.items() if pid == rank and lane.endswith("exposed")
        }
        assert on <= waited, rank
    picture = (folder / "profile_step_2.svg").read_text()
    told = SHARES.findall(picture)
    assert len(told) == world
    for line in told:
        assert sum(int(share) for share in re.findall(r"(\d+)%", line)) == pytest.approx(100, abs=3), line
    assert (folder / "timeline_step_2.svg").exists() == ("pp" in spec)
    if "tp" in on:
        in_step(events, lanes)
    said = capfd.readouterr().err
    assert "profile_step_2.svg, and" in said
    assert said.count("profile_steps: the training ends after step 3, before [9]") == 1
    assert not list(folder.glob("profile_step_9*"))


def in_step(events, lanes):
    """Both ranks of a tp group wait within the same collectives: they have one clock."""
    spans = [
        unite_intervals((e["ts"], e["ts"] + e["dur"]) for e in events
              if e["ph"] == "X" and e["pid"] == rank and lanes[rank, e["tid"]].startswith("tp,"))
        for rank in (0, 1)
    ]  # fmt: skip
    ends = [found[-1][1] for found in spans]
    assert abs(ends[0] - ends[1]) < 0.1 * max(ends)
    assert all(sum_lengths(found) > 0 for found in spans)

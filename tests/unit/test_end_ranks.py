"""The ranks that are dry-run for a whole layout: the ends of a pipeline, whatever other axes there are."""

from types import SimpleNamespace

import pytest

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.cli import plan
from hf_parallel.planner import report
from hf_parallel.planner.dryrun import run
from hf_parallel.ranks.mesh import compute_coordinates

SPECS = ["pp=2,tp=2,cp=2,dp_shard=1", "dp_replicate=2,pp=3,dp_shard=2,cp=3", "pp=4,dp_shard=1", "tp=2,dp_shard=3"]


@pytest.mark.parametrize("spec", SPECS)
def test_verified_ranks_are_the_ends_of_a_pipeline(spec, monkeypatch):
    """A rank between them holds neither embedding nor head, and less memory."""
    config, ranks = ParallelConfig.parse(spec), []
    monkeypatch.setattr(run, "dry_run", lambda *args, rank, **options: ranks.append(rank))
    monkeypatch.setattr(report, "show_verified", lambda choice, runs, device: None)
    job = SimpleNamespace(job=SimpleNamespace(precision="bf16"))
    choice = SimpleNamespace(config=config, rows=1, accumulation=1, prediction=job)
    args = SimpleNamespace(
        seq=33, optimizer="adamw", lora=0, verify=True, device="cpu", parallel=None, load_in_4bit=False
    )
    plan._verify(args, SimpleNamespace(best=choice, choices=[choice]), object())
    places = [compute_coordinates(config, rank) for rank in ranks]
    assert [place.pop("pp") for place in places] == sorted({0, config.pp_size - 1})
    assert all(index == 0 for place in places for index in place.values())

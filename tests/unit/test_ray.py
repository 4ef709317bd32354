"""Ray without a cluster: how many ranks a worker holds, their variables, and what is refused before Ray starts."""

import os
from types import SimpleNamespace

import pytest

from hf_parallel import cli
from hf_parallel.ask.config import SpecError

pytest.importorskip("ray")
from hf_parallel.cli import ray_launcher as on_ray


def test_a_worker_holds_a_tp_group():
    assert on_ray.compute_ranks_per_worker("tp=2,dp_shard=-1", 8) == 2
    assert on_ray.compute_ranks_per_worker("pp=2,dp_shard=3", 6) == 1
    assert on_ray.compute_ranks_per_worker("tp=-1,pp=2", 8) == 4
    assert on_ray.compute_ranks_per_worker("auto", 8, 2) == 1


@pytest.mark.parametrize(
    ("spec", "least", "said"),
    [
        ("tp=2,dp_shard=4", 4, "8, but 4 processes run; dp_shard=2 works"),
        ("tp=2,dp_shard=-1", 3, "does not fit 3 processes"),
        ("tp=-1", 2, "tp_size=-1.*dp_shard_size=-1 works"),
        ("dp_shard=-1", 9, "min_processes=9.*8 works"),
    ],
)
def test_sizes_that_cannot_hold(spec, least, said):
    with pytest.raises(SpecError, match=said):
        on_ray.compute_ranks_per_worker(spec, 8, least)


def test_numbers_of_ranks(monkeypatch):
    """The third worker, the first of its node, with two ranks and four CPUs."""
    place = {"world_rank": 2, "local_rank": 0, "node_rank": 1, "world_size": 3, "local_world_size": 1}
    context = SimpleNamespace(**{f"get_{name}": lambda value=value: value for name, value in place.items()})
    monkeypatch.setattr(on_ray, "_read_place", lambda: context)
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "4")
    first, second = on_ray.Job(("train.py",), "/", 2).environments()
    assert (first["RANK"], second["RANK"]) == ("4", "5")
    assert (first["LOCAL_RANK"], second["LOCAL_RANK"]) == ("0", "1")
    assert (first["WORLD_SIZE"], first["LOCAL_WORLD_SIZE"], first["GROUP_RANK"]) == ("6", "2", "1")
    assert first["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(("worker", "ranks"), [(0, ["0", "1"]), (1, ["2", "3"]), (2, [])])
def test_a_worker_too_many(worker, ranks, monkeypatch):
    """Of three workers two make a replica of `tp=2,pp=2`."""
    place = {"world_rank": worker, "local_rank": worker, "node_rank": 0, "world_size": 3, "local_world_size": 3}
    context = SimpleNamespace(**{f"get_{name}": lambda value=value: value for name, value in place.items()})
    monkeypatch.setattr(on_ray, "_read_place", lambda: context)
    found = on_ray.Job(("train.py",), "/", 2, on_ray.compute_ranks_per_replica("tp=2,pp=2,dp_shard=-1")).environments()
    assert [one["RANK"] for one in found] == ranks
    assert all(one["WORLD_SIZE"] == "4" for one in found)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--num_processes", "8", "train.py"], "--ray: needs a spec; --parallel dp_shard=-1 works"),
        (["--num_processes", "8", "--parallel", "tp=3", "train.py"], "start 6 processes"),
        (["--parallel", "tp=3", "train.py"], "--ray: needs --num_processes"),
        (
            ["--mixed_precision", "bf16", "--num_processes", "8", "--parallel", "tp=2", "train.py"],
            "--mixed_precision: not together",
        ),
    ],
)
def test_command_lines_that_cannot_work(words, said, capsys, monkeypatch):
    monkeypatch.delenv("HF_PARALLEL", raising=False)
    assert cli.main(["launch", "--ray", *words]) == 2
    assert said in capsys.readouterr().err

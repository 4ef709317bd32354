"""Which rank a process is, whoever has started it, and what is said where that cannot be known."""

import os

import pytest

from hf_parallel.ask import launched
from hf_parallel.ask.spec import SpecError

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_JOB_ID": "20007"}
OPENMPI = {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "1"), ("LOCAL_RANK", "1"), ("SIZE", "2"))}


@pytest.fixture
def started(monkeypatch):
    """`started(**variables)`: whether a process with these is a rank, and its variables afterwards."""
    for name in (*NAMES, *SLURM, "SLURM_STEP_NODELIST", *OPENMPI):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)

    def start(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return launched.settle_launcher(), tuple(os.environ.get(name) for name in NAMES)

    return start


def test_slurm(started):
    """A step's task; the script of a job has some of the names, too, and is none."""
    assert started(SLURM_PROCID="3", SLURM_NTASKS="8")[0] is False
    found = (True, ("3", "8", "1", "node1", "10007"))
    assert started(**SLURM, SLURM_STEP_NODELIST="node1") == found
    assert started() == found


def test_a_given_address_is_taken_without_slurms_commands(started, monkeypatch):
    """Containers have no scontrol, and a list of hosts such as node[1-8] names none without it."""
    asked = []
    monkeypatch.setattr(launched.subprocess, "run", lambda command, **_: asked.append(command))
    found = started(**SLURM, SLURM_STEP_NODELIST="node[1-8]", MASTER_ADDR="head")
    assert found == (True, ("3", "8", "1", "head", "10007"))
    assert asked == []


@pytest.mark.parametrize(("local", "address"), [("2", "127.0.0.1"), ("1", "node1")])
def test_mpi(started, local, address):
    given = {} if local == "2" else {"MASTER_ADDR": "node1"}
    assert started(**OPENMPI, OMPI_COMM_WORLD_LOCAL_SIZE=local, **given) == (True, ("1", "2", "1", address, "29500"))


def test_one_process(started):
    assert started() == (False, (None,) * 5)
    assert started(WORLD_SIZE="1") == (True, (None, "1", None, None, None))


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE=two: not a number; WORLD_SIZE=2 works"),
        ({"WORLD_SIZE": "2"}, "RANK: not set, where WORLD_SIZE=2; RANK=0 works"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2: of WORLD_SIZE=2 the last is 1; RANK=0 works"),
        ({"RANK": "1"}, "RANK=1: of WORLD_SIZE=1 the last is 0; RANK=0 works"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR: not set, where WORLD_SIZE=2; give rank 0's machine"),
        ({**OPENMPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "MASTER_ADDR: not set"),
    ],
)
def test_what_is_missing_is_named(started, variables, said):
    with pytest.raises(SpecError) as caught:
        started(**variables)
    assert str(caught.value).startswith(said)

"""The fork harness itself: results in order, the right rank blamed, nothing left running."""

import os
import signal
import socket
import sys
import time
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from tests.conftest import core_seconds
from tests.distributed import COPIES, RankFailure, run, run_alone, run_alone_once
from tests.ports import held_port

pytestmark = pytest.mark.clock

LIMIT_S = 60  # less than what ranks that nobody ends would take; two on a free machine


def test_results_come_back_in_rank_order(distributed):
    def work(offset):
        total = torch.tensor(dist.get_rank() + offset)
        dist.all_reduce(total)
        return {"rank": dist.get_rank(), "total": total, "port": os.environ["MASTER_PORT"]}

    results = distributed(work, 3, 10)
    assert [result["rank"] for result in results] == [0, 1, 2]
    assert all(result["total"].item() == 33 for result in results)
    assert len({result["port"] for result in results}) == 1


def test_rendezvous_through_the_environment():
    def work():
        dist.init_process_group("gloo")
        total = torch.ones(())
        dist.all_reduce(total)
        return total.item()

    assert run(work, 2, init=False) == [2.0, 2.0]


def test_a_held_port_is_given_to_nobody_else():
    def work():
        with held_port() as port:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("127.0.0.1", port))
            dist.TCPStore("127.0.0.1", port, 1, is_master=True).set("who", "listens")
        return True

    assert run_alone(work)


def test_a_process_alone_sees_no_launcher():
    names = run_alone(lambda: [name for name in ("RANK", "WORLD_SIZE", "MASTER_PORT") if name in os.environ])
    assert names == []


def test_a_rank_finds_copies_of_functions_as_if_nothing_was_read_before():
    """Also in modules that it has made itself, and those of functions that nobody has looked for."""

    class Lazy(ModuleType):
        pass

    def places():
        original = next(iter(COPIES.originals.values()))
        late, sys.modules["tests_late"] = ModuleType("tests_late"), Lazy("tests_late")
        late.renamed = sys.modules["tests_late"].renamed = original
        sys.modules["tests_later"] = late
        sys.modules["tests_filled_later"].renamed = original
        wanted = [*COPIES.originals.values(), run]
        found = [find(wanted) for find in (COPIES.find_names_of, COPIES.find_everywhere)]
        return [{key: sorted((m.__name__, name) for m, name in one[key]) for key in map(id, wanted)} for one in found]

    sys.modules["tests_filled_later"] = Lazy("tests_filled_later")
    try:
        found, expected = run_alone(places)
    finally:
        del sys.modules["tests_filled_later"]
    assert found == expected
    assert sum(name == "renamed" for several in found.values() for _, name in several) == 3


def test_seconds_of_a_core_are_those_of_ranks_too():
    """And none while somebody waits."""

    def work():
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        time.sleep(1.0)

    before = core_seconds()
    run(work, 2, init=False)
    assert 0.6 <= core_seconds() - before < 1.6


def test_large_results_fit_through_the_pipe():
    assert run(lambda: torch.arange(300_000), 2)[1].sum().item() == sum(range(300_000))


def test_the_first_failing_rank_is_blamed_and_its_traceback_comes_first():
    def work():
        if dist.get_rank() == 1:
            raise LookupError("the reason")
        dist.all_reduce(torch.ones(()))

    start = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run(work, 3)
    assert time.monotonic() - start < LIMIT_S
    assert str(caught.value).startswith("[rank 1] Traceback")
    assert "tests/distributed.py" not in str(caught.value)
    assert (caught.value.rank, caught.value.kind, caught.value.message) == (1, "LookupError", "the reason")


def test_a_killed_rank_is_named():
    def work():
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(()))

    with pytest.raises(RankFailure, match=r"\A\[rank 2\] ended without a result, exit code -9"):
        run(work, 3)


def test_a_crashed_rank_shows_where_it_crashed():
    def crashing_here():
        os.abort()

    with pytest.raises(RankFailure, match=r"(?s)exit code -6\n.*crashing_here"):
        run(crashing_here, 2)


def test_a_hung_rank_shows_where_it_hangs():
    def stuck_here():
        time.sleep(600)

    def work():
        if os.environ["RANK"] == "0":
            stuck_here()

    start = time.monotonic()
    with pytest.raises(RankFailure, match="stuck_here") as caught:
        run(work, 2, timeout=2, init=False)
    assert time.monotonic() - start < LIMIT_S
    assert caught.value.kinds == {0: "Hung"}


def test_exiting_the_script_is_a_failure():
    def work():
        raise SystemExit(3)

    with pytest.raises(RankFailure, match="SystemExit"):
        run(work, 2)


def list_process_and_type(value, **options):
    return [os.getpid(), type(value).__name__, options]


def test_a_reference_runs_once():
    """For the same function and arguments; a test that changes its result leaves that of others as it was."""
    first = run_alone_once(list_process_and_type, 1, size=2)
    first.append("changed")
    assert run_alone_once(list_process_and_type, 1, size=2) == first[:-1]
    others = [run_alone_once(list_process_and_type, True, size=2), run_alone_once(list_process_and_type, 1, size=3)]
    assert [other[1:] for other in others] == [["bool", {"size": 2}], ["int", {"size": 3}]]
    assert len({first[0], *(other[0] for other in others)}) == 3

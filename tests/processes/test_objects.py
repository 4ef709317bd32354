"""Objects of Python between ranks: who calls, what all get, and errors that all raise."""

import pickle
import time

import pytest
import torch.distributed as dist

from hf_parallel.ranks import messages


def test_objects_of_all_ranks_and_of_one(distributed):
    def work():
        rank, called = dist.get_rank(), []

        def make():
            called.append(rank)
            return {"from": rank}

        found = messages.gather_objects(rank * 11), messages.send_from_one(make, source=2), called
        return found, messages.gather_objects(str(rank))

    results = distributed(work, 3)
    assert [found[:2] for found, _ in results] == [([0, 11, 22], {"from": 2})] * 3
    assert [found[2] for found, _ in results] == [[], [], [2]]
    assert [after for _, after in results] == [["0", "1", "2"]] * 3


class Local(Exception):
    """An error that cannot be sent: it wants two arguments."""

    def __init__(self, what, place):
        super().__init__(f"{what} on {place}")


#: What is raised below; pickle's own differ among versions of Python.
ERRORS = (FileNotFoundError, KeyError, Local, RuntimeError, AttributeError, pickle.PicklingError)


@pytest.mark.parametrize("source", [0, 2])
def test_what_the_source_raises_all_raise(distributed, source):
    """At once, each with the way to it on the source; then the next call works."""

    def no_folder():
        raise FileNotFoundError(f"rank {dist.get_rank()} sees no folder")

    def no_field():
        return {"present": 1}["missing"]

    def local():
        raise Local("nothing", "this host")

    def not_an_object():
        return lambda: None

    def work():
        start, seen = time.monotonic(), []
        for make in (no_folder, no_field, local, not_an_object):
            with pytest.raises(
                (FileNotFoundError, KeyError, Local, RuntimeError, AttributeError, pickle.PicklingError), match="."
            ) as failed:
                messages.send_from_one(make, source=source)
            seen.append((failed.type.__name__, str(failed.value), str(failed.value.__cause__)))
        return seen, messages.send_from_one(lambda: 515, source=source), time.monotonic() - start

    for rank, (seen, after, seconds) in enumerate(distributed(work, 3, timeout=40)):
        assert after == 515
        assert seconds < 20
        assert seen[0][:2] == ("FileNotFoundError", f"rank {source} sees no folder")
        assert seen[1][:2] == ("KeyError", "'missing'")
        assert "nothing on this host" in seen[2][1]
        assert "lambda" in seen[3][1] or "local object" in seen[3][1]
        if rank != source:
            assert all(f"on rank {source}:" in notes for _, _, notes in seen)
            assert "in no_field" in seen[1][2]

"""Objects of Python between ranks: who calls, what all get, and errors that all raise."""

import pytest
import torch.distributed as dist

from hf_parallel.collectives import objects


def test_objects_of_all_ranks_and_of_one(distributed):
    def work():
        rank, called = dist.get_rank(), []

        def make():
            called.append(rank)
            return {"from": rank}

        def fail():
            raise FileNotFoundError(f"rank {rank} sees no folder")

        found = objects.gather(rank * 11), objects.from_one(make, source=2), called
        with pytest.raises(FileNotFoundError, match="rank 0 sees no folder"):
            objects.from_one(fail, errors=(ValueError, OSError))
        return found, objects.gather(str(rank))

    results = distributed(work, 3)
    assert [found[:2] for found, _ in results] == [([0, 11, 22], {"from": 2})] * 3
    assert [found[2] for found, _ in results] == [[], [], [2]]
    assert [after for _, after in results] == [["0", "1", "2"]] * 3

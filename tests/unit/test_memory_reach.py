"""Which ranks can reach each other's memory, by what torch says of GPUs."""

import pytest
import torch

from hf_parallel.ranks.devices import find_memory_obstacle

SHARED = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@pytest.mark.parametrize(
    ("ranks", "seen", "reach", "shared", "said"),
    [
        (2, 2, True, None, None),
        (2, 2, False, None, "GPU 0 cannot reach the memory of GPU 1"),
        (2, 1, True, None, "2 ranks, 1 GPUs"),
        (2, 1, True, "0", "2 ranks, 1 GPUs"),
        (2, 1, True, "1", None),  # ranks share a GPU, and torch is told so
        (3, 3, True, None, "symmetric memory needs 2 ranks of a machine"),
    ],
)
def test_blocks_of_two(monkeypatch, ranks, seen, reach, shared, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: reach)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.setenv(SHARED, shared) if shared else monkeypatch.delenv(SHARED, raising=False)
    found = find_memory_obstacle(2)
    assert (found is None) if said is None else said in found


def test_processors_share_none():
    assert "NVIDIA" in find_memory_obstacle(2)

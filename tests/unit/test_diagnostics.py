"""What is switched on before groups are made, so that a run that hangs says where."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from hf_parallel.cli import launch as cli_launch
from hf_parallel.hooks import runtime
from hf_parallel.ranks import desync

NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in (*NAMES, "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DESYNC_DEBUG", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_the_flight_recorder_is_on(monkeypatch):
    """By the name of which torch does not warn."""
    monkeypatch.setenv("WORLD_SIZE", "64")
    assert runtime.choose_nccl_diagnostics() == {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def test_what_is_set_stays(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "0")
    assert runtime.choose_nccl_diagnostics() == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def test_no_collective_waits_for_a_store():
    """Under desync debug each one would, while NCCL's watchdog writes to it."""
    assert "TORCH_NCCL_DESYNC_DEBUG" not in runtime.choose_nccl_diagnostics()


@pytest.mark.parametrize(
    ("version", "more"), [("2.13.0", ",pinned_max_round_threshold_mb:1"), ("2.11.0", "")], ids=["2.13", "2.11"]
)
def test_memory_grows_in_place_on_cuda_unless_somebody_has_chosen(monkeypatch, version, more):
    """torch before 2.13 raises an error of names that it does not know."""
    monkeypatch.setattr(torch, "__version__", version)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert runtime.choose_allocation() == {}  # nothing to set without a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert runtime.choose_allocation() == {
        "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:True{more}"
    }  # as vLLM reads
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        with monkeypatch.context() as chosen:
            chosen.setenv(name, "max_split_size_mb:64")
            assert runtime.choose_allocation() == {}


@pytest.mark.parametrize(
    ("cores", "cpu", "bound"), [(8, False, True), (4, False, False), (8, True, False)], ids=["free", "chosen", "cpu"]
)
def test_processes_are_bound_where_nobody_has_chosen_cores(cores, cpu, bound):
    with (
        mock.patch.object(torch, "version", SimpleNamespace(cuda="13.0")),
        mock.patch.object(cli_launch, "count_accelerators", return_value=8),
        mock.patch("accelerate.utils.is_pynvml_available", return_value=True),
        mock.patch("os.sched_getaffinity", return_value=set(range(cores)), create=True),
        mock.patch("os.cpu_count", return_value=8),
    ):
        assert cli_launch._can_bind_to_nodes(cpu) is bound


def test_ranks_at_one_place_are_named_together():
    places = ["is at train.py:7", "is at train.py:7", "has ended", "is at train.py:9"]
    said = "ranks 0, 1 are at train.py:7; rank 2 has ended; rank 3 is at train.py:9"
    assert desync._group_by_place(places) == said

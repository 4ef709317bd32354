"""What is switched on before groups are made, so that a run that hangs says where."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from hf_parallel import cli
from hf_parallel.hooks import runtime

NAMES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in (*NAMES, "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DESYNC_DEBUG", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(("version", "names"), [("2.13.0+cpu", NAMES[:1]), ("2.11.0", NAMES)])
def test_the_flight_recorder_is_on(monkeypatch, version, names):
    """By the name that this version of torch reads without a warning."""
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setenv("WORLD_SIZE", "64")
    found = runtime.diagnostics()
    assert found == dict.fromkeys(names, "2000") | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_NCCL_DESYNC_DEBUG": "1"}


def test_what_is_set_stays(monkeypatch):
    monkeypatch.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "0")
    monkeypatch.setenv("TORCH_NCCL_DESYNC_DEBUG", "0")
    assert runtime.diagnostics() == {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}


def test_desync_debug_is_for_worlds_whose_store_bears_it(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1024")
    assert "TORCH_NCCL_DESYNC_DEBUG" not in runtime.diagnostics()


def test_memory_grows_in_place_on_cuda_unless_somebody_has_chosen(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert runtime.allocation() == {}  # nothing to set without a GPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert runtime.allocation() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    assert runtime.allocation() == {}


@pytest.mark.parametrize(
    ("cores", "cpu", "bound"), [(8, False, True), (4, False, False), (8, True, False)], ids=["free", "chosen", "cpu"]
)
def test_processes_are_bound_where_nobody_has_chosen_cores(cores, cpu, bound):
    with (
        mock.patch.object(torch, "version", SimpleNamespace(cuda="13.0")),
        mock.patch.object(cli, "_accelerators", return_value=8),
        mock.patch("accelerate.utils.is_pynvml_available", return_value=True),
        mock.patch("os.sched_getaffinity", return_value=set(range(cores)), create=True),
        mock.patch("os.cpu_count", return_value=8),
    ):
        assert cli._can_bind_to_nodes(cpu) is bound

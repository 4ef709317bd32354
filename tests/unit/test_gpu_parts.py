"""The CPU part of `make gpu`, in small and on forked ranks; and the arithmetic of what it says of a GPU."""

import importlib
import importlib.metadata
import os
import sys
import threading
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import checkpoints, memory, profiling, setting, syncs, wheels
from hf_parallel.check import parity as parity_check
from hf_parallel.check.report import FAILED
from tests.distributed import run, run_alone


def forked(call, world, devices, backend, limit_s, values):
    """As `setting.started`, without processes of their own."""
    module, _, name = call.partition(":")
    function = partial(as_a_checkout, getattr(importlib.import_module(module), name))
    return run(function, world, **values) if world > 1 else [run_alone(function, **values)]


def as_a_checkout(function, **values):
    """This package is not installed where only torch is, and a folder of wheels."""
    version = importlib.metadata.version

    def found(name):
        if name == "hf-parallel":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    importlib.metadata.version = found
    return function(**values)


def test_without_nccl_among_sharers_gloo_carries_what_it_can():
    """A probe on one GPU that fails; two GPUs need none."""

    def refused(call, *rest):
        raise RuntimeError("Duplicate GPU detected")

    one, two = setting.Setting(1, True, run=refused), setting.Setting(2, True, run=refused)
    assert (one.backend(2), two.backend(2), two.backend(4)) == ("gloo", None, "gloo")
    assert one.can("tp=2", 2)
    assert not one.can("tp=2,pp=2", 4)
    shared = setting.Setting(1, True, run=lambda *rest: [True, True])
    assert shared.backend(4) is None
    assert shared.can("pp=2", 2)


def test_a_failure_of_a_part_is_one_of_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(setting.Setting, "here", lambda *given: setting.Setting(0, True, run=lambda *rest: 1 // 0))
    assert command.run_part("memory", str(tmp_path), False) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert command.main(["speed", "memory", "--minutes", "0.1", "--out", str(tmp_path)]) == 1
    assert "| speed | NOT RUN: the 0.1 minutes" in (tmp_path / "gpu.md").read_text()
    assert checkpoints.compared("a -> b", [1.0, 2.0], [1.0, 2.1]).status == FAILED
    case = memory.SMALL[0]
    found = {"planned": {"parameters": 9.0}, "dry": {}, "seen": {"parameters": 10.0}, "allocated": 0, "reserved": 0}
    assert next(iter(memory.shown(case, found))).status == FAILED


def test_syncs_are_told_by_the_line_that_made_them(monkeypatch):
    """torch's warning comes from whichever thread; other warnings go where they went."""
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)

    def warn(*args):
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return 0.0

    with syncs.Watch(on_gpu=True) as watch:
        thread = threading.Thread(target=warn)
        thread.start()
        thread.join()
        with pytest.warns(UserWarning, match="another"):
            warnings.warn("another one", stacklevel=1)
    (line,) = watch.lines
    assert line.startswith(f"unit/{Path(__file__).name}:")
    with syncs.Watch(on_gpu=False) as watch:
        torch.ones(3).sum().item()
        torch.ones(3)[torch.ones(3) > 0]
        torch.ones(3) + 1
    assert all(f"{Path(__file__).name}" in line for line in watch.lines)
    assert sum(watch.lines.values()) == 2
    with syncs.Watch(on_gpu=False) as watch:
        parity_check._compare_weights({"w": torch.ones(2)}, {"w": torch.ones(2)})
    (line,) = watch.lines
    assert syncs.is_ours(line)
    assert line.startswith("hf_parallel/check/parity.py:")
    rows = list(syncs.shown("tp=2", [{"hf_parallel/a.py:1": 6, "transformers/x.py:1": 2}], True))
    assert (rows[0].status, rows[0].found) == (FAILED, "3 syncs per step from our lines, 1 from others")


def test_idle_and_overlap_are_unions_of_intervals():
    assert profiling._joined([(5, 7), (0, 3), (2, 4), (7, 9)]) == [(0, 4), (5, 9)]
    assert profiling._length([(0, 4), (5, 9)]) == 8
    meter = profiling.Meter()
    for profiled in (False, True):
        meter.begin(profiled)
        torch.ones(64, 64) @ torch.ones(64, 64)
        meter.end()
    found = meter.numbers()
    assert found["kernels"] >= 3
    assert 0 < found["host_ms"] <= found["wall_ms"]


def test_an_environment_from_a_folder_of_wheels(tmp_path, monkeypatch, capfd):
    """Without wheels a line; with pip refusing, its exit code; what this Python has can be imported in the new one."""
    assert wheels.run_in_environment(str(tmp_path), []) == 2
    assert "there are no wheels" in capfd.readouterr().err
    monkeypatch.setattr(wheels, "NEEDED", ("a-package-that-nobody-has",))
    (tmp_path / "x-1-py3-none-any.whl").touch()
    assert wheels.make(str(tmp_path / "env"), str(tmp_path)) is None
    own = next((tmp_path / "env").glob("lib/python*/site-packages/below.pth")).read_text().splitlines()
    assert any(os.path.isdir(os.path.join(folder, "torch")) for folder in own)
    assert sys.prefix in "\n".join(own)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("part", command.PARTS)
def test_part_on_a_gpu(part, tmp_path):
    assert command.main([part, "--small", "--out", str(tmp_path)]) == 0

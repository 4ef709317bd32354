"""Locked clocks are reset whatever becomes of the process that locked them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_parallel.axes.pipeline.energy import NvmlClocks

ROOT = Path(__file__).parents[2]
#: NVML as far as it is used; what it is asked goes to a file.
FAKE = """
import os

class Refused(Exception):
    pass

def note(line):
    with open(os.environ["NVML_LOG"], "a") as log:
        log.write(line + "\\n")

def nvmlInit():
    pass

def nvmlDeviceGetHandleByUUID(uuid):
    return uuid

def nvmlDeviceGetSupportedMemoryClocks(handle):
    return [2619, 1593]

def nvmlDeviceGetSupportedGraphicsClocks(handle, memory):
    assert memory == 2619
    return list(range(1980, 195, -15))

def nvmlDeviceSetGpuLockedClocks(handle, lowest, highest):
    if os.environ.get("NVML_REFUSES"):
        raise Refused("Insufficient Permissions")
    assert lowest == highest
    note(f"{handle} {lowest}")

def nvmlDeviceResetGpuLockedClocks(handle):
    note(f"{handle} reset")
"""
SCRIPT = """
import sys, time
from hf_parallel.axes.pipeline.energy import NvmlClocks
clocks = NvmlClocks("GPU-7", "fake_nvml")
clocks.lock(0.5)
print("locked", flush=True)
if sys.argv[1] == "error":
    raise ValueError("a script's own")
if sys.argv[1] != "end":
    time.sleep(600)
"""


@pytest.mark.parametrize("how", ["end", "error", "SIGTERM", "SIGKILL"])
def test_clocks_are_reset(tmp_path, how):
    log = tmp_path / "log"
    (tmp_path / "fake_nvml.py").write_text(FAKE)
    environment = {**os.environ, "NVML_LOG": str(log), "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-c", SCRIPT, how]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout.readline() == b"locked\n"
        assert log.read_text().splitlines()[:2] == ["GPU-7 1980", "GPU-7 990"]
        if how.startswith("SIG"):
            process.send_signal(getattr(signal, how))
    deadline = time.monotonic() + 30
    while log.read_text().splitlines()[-1] != "GPU-7 reset" and time.monotonic() < deadline:
        time.sleep(0.1)
    assert log.read_text().splitlines()[2] == "GPU-7 reset"


@pytest.mark.parametrize("missing", ["module", "rights"])
def test_what_is_missing_is_said(tmp_path, monkeypatch, missing):
    monkeypatch.setenv("NVML_LOG", str(tmp_path / "log"))
    monkeypatch.setenv("NVML_REFUSES", "1")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    if missing == "rights":
        (tmp_path / "refusing_nvml.py").write_text(FAKE)
    said = {"module": "NVML cannot be used here .*refusing_nvml_absent", "rights": "NVML refuses .*Insufficient"}
    with pytest.raises(RuntimeError, match=said[missing]):
        NvmlClocks("GPU-7", "refusing_nvml" if missing == "rights" else "refusing_nvml_absent")

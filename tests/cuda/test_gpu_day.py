"""`make gpu` on the pretended device, in small: a part comes to its end, and its figures stand on the page."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.cuda.worker import ROOT, environment

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("part", ["memory", "context", "speed", "syncs"])
def test_part_on_the_device(part, tmp_path):
    """`memory` finds more than is planned: the device has no flash attention."""
    (tmp_path / "sitecustomize.py").write_text(
        "import tests.cuda.device\n"
    )  # in the processes that a part starts, too
    paths = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    command = [sys.executable, "-m", "benchmarks.gpu", part, "--small", "--limit", "700", "--out", str(tmp_path)]
    given = {**environment(), "PYTHONPATH": paths, "LAYOUTS": "tp2 dp_shard2"}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=given, check=False)
    found = json.loads((tmp_path / f"{part}.json").read_text())
    wrong = [row for row in found["rows"] if row["status"] == "FAILED" and row["part"] != "memory"]
    assert wrong == [], ran.stdout[-3000:] + ran.stderr[-3000:]
    assert f"| {part} | " in (tmp_path / "gpu.md").read_text()
    assert "NVIDIA" in (tmp_path / "gpu.md").read_text()

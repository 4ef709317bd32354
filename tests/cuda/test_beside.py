"""A layer of ours launches, sends and takes of the host at most what FSDP2 and Transformers' `tp_plan` do."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cuda.worker import ROOT, environment


@pytest.mark.timeout(900)
def test_counts_per_layer():
    command = [sys.executable, "-m", "tests.cuda.beside"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment(), check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    assert "0 of 3 layouts launch, send or take more of the host" in ran.stdout

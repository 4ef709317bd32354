"""Progress on a real terminal and in a file."""

import os
import pty
import subprocess
import sys

from tests.commands import ROOT


def test_a_real_terminal_and_a_file():
    code = """
import time
from hf_parallel.ask import waiting
waiting.PATIENCE_S = 0.01
with waiting.waiting("reading"):
    time.sleep(0.1)
"""
    words = [sys.executable, "-c", code]
    environment = {key: value for key, value in os.environ.items() if key != "CI"}
    leader, follower = pty.openpty()
    subprocess.run(words, cwd=ROOT, env=environment, stderr=follower, check=True)
    os.close(follower)
    assert "hf_parallel: reading …" in os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, check=True).stderr == b""

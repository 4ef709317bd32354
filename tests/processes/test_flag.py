"""The flag works before Transformers is imported."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_flag_before_transformers():
    code = "from tests.unit import test_flag; test_flag.flag_first()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr

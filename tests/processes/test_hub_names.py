"""A wrong name of the Hub is told before torch is imported."""

import subprocess
import sys

from tests.commands import ROOT
from tests.unit.test_hub_names import MODEL


def test_before_torch_is_imported():
    code = f"""
import sys
from huggingface_hub import constants
constants.ENDPOINT, constants.HF_HUB_OFFLINE = "http://127.0.0.1:9", False
from hf_parallel import cli
assert cli.main(["plan", {MODEL!r}, "--gpus", "8", "--gpu", "h100-80gb"]) == 2
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "127.0.0.1 cannot be reached" in done.stderr

"""Ranks other than 0 are quiet at the start."""

import subprocess
import sys

QUIET = """
import os, warnings, logging
os.environ["TRANSFORMERS_VERBOSITY"] = "info"
from hf_parallel.cli import runner
runner.silence_other_ranks()
warnings.warn("a warning")
logging.getLogger("library").warning("a line")
logging.getLogger("library").error("an error")
print(os.environ["TRANSFORMERS_VERBOSITY"], os.environ["HF_HUB_DISABLE_PROGRESS_BARS"])
"""


def test_other_ranks_are_quiet():
    """Errors are printed, and what the user has set stays."""
    done = subprocess.run([sys.executable, "-c", QUIET], capture_output=True, text=True)
    assert (done.stdout.split(), done.stderr.strip()) == (["info", "1"], "an error")

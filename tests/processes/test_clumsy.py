"""One report for all ranks that end."""

import re

from tests.distributed import run
from tests.unit.test_clumsy import ENDS, ended


def test_one_report_for_all_ranks(tmp_path):
    """Ranks that fail alike do not write their tracebacks into one another; what is told needs none."""
    for number, end in enumerate(ENDS):
        imports = "import os\nfrom hf_parallel.checkpoint import CheckpointError, DamagedCheckpoint\n"
        (tmp_path / f"{number}.py").write_text(f"{imports}RANK = os.environ['RANK']\n{end}\n")
    ranks = run(ended, 2, tmp_path, init=False)
    for number, (first, second, code) in enumerate(ENDS.values()):
        for rank, words in enumerate((first, second)):
            found, err = ranks[rank][number][0], re.sub(r"(\[rank\d\]: )+", "", ranks[rank][number][1])
            lines = [line for line in err.splitlines() if "socket.cpp" not in line] or [""]
            assert (found, lines[0], lines[-1]) == (code, *words), err

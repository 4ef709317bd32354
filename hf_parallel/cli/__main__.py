"""`python -m hf_parallel.cli`: the command `hf-parallel`."""

import sys

from hf_parallel.cli import main

sys.exit(main())

"""`python -m hf_parallel.rollouts MODEL [--port 8000]`: the stand-in for `vllm serve`; see `server.py`."""

from hf_parallel.rollouts.server import main

main()

"""Completions from a process of its own: what TRL's trainers that generate ask with `use_vllm`, `vllm_mode=server`.

`server.py` stands in where vLLM cannot be installed: it speaks what TRL's client speaks to `vllm serve`, with
transformers underneath, and takes weights in the place of vLLM's NCCL engine. Where vLLM serves it is not used.
`reference.py` serves the log-probabilities of a model that does not change.
"""

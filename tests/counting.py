"""Count collectives without touching modules (torch's CommDebugMode gives each module a new input tensor)."""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CountCollectives(TorchDispatchMode):
    """`counts`: how often each kind of collective ran inside, whichever way it was called.

    `sent`: the bytes this rank sends if all of them run over rings among all ranks.
    `whole`: the bytes of what is gathered or reduced, by kind. `largest`: those of the largest gathered tensor.
    """

    KINDS = {"all_reduce": "reduce", "allreduce": "reduce", "all_gather": "gather", "allgather": "gather"}
    KINDS |= {"_allgather": "gather", "reduce_scatter": "scatter", "_reduce_scatter": "scatter"}

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.sent = 0.0
        self.whole: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if DTensor in types:
            return NotImplemented  # it calls its collectives while it runs: let it, and see those
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("_c10d_functional", "c10d", "_c10d_functional_autograd"):
            name = func._opname
            kind = next((kind for start, kind in self.KINDS.items() if name.startswith(start)), None)
            if kind is not None:
                self.counts[kind] += 1
                self.sent += _sent(kind, (args, result))
                self.whole[kind] += _largest((args, result))
                if kind == "gather":
                    self.largest = max(self.largest, _largest((args, result)))
        return result


def _sent(kind: str, tensors: Any) -> float:
    """A ring passes the whole tensor, the largest of arguments and results, once; an all-reduce twice."""
    ranks = dist.get_world_size()
    return (2 if kind == "reduce" else 1) * _largest(tensors) * (ranks - 1) / ranks


def _largest(tensors: Any) -> int:
    return max(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, torch.Tensor))

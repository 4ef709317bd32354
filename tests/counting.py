"""Count collectives without touching modules (torch's CommDebugMode gives each module a new input tensor)."""

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class CountCollectives(TorchDispatchMode):
    """`counts`: how often each kind of collective ran inside, whichever way it was called."""

    KINDS = {"all_reduce": "reduce", "allreduce": "reduce", "all_gather": "gather", "allgather": "gather"}
    KINDS |= {"_allgather": "gather", "reduce_scatter": "scatter", "_reduce_scatter": "scatter"}

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace in ("_c10d_functional", "c10d", "_c10d_functional_autograd"):
            name = func._opname
            kind = next((kind for start, kind in self.KINDS.items() if name.startswith(start)), None)
            if kind is not None:
                self.counts[kind] += 1
        return func(*args, **(kwargs or {}))

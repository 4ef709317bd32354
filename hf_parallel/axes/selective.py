"""Selective checkpointing: a layer runs again in the backward, except for what is dear to compute or to send.

    kept by the first run                     run again
    outputs of matrix products (4 bits too)   norms, rotations, activations, residual additions, dropout
    output and log-sum-exp of attention       attention with dropout, which draws again; batched products: eager scores
    sums over ranks, rows sent to experts     gathers along the sequence, whose whole results no rank should keep
                                              thin products, as an adapter's second: wide, and cheap for each number

Of a row-parallel layer the sum over ranks is kept, this rank's part of the sequence, and not the product before it,
nor what adapters add to that.
torch's own contexts for this (`create_selective_checkpoint_contexts`) cannot give back what a collective writes into a
buffer, nor give twice, as schedules need that take a backward apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.utils._python_dispatch import TorchDispatchMode

from hf_parallel.collectives.kept import ATTENTION, COLLECTIVE, Store, Within, given_back, noted, unchanged

if TYPE_CHECKING:
    from torch._ops import OpOverload

#: A product over at most so many numbers, for outputs so many times as wide, is thin.
THIN, WIDER = 256, 8
PRODUCTS = {"mm", "addmm", "_scaled_mm", "_int_mm", "_grouped_mm", "_scaled_grouped_mm", "gemm_4bit"}
ATTENTIONS = ("scaled_dot_product", "flash_attn", "flash_attention", "efficient_attention")


def is_kept(operation: OpOverload, arguments: tuple, keywords: dict[str, object]) -> bool:
    """The policy: is the output of this operation kept?"""
    name = operation.name().partition("::")[2].partition(".")[0]
    if name in PRODUCTS:
        return not _is_thin(name, arguments)
    return (
        any(part in name for part in ATTENTIONS)
        and "backward" not in name
        and not _drops(operation, arguments, keywords)
    )


def _is_thin(name: str, arguments: tuple) -> bool:
    """LoRA's B: beside a frozen base it would double what is kept, in fp32 even threefold."""
    if name not in ("mm", "addmm"):
        return False
    inner, outer = arguments[2 if name == "addmm" else 1].shape
    return inner <= THIN and WIDER * inner <= outer


def _drops(operation: OpOverload, arguments: tuple, keywords: dict[str, object]) -> bool:
    """Attention with dropout draws random numbers: given back, it would shift those of what comes after it."""
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            return bool(arguments[place] if place < len(arguments) else keywords.get(argument.name, 0))
    return False


class _Products(TorchDispatchMode):
    """Keeps outputs in the first run, gives them back in each further one."""

    def __init__(self, store: Store, recomputing: bool) -> None:
        super().__init__()
        self.store, self.recomputing, self.within = store, recomputing, Within(store, recomputing)
        self.kept: list[tuple[object, object]] = []
        self.used = 0

    def __enter__(self) -> object:
        self.used = 0
        self.within.__enter__()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.within.__exit__(*error)

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple = (), kwargs: dict | None = None
    ) -> object:
        kwargs = kwargs or {}
        if self.store.computing or not is_kept(func, args, kwargs):
            return func(*args, **kwargs)
        if not self.recomputing:
            output = func(*args, **kwargs)
            self.kept.append((func, noted(output, self.store)))
            return output
        self.used += 1
        first, note = (*self.kept, ("nothing", None))[min(self.used - 1, len(self.kept))]
        if first is not func:
            raise RuntimeError(f"hf_parallel: a checkpointed layer did not run as before: {func} comes for {first}")
        return given_back(note) if unchanged(note) else func(*args, **kwargs)


def contexts() -> tuple[_Products, _Products]:
    """For `context_fn` of torch's checkpoint: around the first run, and around each further one."""
    store = Store(frozenset({ATTENTION, COLLECTIVE}))
    first, again = _Products(store, False), _Products(store, True)
    again.kept = first.kept
    return first, again

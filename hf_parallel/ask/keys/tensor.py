"""Keys of tensor parallelism."""

from __future__ import annotations

from dataclasses import dataclass

from hf_parallel.ask.keys.sizes import Sizes, key
from hf_parallel.ask.spec import refuse


@dataclass(frozen=True)
class TensorKeys(Sizes):
    """Settings of `tp`."""

    sequence_parallel: bool | None = key(
        None,
        "norms and residual stream on 1/tp of the sequence, where the model allows it",
        shown="on with `tp`",
    )
    tp_overlap: bool = key(False, "communicate one half of each `tp` layer's output while the other is computed")

    def check_keys(self) -> None:
        """Reject settings of tp that need more than one rank."""
        if self.sequence_parallel and self.tp_size == 1:
            refuse("sequence_parallel=true", "tp_size=1 splits no sequence", "tp_size=2 or sequence_parallel=false")
        if self.tp_overlap and self.tp_size == 1:
            refuse("tp_overlap=true", "tp_size=1 communicates nothing", "tp_size=2 or tp_overlap=false")

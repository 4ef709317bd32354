"""Keys of tensor parallelism."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hf_parallel.ask.keys.sizes import Sizes, key
from hf_parallel.ask.spec import refuse

#: The ranks of tp as rows and columns of a grid, columns innermost: another view of the axis.
TP_AXES = ("tp_row", "tp_col")


@dataclass(frozen=True)
class TensorKeys(Sizes):
    """Settings of `tp`."""

    sequence_parallel: bool | None = key(
        None,
        "norms and residual stream on 1/tp of the sequence, where the model allows it",
        shown="on with `tp`",
    )
    tp_overlap: bool = key(False, "communicate one half of each `tp` layer's output while the other is computed")
    tp_mesh: str | None = key(
        None, "ranks of `tp` as ROWSxCOLS, such as `8x2`: weights are cut along both dims, for `tp` of 16 and more"
    )

    def check_keys(self) -> None:
        """Reject settings of tp that need more than one rank, and grids that are none of its ranks."""
        if self.sequence_parallel and self.tp_size == 1:
            refuse("sequence_parallel=true", "tp_size=1 splits no sequence", "tp_size=2 or sequence_parallel=false")
        if self.tp_overlap and self.tp_size == 1:
            refuse("tp_overlap=true", "tp_size=1 communicates nothing", "tp_size=2 or tp_overlap=false")
        if self.tp_mesh is None:
            return
        asked = f"tp_mesh={self.tp_mesh}"
        if not re.fullmatch(r"[1-9]\d*(x[1-9]\d*)+", self.tp_mesh):
            refuse(asked, "is not ROWSxCOLS", "tp=4,tp_mesh=2x2")
        rows, cols, *deeper = map(int, self.tp_mesh.split("x"))
        if deeper:
            why = "a third dim cuts weights over ranks that read other rows of the batch, which is dp"
            refuse(asked, why, f"tp={rows * cols},tp_mesh={rows}x{cols},dp_shard={deeper[0]}")
        if rows == 1 < cols:
            refuse(asked, "cuts inputs alone, which sends more than any other shape", f"tp={cols},tp_mesh=none")
        if rows == cols == 1 != self.tp_size:
            refuse(asked, "is a grid of one rank", "tp_mesh=none")
        if self.tp_size not in (-1, rows * cols):
            refuse(
                asked,
                f"has {rows * cols} ranks, and tp_size={self.tp_size}",
                f"tp={rows * cols},tp_mesh={rows}x{cols}",
            )
        if cols > 1 and self.tp_overlap:
            refuse("tp_overlap=true", f"{asked} cuts products along both dims", "tp_overlap=false")

    @property
    def tp_row_size(self) -> int:
        """Rows of the grid; all ranks of tp where there is no other."""
        return int(self.tp_mesh.partition("x")[0]) if self.tp_mesh else self.tp_size

    @property
    def tp_col_size(self) -> int:
        """Columns of the grid, over which inputs of products are cut as well; 1: there is no grid."""
        return int(self.tp_mesh.partition("x")[2]) if self.tp_mesh else 1

    @property
    def grid_sizes(self) -> dict[str, int]:
        """Return the size of each mesh axis with tp's ranks as a grid, slow links first."""
        kept = {axis: size for axis, size in self.sizes.items() if axis != "tp"}  # the innermost
        return {**kept, "tp_row": self.tp_row_size, "tp_col": self.tp_col_size}

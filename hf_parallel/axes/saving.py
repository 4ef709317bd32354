"""How checkpoints are written."""

from __future__ import annotations

from dataclasses import dataclass

from hf_parallel.axes.axis import Axis, Keys, key


@dataclass(frozen=True)
class SavingKeys(Keys):
    async_save: bool = key(False, "write checkpoints from a copy in host memory while training goes on")


class Saving(Axis[None, None]):
    """Read by the checkpoint room at each save."""

    name = "saving"
    alone = True


SAVING = SavingKeys.axis = Saving()

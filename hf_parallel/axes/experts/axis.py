"""Expert parallelism: whole experts on different ranks. Understood and planned for, not built yet."""

from __future__ import annotations

from dataclasses import dataclass

from hf_parallel.axes.axis import Axis, Keys, NotBuilt, key


@dataclass(frozen=True)
class ExpertKeys(Keys):
    ep_size: int = key(
        1, "ranks that hold different experts", not_built=(NotBuilt("expert parallelism", "ep_size=1"),)
    )


class Experts(Axis[None, None]):
    """A second view of ranks that other axes have: no axis of the mesh."""

    name = "ep"


EXPERTS = ExpertKeys.axis = Experts()

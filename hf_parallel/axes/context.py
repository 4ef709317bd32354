"""Context parallelism: each rank holds a part of every sequence. Understood and planned for, not built yet."""

from __future__ import annotations

from dataclasses import dataclass

from hf_parallel.axes.axis import Axis, Keys, MeshAxis, NotBuilt, key


@dataclass(frozen=True)
class ContextKeys(Keys):
    cp_size: int = key(1, "ranks that share every sequence", not_built=(NotBuilt("context parallelism", "cp_size=1"),))
    context_parallel: str = key("ring", "how `cp` shares sequences: `ring` or `ulysses`", choices=("ring", "ulysses"))


class Context(Axis[None, None]):
    """Its place in the mesh is fixed already, so that nothing moves when it comes."""

    name = "cp"
    mesh_axes = (MeshAxis("cp", distance=1),)
    inside = True


CONTEXT = ContextKeys.axis = Context()

"""The pipelined models of one mesh: a script on the last stage may call several, and other stages answer by number."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from hf_parallel.axes.pipeline.engine import PipelineEngine
    from hf_parallel.axes.pipeline.unscheduled import Session
    from hf_parallel.mesh import ParallelMesh


@dataclass
class Pipelines:
    """`engines`: weak references, in the same order on all ranks. `session`: answers a script's calls of them."""

    engines: list[weakref.ref[PipelineEngine]] = field(default_factory=list)
    session: Session | None = None  # while a script runs on the last stage alone

    def add(self, engine: PipelineEngine) -> int:
        """Its number."""
        self.engines.append(weakref.ref(engine))
        return len(self.engines) - 1

    def engine(self, number: int) -> PipelineEngine:
        """The engine of this number."""
        engine = self.engines[number]()
        assert engine is not None  # it lives as long as its model
        return engine


_OF_MESH: WeakKeyDictionary[ParallelMesh, Pipelines] = WeakKeyDictionary()


def pipelines_of(mesh: ParallelMesh) -> Pipelines:
    """Those of a mesh; the same object each time."""
    return _OF_MESH.setdefault(mesh, Pipelines())

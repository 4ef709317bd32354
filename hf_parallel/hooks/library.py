"""`hf_parallel.parallelize`: what a loop written by hand calls, without a layout for the whole process.

Of all patches only those of PEFT and bitsandbytes are put in place, when the script imports these libraries: adapters
come into a parallel model, and a model with adapters becomes parallel, as under the runner. And what a script writes
into weights, what masks of a pipeline's micro-batches hide, and how a layer is recomputed, where transformers is older
than that.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hf_parallel.apply.parallelize import parallelize_model, state_of
from hf_parallel.ask.config import ParallelConfig
from hf_parallel.ask.session import of_session
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.axis import Packing
from hf_parallel.hooks import loss_scales, model_parts, own_files, own_loops, runtime
from hf_parallel.hooks.module_hooks import tell_of_earlier_hooks
from hf_parallel.hooks.patching import Patch, Undo, apply_patches, apply_when_imported, list_declared
from hf_parallel.hooks.peft.before import make_parallel_below
from hf_parallel.hooks.trainer.joining import read_asked_key, refuse_joining
from hf_parallel.ranks.mesh import ParallelMesh

if TYPE_CHECKING:
    from torch import nn


@dataclass
class InPlace:
    """The patches in place can be undone. A layout for the whole process does so: its own are the same and more."""

    undo_list: list[Undo] = field(default_factory=list)


@functools.wraps(parallelize_model, assigned=("__doc__",))
def parallelize(
    model: nn.Module,
    config: ParallelConfig | str | None = None,
    mesh: ParallelMesh | None = None,
    pack: Packing | None = None,
) -> nn.Module:
    undo_list = of_session(InPlace).undo_list
    if runtime.current() is None:
        asked = ParallelConfig.parse(config or ParallelConfig()) if mesh is None else mesh.config
        if read_asked_key(asked)[1]:
            refuse_joining("a loop written by hand makes its own batches", config=asked)
        if asked.shares_batches:
            why = "a loop written by hand makes its own batches"
            refuse(f"batch_shares={asked.batch_shares}", why, "the runner")
    if runtime.current() is None and not undo_list:
        rooms = {room.__name__ for room in (loss_scales, model_parts, own_files, own_loops)}
        undo_list.extend(apply_patches([patch for patch in list_declared() if patch.room in rooms]))
        # For peft now or after its import, in the midst of which the list of all patches could not be imported.
        packages = ["peft", "bitsandbytes"]
        if "bitsandbytes" in sys.modules:
            undo_list.append(apply_when_imported(packages.pop(), _iterate_library_patches("bitsandbytes")))
        # PEFT imports bitsandbytes itself.
        undo_list.append(apply_when_imported("peft", _iterate_library_patches(*packages)))
    make = functools.partial(parallelize_model, config=config, mesh=mesh, pack=pack)
    with tell_of_earlier_hooks(model):
        if hasattr(model, "peft_config") and state_of(model) is None:
            make_parallel_below(model, make)
        else:
            make(model)
    state = state_of(model)
    assert state is not None
    runtime.equalise_within_model(of=state.mesh)  # dropout: ranks that hold the same drop the same
    return model


def _iterate_library_patches(*packages: str) -> Iterator[Patch]:
    """Yield the patches of libraries that are imported. The list of all takes a while to import, so it waits."""
    from hf_parallel.hooks.patches import list_patches

    imported = [package for package in packages if package in sys.modules]
    yield from (patch for patch in list_patches() if patch.library in imported)

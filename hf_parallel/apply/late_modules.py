"""Modules that a script puts into a model after it became parallel: equal on all ranks, or refused.

Data ranks share them out (`add_late_parameters`), and adapters are placed when they come.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_module_registration_hook

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.data.parameters import send_from_first
from hf_parallel.axes.pipeline.engine import PipelineEngine
from hf_parallel.axes.pipeline.stage_runner import pipelines_of
from hf_parallel.axes.tensor.layers import PartialGradient
from hf_parallel.model.anatomy import list_transformer_blocks
from hf_parallel.ranks import messages
from hf_parallel.ranks.mesh import ParallelMesh


def watch_for_late_modules(model: nn.Module, mesh: ParallelMesh, pipeline: PipelineEngine | None) -> None:
    """Look for modules that have come into `model`, in the first forward pass after any module came anywhere.

    Ranks may have drawn other numbers for them: the first rank of pp and tp sends its own to the others.

    Raises:
        SpecError: in that forward pass; a module lies where a tp rank sees a part of the tokens or of the columns. And
            when it comes, if it is another model's, which data ranks share out.
    """
    known, changed = weakref.WeakSet(model.modules()), [False]
    layers, cuts = {id(layer) for layer in list_transformer_blocks(model)}, mesh.size("tp") > 1
    places = model.named_modules() if cuts else ()
    guarded = tuple(f"{name}." for name, one in places if id(one) in layers or isinstance(one, PartialGradient))

    def note(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        changed[0] = True
        inner = child.modules() if child is not None and parent in known and mesh.config.sharing_size > 1 else ()
        if any(isinstance(one, FSDPModule) and one not in known for one in inner):
            why = f"another model's weights, which {mesh.config.sharing_size} ranks share out for it alone"
            refuse(f"{name}, put into a parallel model", why, do="a module of its own, loaded again, works")

    def look(module: nn.Module, args: tuple) -> None:
        if not changed[0] or pipelines_of(mesh).session is not None:  # the last stage alone
            return
        changed[0], named = False, dict(module.named_modules())
        wrappers = [one for one in named.values() if hasattr(one, "base_layer") or hasattr(one, "modules_to_save")]
        placed = {id(one) for wrapper in wrappers for one in wrapper.modules()}  # PEFT's, which are placed already
        late = {name: one for name, one in named.items() if one not in known and id(one) not in placed}
        known.update(named.values())
        for name in late:
            if f"{name}.".startswith(guarded):
                why = f"tp_size={mesh.size('tp')} has split the layer before, and a rank sees a part of its tokens"
                refuse(f"{name}, put into a parallel model", why, do="an adapter of PEFT works, and so does tp_size=1")
        tensors: dict[str, torch.Tensor] = {}
        for name, one in late.items():
            own = (*one.named_parameters(recurse=False), *one.named_buffers(recurse=False))
            tensors |= {f"{name}.{key}": tensor for key, tensor in own}
        if late and pipeline is not None:  # all stages take the first one's values, whichever computes with them
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            held = messages.gather_objects(shapes, mesh.group_on_host("pp"))
            common = [t for name, t in tensors.items() if all(there.get(name) == t.shape for there in held)]
            if mesh.config.sharing_size == 1:
                send_from_first(common, [mesh.group("pp")], mesh.device)
            pipeline.late += [tensor for tensor in common if isinstance(tensor, nn.Parameter)]
        if late and cuts and mesh.config.sharing_size == 1:
            send_from_first(tensors.values(), [mesh.group("tp")], mesh.device)

    handle = register_module_module_registration_hook(note)
    weakref.finalize(model, handle.remove)
    model.register_forward_pre_hook(look, prepend=True)

"""PEFT's other methods, whose adapters every data rank keeps whole; their gradients are averaged.

A method may read weights of the base when it makes a layer, and write to them, so each is made with whole weights:

    weight of one target    gathered -> PEFT makes its layer -> what it wrote is kept in parts again
    adapters, buffers       whole, with the first rank's values
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from hf_parallel.ask.spec import refuse
from hf_parallel.axes.data.parameters import send_from_first
from hf_parallel.axes.data.units import WHOLE
from hf_parallel.axes.data.whole import keep_whole
from hf_parallel.axes.data.zero import gather_around
from hf_parallel.axes.tensor.tensor_parallel import shard_parameter
from hf_parallel.checkpoint.slices import find_local_part, read_part
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import replacing
from hf_parallel.ranks.local import hold_other_tensors
from hf_parallel.ranks.mesh import get_stored, place_as

if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTuner

    from hf_parallel.apply.parallelize import ParallelState


@contextlib.contextmanager
def make_layers_of_whole_weights(tuner: BaseTuner) -> Iterator[None]:
    """Let a tuner see whole weights of each module for which it makes a layer inside the `with`."""
    create = tuner._create_and_replace

    def create_of_whole(config: object, adapter_name: str, target: nn.Module, *args: object, **kwargs: object) -> None:
        with hold_whole_weights(target):
            create(config, adapter_name, target, *args, **kwargs)

    vars(tuner)["_create_and_replace"] = create_of_whole
    try:
        yield
    finally:
        del vars(tuner)["_create_and_replace"]


@contextlib.contextmanager
def hold_whole_weights(*modules: nn.Module) -> Iterator[None]:
    """Let modules and what is in them hold whole weights inside the `with`; keep what is written there. Collective."""
    held: list[tuple[DTensor, nn.Parameter]] = []
    with contextlib.ExitStack() as stack:
        for module in dict.fromkeys(inner for outer in modules for inner in outer.modules()):
            whole: dict[str, nn.Parameter] = {}
            for name, parameter in module._parameters.items():
                if isinstance(parameter, DTensor):
                    value = _gather_on_device(parameter).clone()
                    whole[name] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                    held.append((parameter, whole[name]))
            stack.enter_context(hold_other_tensors(module, whole))
        yield
    for stored, value in held:
        _keep_written(stored, value.detach())


@torch.no_grad()
def _gather_on_device(parameter: DTensor) -> torch.Tensor:
    """Return a whole parameter on the device, also of one that rests on the host. Collective."""
    return place_as(parameter, get_stored(parameter).to(parameter.device_mesh.device_type)).full_tensor()


@torch.no_grad()
def _keep_written(parameter: DTensor, value: torch.Tensor) -> None:
    """Keep this rank's part of the first rank's value, if it is another one: devices may factorise in their own ways.

    The numbers themselves are compared, because a write to `weight.data` leaves no trace.
    """
    mesh, part = parameter.device_mesh, find_local_part(parameter)
    value, own = value.to(mesh.device_type, parameter.dtype), get_stored(parameter)
    changed = torch.tensor(not torch.equal(read_part(value, part), own.to(value.device)), device=value.device).int()
    for group in mesh.get_all_groups():
        dist.all_reduce(changed, dist.ReduceOp.MAX, group)
    if changed:
        send_from_first([value], list(mesh.get_all_groups()), value.device)
        own.copy_(read_part(value, part))


@contextlib.contextmanager
def merge_into_whole_weights(model: nn.Module) -> Iterator[None]:
    """Let the layers of PEFT in a model merge, and take out again, with whole weights of one layer at a time."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    with contextlib.ExitStack() as stack:
        for layer in (module for module in model.modules() if isinstance(module, BaseTunerLayer)):
            own = {"merge": layer.merge, "unmerge": layer.unmerge}
            calls = {name: functools.partial(_call_of_whole, layer, call) for name, call in own.items()}
            stack.enter_context(replacing(layer, **calls))
        yield


def _call_of_whole(layer: nn.Module, call: Callable, *args: object, **kwargs: object) -> None:
    with hold_whole_weights(layer):
        call(*args, **kwargs)


def has_whole_adapters(state: ParallelState) -> bool:
    """Return whether data ranks keep adapters of a parallel model whole."""
    return WHOLE in vars(state.root)


def unshard(module: nn.Module, state: ParallelState) -> None:
    """Make parameters whole over the data ranks, and split over tp as they were. Collective over this stage."""
    for name, parameter in module._parameters.items():
        if isinstance(parameter, DTensor):
            axes = parameter.device_mesh.mesh_dim_names or ("",)
            tp = [p for axis, p in zip(axes, parameter.placements, strict=True) if axis == "tp"]
            whole_value = nn.Parameter(_gather_on_device(parameter), requires_grad=parameter.requires_grad)
            module._parameters[name] = whole_value
            if tp and isinstance(tp[0], Shard):
                shard_parameter(module, name, state.mesh["tp"], tp[0].dim, state.mesh.device)


def list_own_tensors(model: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a model that are whole on this rank."""
    return [tensor for tensor in (*model.parameters(), *model.buffers()) if not isinstance(tensor, DTensor)]


def keep_adapters_whole(model: nn.Module, state: ParallelState, former: list[torch.Tensor]) -> None:
    """Keep whole what has come into a model since it had the tensors `former`. Collective."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    around = {module: module for module in model.modules() if isinstance(module, BaseTunerLayer)}
    # Examples with an adapter each do not call the layer inside.
    around |= {
        wrapper.token_adapter: wrapper for wrapper in model.modules() if isinstance(wrapper, TrainableTokensWrapper)
    }
    for layer, called in around.items():
        unit = layer.get_base_layer()
        if isinstance(unit, FSDPModule):
            gather_around(unit, called)
            unit.set_unshard_in_backward(True)  # HiRA multiplies by the weight, also by an embedding's
    for wrapper in (module for module in model.modules() if isinstance(module, ModulesToSaveWrapper)):
        for copy in wrapper.modules_to_save.values():
            for part in copy.modules():
                unshard(part, state)
            copy._hf_parallel_placed = True
    known = set(map(id, former))
    keep_whole(state.root, state.mesh, (tensor for tensor in list_own_tensors(model) if id(tensor) not in known))


def make_parallel_below_wrappers(model: PeftModel, parallelize: Callable[[nn.Module], object]) -> None:
    """Make a base parallel while its own layers stand where wrappers of PEFT were; then keep the adapters whole."""
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    if not isinstance(model, PeftModel) or any(
        config.peft_type.value == "ADAPTION_PROMPT" for config in model.peft_config.values()
    ):
        refuse("adapters from before the layout was active", "whole on every rank", do="launch with --parallel first")
    base = model.get_base_model()
    places = [
        (parent, name, child)
        for parent in base.modules()
        if not isinstance(parent, kinds)
        for name, child in parent.named_children()
        if isinstance(child, kinds)
    ]
    for parent, name, wrapper in places:
        setattr(
            parent, name, wrapper.get_base_layer() if isinstance(wrapper, BaseTunerLayer) else wrapper.original_module
        )
    former = [*base.parameters(), *base.buffers()]
    parallelize(base)
    state = runtime.find_parallel_state(base)
    assert state is not None
    former += [*base.parameters(), *base.buffers()]
    for parent, name, wrapper in places:
        setattr(parent, name, wrapper)
    keep_adapters_whole(model, state, former)

"""Weights of a parallel model, of which each rank stores a part: whole tensors, new values, new sizes."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.weak import WeakIdKeyDictionary

from hf_parallel.ask.keys.data import offload_folder, parameters_rest
from hf_parallel.ask.session import of_session
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.data.parameters import (
    Held,
    add_late_parameters,
    assign_memory,
    find_holder,
    find_holder_at,
    iterate_late_parameters,
    remove_late_parameters,
)
from hf_parallel.axes.data.units import (
    WHOLE,
    get_groups_of,
    iterate_parameter_groups,
    iterate_sharded_modules,
    list_modules,
)
from hf_parallel.axes.pipeline.stages import StandIn
from hf_parallel.axes.tensor.layers import TensorParallelLayer
from hf_parallel.axes.tensor.tensor_parallel import shard_parameter
from hf_parallel.checkpoint import gather_state_dict
from hf_parallel.checkpoint.hub_format import find_tied_parameters
from hf_parallel.checkpoint.slices import find_local_part, list_axes_and_dims, read_part
from hf_parallel.model.anatomy import StoredOrder, is_tie_broken
from hf_parallel.ranks import assert_all_ranks
from hf_parallel.ranks.mesh import ParallelMesh, find_stored_parameter, get_stored, is_copy, place_as
from hf_parallel.ranks.steps import call_before_steps

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.optim import Optimizer
    from transformers import PreTrainedModel

_models: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def remember_model(model: nn.Module) -> None:
    """Let `full_tensor` know in which order this model stores its packed weights."""
    _models.add(model)


def list_parallel_models() -> list[nn.Module]:
    """Return the parallel models of this process."""
    return list(_models)


def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return a copy of the `model.state_dict()` of one process, on rank 0's CPU; empty on the other ranks.

    Collective: all ranks call it. A model that is not parallel gives its own state dict.
    """
    state: Any = getattr(model, "_hf_parallel", None)
    if state is None:
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}
    assert_all_ranks("full_state_dict")
    return gather_whole_state(model, state.mesh)


def gather_whole_state(model: nn.Module, mesh: ParallelMesh) -> dict[str, torch.Tensor]:
    """Return what `full_state_dict` returns; all ranks are known to call it."""
    whole = gather_state_dict(model, mesh)
    own = {get_stored(parameter).data_ptr() for parameter in (*model.parameters(), *model.buffers())}
    # One copy for all names of a tied weight.
    copies = {id(tensor): tensor.clone() for tensor in whole.values() if tensor.data_ptr() in own}
    return {name: copies.get(id(tensor), tensor) for name, tensor in whole.items()}


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a whole parameter, or its gradient, on every rank that has a part of it. Collective over these ranks.

    A tensor that is whole is returned as it is. Under a pipeline a stage has the parameters of its layers.

    Raises:
        ValueError: a tensor of the size of a packed weight, whose stored order is not known.
    """
    if not isinstance(tensor, DTensor):
        return tensor
    detached: Any = tensor.detach()
    order, whole = order_of(tensor), detached.full_tensor()
    return whole if order is None else order.to_own(whole)


@torch.no_grad()
def gather_alike(tensors: list[DTensor], order: StoredOrder | None) -> list[torch.Tensor]:
    """Return whole tensors in the model's own order, of some that are cut alike: one gather per dtype. Collective."""
    mesh, wholes = tensors[0].device_mesh, dict[int, torch.Tensor]()
    placements = [_after_another_dim(placement) for placement in tensors[0].placements]
    for dtype in {tensor.dtype: None for tensor in tensors}:
        chosen = [number for number, tensor in enumerate(tensors) if tensor.dtype == dtype]
        own = torch.stack([get_stored(tensors[number]) for number in chosen])
        shape = torch.Size((len(chosen), *tensors[0].shape))
        stride = torch.empty(shape, device="meta").stride()
        found = DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride).full_tensor()
        wholes |= zip(chosen, found, strict=True)
    return [wholes[n] if order is None else order.to_own(wholes[n]) for n in range(len(tensors))]


def _after_another_dim(placement: Any) -> Any:
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    return Shard(placement.dim + 1) if placement.is_shard() else placement


@torch.no_grad()
def reduce_to_whole_number(tensor: Any) -> torch.Tensor:
    """Return the one number of a DTensor as a plain tensor, such as a sum over a sharded parameter.

    Collective over the ranks that have a part, in groups apart from training's; nothing is sent where each has it.
    """
    if _find_groups() is None or all(placement.is_replicate() for placement in tensor.placements):
        return tensor.detach().full_tensor()
    own = get_stored(tensor).detach()  # in this order: torch 2.15 reduces a norm that is detached
    exact = torch.int64 if own.dtype in _EXACT else torch.promote_types(own.dtype, torch.float64)

    def combine(placement: Any, numbers: torch.Tensor) -> torch.Tensor:
        norm_type = getattr(placement, "norm_type", None)
        if norm_type is not None:  # of sums of powers that are norms already
            return torch.linalg.vector_norm(numbers, norm_type)
        return _COMBINED[getattr(placement, "reduce_op", "sum")](numbers)

    number = _reduce_over_parts(tensor, own.sum().to("cpu", exact), combine)  # zero where another rank stores it
    return number.to(own.device, own.dtype).reshape(tensor.shape)


def compare_whole(compare: Callable[..., bool], one: Any, other: Any, *args: Any, **kwargs: Any) -> bool:
    """Compare two tensors as if both were whole, such as by `torch.equal`: one answer on all ranks that have a part.

    Collective over these ranks, as `reduce_to_whole_number` is.
    """
    alike = isinstance(one, DTensor) and isinstance(other, DTensor) and one.shape == other.shape
    alike = alike and (one.device_mesh, one.placements) == (other.device_mesh, other.placements)
    if not alike or _find_groups() is None or any(placement.is_partial() for placement in one.placements):
        return compare(full_tensor(one), full_tensor(other), *args, **kwargs)
    own = compare(get_stored(one).detach(), get_stored(other).detach(), *args, **kwargs)
    return bool(_reduce_over_parts(one, torch.tensor(own), lambda _, answers: answers.all()))


def _find_groups() -> Any:
    states: list[Any] = [vars(model)["_hf_parallel"] for model in _models if "_hf_parallel" in vars(model)]
    return states[0].mesh.groups if states else None


def _reduce_over_parts(tensor: Any, number: torch.Tensor, combine: Callable[[Any, torch.Tensor], Any]) -> torch.Tensor:
    """Combine each rank's number of its part of a tensor, on one axis of the mesh after the other."""
    for axis, placement in reversed(list(enumerate(tensor.placements))):
        if not placement.is_replicate():
            group = _find_groups().for_numbers(dist.get_process_group_ranks(tensor.device_mesh.get_group(axis)))
            numbers = [torch.empty_like(number) for _ in range(group.size())]
            dist.all_gather(numbers, number, group=group)
            number = combine(placement, torch.stack(numbers))
    return number


@torch.no_grad()
def is_same_on_ranks(whole: torch.Tensor, tensor: Any) -> bool:
    """Return whether all ranks that hold a part of `tensor` have the same `whole` tensor. Collective over them."""
    groups = _find_groups()
    if groups is None:
        return True
    number, same = whole.detach().sum(dtype=torch.float64).nan_to_num().cpu(), True
    for axis in range(tensor.device_mesh.ndim):
        group = groups.for_numbers(dist.get_process_group_ranks(tensor.device_mesh.get_group(axis)))
        numbers = [torch.empty_like(number) for _ in range(group.size())]
        dist.all_gather(numbers, number, group=group)
        same &= all(torch.equal(one, number) for one in numbers)
    return same


_EXACT = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_COMBINED: Any = {"sum": torch.sum, "avg": torch.mean, "product": torch.prod, "max": torch.amax, "min": torch.amin}


@dataclass
class _Packed:
    """The shapes of packed weights, for this many models.

    Attributes:
        derived: what was computed of weights element by element -> the order of these.
        constant: tensors of one number, which are the same in any order.
    """

    models: int = 0
    shapes: set[torch.Size] = field(default_factory=set)
    derived: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    constant: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)


def _find_packed_shapes() -> set[torch.Size]:
    packed = of_session(_Packed)
    if packed.models != len(_models):
        modules = [module for model in _models for module in model.modules() if "stored_orders" in vars(module)]
        shapes = {module._parameters[name].shape for module in modules for name in module.stored_orders}  # type: ignore
        packed.models, packed.shapes = len(_models), shapes
    return packed.shapes


def _iterate_alike(tensor: DTensor) -> Iterator[tuple[bool, StoredOrder | None]]:
    """Yield, for each parameter of this shape, whether the tensor is it, its data or gradient, and its row order."""
    address = get_stored(tensor).data_ptr()
    for module in (module for model in _models for module in model.modules()):
        orders = vars(module).get("stored_orders", {})
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.shape != tensor.shape:
                continue
            stored = find_stored_parameter(parameter)
            known = [one for one in (parameter, parameter.grad, stored, stored.grad) if isinstance(one, DTensor)]
            is_own = any(tensor is one or (address and get_stored(one).data_ptr() == address) for one in known)
            yield bool(is_own), orders.get(name)


def knows_order(tensor: DTensor) -> bool:
    """Return whether it is known in which order a tensor stores its rows."""
    if not _find_packed_shapes() or is_constant(tensor) or tensor in of_session(_Packed).derived:
        return True
    return any(is_own for is_own, _ in _iterate_alike(tensor))


def is_constant(tensor: DTensor) -> bool:
    """Return whether all numbers of a tensor are the same, as in the gradient of a sum."""
    return not any(get_stored(tensor).stride()) or tensor in of_session(_Packed).constant


def keep_order(result: Any, sources: Iterable[Any]) -> None:
    """Note in which order a result stores its rows that was computed of weights, element by element."""
    if not _find_packed_shapes() or not isinstance(result, DTensor) or not result.ndim:
        return
    alike = [one for one in sources if isinstance(one, DTensor) and one.shape == result.shape]
    if alike and all(map(is_constant, alike)):
        of_session(_Packed).constant[result] = True
    alike = [one for one in alike if not is_constant(one)]
    if alike and all(map(knows_order, alike)) and len({id(order) for order in map(order_of, alike)}) == 1:
        of_session(_Packed).derived[result] = order_of(alike[0])
        of_session(_Packed).constant.pop(result, None)


def order_of(tensor: DTensor) -> StoredOrder | None:
    """Return the order in which the rows of a parameter, its data or its gradient are stored; None: the model's own.

    Raises:
        ValueError: the tensor may be a packed weight's, but is not known to be.
    """
    if not list_axes_and_dims(tensor):
        return None  # not cut, as a mean over rows
    derived, alike = of_session(_Packed).derived, False
    if tensor in derived:
        return derived[tensor]
    for is_own, order in _iterate_alike(tensor):
        if is_own:
            return order
        alike = alike or order is not None
    if alike:
        raise ValueError(
            f"hf_parallel: a tensor of {tuple(tensor.shape)} may hold packed rows in another order; "
            "give full_tensor the parameter or its gradient"
        )
    return None


# ---- `resize_token_embeddings`: embedding and head become whole, grow and are cut again
# transformers' own functions draw the new rows, from the weights and random numbers of one process on every rank.


def resize_token_embeddings(
    model: PreTrainedModel,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    """Resize a parallel model that has no optimizer yet as transformers does. Collective where the size changes.

    Raises:
        NotImplementedError: a model whose embedding and head are of kinds that cannot be cut again.
    """
    embedding = model.get_input_embeddings()
    rows, step = embedding.weight.shape[0], pad_to_multiple_of or 1
    new_rows = -(-(rows if new_num_tokens is None else new_num_tokens) // step) * step
    if new_rows == rows:
        return embedding
    assert_all_ranks("resize_token_embeddings")
    # The parameters of embedding and head, and whatever shares them: an encoder's embedding, BERT's bias of the head
    modules = {id(module): name for name, module in model.named_modules()}
    head = model.get_output_embeddings()
    ends = {modules[id(end)]: end for end in (embedding, head) if end is not None}
    tied = find_tied_parameters(model)
    leaves = ((name, leaf) for name, end in ends.items() for leaf in ("weight", "bias"))
    present = [f"{name}.{leaf}" for name, leaf in leaves if getattr(ends[name], leaf, None) is not None]
    sources = {name: tied.get(name, name) for name in (*present, *tied, *tied.values())}
    changed = {sources[name] for name in present}
    names = {name: source for name, source in sources.items() if source in changed}
    owners = [model.get_submodule(name.rpartition(".")[0]) for name in names]
    plain = isinstance(embedding, nn.Embedding) and isinstance(head, nn.Linear | None)
    adapted = any(getattr(owner, "adapted", False) or hasattr(owner, "base_layer") for owner in owners)
    if not plain or adapted or not _is_resize_known(model) or getattr(model, "is_loaded_in_4bit", False):
        raise NotImplementedError(
            f"hf_parallel: resize_token_embeddings from {rows} to {new_rows} rows of a {type(model).__name__} is not "
            "part of this version; resize and save the model in one process first"
        )
    whole = _make_resized_weights(model, {name: names[name] for name in present}, new_rows, mean_resizing)
    _place_resized_weights(model, names, whole, new_rows)
    model.config.get_text_config().vocab_size = model.vocab_size = new_rows
    if hasattr(model.config, "decoder_vocab_size"):
        model.config.decoder_vocab_size = new_rows
    if hasattr(model, "final_logits_bias"):
        model._resize_final_logits_bias(new_rows)
    return model.get_input_embeddings()


def _is_resize_known(model: PreTrainedModel) -> bool:
    """Return whether nothing but embedding, head and what BART adds to logits grows with the vocabulary.

    Not in Marian with two vocabularies and not in Gemma 3n, whose layers have embeddings of their own.
    """
    if type(model).resize_token_embeddings.__qualname__.startswith("PreTrainedModel."):
        return True
    return hasattr(model, "final_logits_bias") and getattr(model.config, "share_encoder_decoder_embeddings", True)


def _make_resized_weights(
    model: PreTrainedModel, names: dict[str, str], rows: int, mean: bool
) -> dict[str, torch.Tensor]:
    """Return rank 0's new weights, whole, by name. They are drawn on the host, as after `from_pretrained`.

    Args:
        names: the embedding's weight, the head's weight and bias, if there are; and what each is tied to, or itself.
    """
    mesh, wanted, whole = model._hf_parallel.mesh, set(names.values()), {}
    gathered = gather_state_dict(model, mesh, wanted=wanted.__contains__)
    for name in sorted(wanted):
        described = model.get_parameter(name)
        empty = torch.empty(described.shape, dtype=described.dtype, device=mesh.device)
        sent = gathered[name].to(mesh.device) if mesh.rank == 0 else empty
        dist.broadcast(sent, src=0)
        whole[name] = sent.cpu()
    del gathered, sent
    (_, kept), *others = names.items()
    embedding = nn.Embedding(1, 1, device="meta")
    embedding.num_embeddings, embedding.embedding_dim = whole[kept].shape
    embedding.weight, embedding.padding_idx = nn.Parameter(whole[kept]), model.get_input_embeddings().padding_idx
    found = {kept: model._get_resized_embeddings(embedding, rows, None, mean).weight}
    if others:
        head = nn.Linear(1, 1, bias=len(others) > 1, device="meta")
        for name, source in others:
            setattr(head, name.rpartition(".")[2], embedding.weight if source == kept else nn.Parameter(whole[source]))
        head.out_features, head.in_features = head.weight.shape
        resized = model._get_resized_lm_head(head, rows, mean_resizing=mean)
        if resized.bias is not None:  # a tied head counts as resized, and Transformers fills its bias with zeros
            resized.bias.data = nn.functional.pad(resized.bias.data, (0, rows - len(resized.bias)))
        found = {source: getattr(resized, name.rpartition(".")[2]) for name, source in others} | found
    old = whole[kept].shape[0]
    made = {name: tensor.detach().to(mesh.device) for name, tensor in found.items()}
    for tensor in made.values() if rows > old else ():  # the new rows of rank 0, should ranks have drawn others
        drawn = tensor[old:].contiguous()
        dist.broadcast(drawn, src=0)
        tensor[old:] = drawn
    return made


def _place_resized_weights(
    model: PreTrainedModel, names: dict[str, str], whole: dict[str, torch.Tensor], rows: int
) -> None:
    """Put each rank's part in the place of the former one."""
    state, ends = model._hf_parallel, {model.get_submodule(name.rpartition(".")[0]) for name in names}
    local = [end for end in ends if not isinstance(end, StandIn)]
    trained = {name: model.get_parameter(name).requires_grad for name in names}
    for module in iterate_sharded_modules(state.root):
        module.reshard()
    remove_late_parameters(state.root, local)
    for source, tensor in whole.items():
        same = [name.rpartition(".") for name, kept in names.items() if kept == source]
        places = [(model.get_submodule(path), leaf) for path, _, leaf in same]
        places.sort(key=lambda place: not isinstance(place[0], TensorParallelLayer))  # the first one cuts the others'
        parameter = nn.Parameter(tensor, requires_grad=trained[source])
        for number, (owner, leaf) in enumerate(places):
            if isinstance(owner, StandIn):
                owner.register_parameter(leaf, parameter)
            else:
                owner._parameters[leaf] = parameter
            if number == 0 and isinstance(owner, TensorParallelLayer):
                shard_parameter(owner, leaf, state.mesh["tp"], 0, state.mesh.device)
                parameter = owner.get_parameter(leaf)
    for end in (getattr(end, "real", end) for end in ends):
        if isinstance(end, nn.Embedding):
            end.num_embeddings = rows
            end.padding_idx = None if end.padding_idx is not None and end.padding_idx >= rows else end.padding_idx
        elif hasattr(end, "out_features"):
            end.out_features = rows
    if state.mesh.config.sharing_size > 1:
        add_late_parameters(state.root)


# ---- New values in the place of a weight that ranks hold parts of: `p.data = x`, `module.weight = nn.Parameter(x)`
# Each rank stores its part of x. Of torch alone it is lost in silence: FSDP2 puts the parameter that it knows back
# into its module at the next gather. So a parallel model keeps its parameter, which an optimizer may know, and takes
# values.

#: Parameters whose values were taken, and the lines that gave them.
_taken: Any = WeakIdKeyDictionary()
#: Parameters of two names that the config ties, of which a script has set one: its module and name, and the hook that
#: refuses the next forward pass.
_untied: Any = WeakIdKeyDictionary()
#: Parameters whose places in a parallel model others have taken -> (model, name); kept alive only by their holders.
former_parameters: Any = WeakIdKeyDictionary()
_checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@torch.no_grad()
def store(parameter: DTensor, value: torch.Tensor, what: str = "p.data = x") -> None:
    """Let each rank store its part of `value`, which lies as the parameter does, lies elsewhere, or is whole.

    Args:
        what: the script's line, for a refusal.
    """
    found = find_holder(parameter, list_parallel_models())
    if value.shape != parameter.shape:
        why = f"a tensor of {tuple(value.shape)} for one of {tuple(parameter.shape)}, of which ranks hold parts"
        refuse(what, why, do="give it one of the same shape, or let one process change the model")
    if not isinstance(value, DTensor):
        if not is_same_on_ranks(value, parameter):
            why = f"the {parameter.device_mesh.size()} ranks of the parameter have other numbers"
            refuse(what, why, do="give it what all ranks have, such as noise drawn after torch.manual_seed")
        part = read_part(value, find_local_part(parameter, order_of(parameter)))
        part = part.to(get_stored(parameter).device, copy=True)  # a view would keep the whole
        own = place_as(parameter, part)
    elif value.device_mesh != parameter.device_mesh:
        why = "it lies on another mesh"
        refuse(what, why, do="give it what was made of the same parameter, or a whole tensor")
    else:
        alike = value.placements == parameter.placements
        own = value if alike else value.redistribute(placements=parameter.placements)
    local: Any = own._local_tensor
    local = local.wait() if isinstance(local, AsyncCollectiveTensor) else local
    if local is not own._local_tensor or not local.is_contiguous():
        own = place_as(own, local.contiguous())
    if is_copy(parameter):
        parameter._local_tensor.copy_(own._local_tensor)
        return
    if found is not None:  # refuse what cannot be stored before anything is changed
        advice, kind = "p.data.copy_(x)", type(parameter._local_tensor)
        if offload_folder(found.offload) and parameters_rest(found.offload):
            refuse(what, f"with offload={found.offload} parameters lie in a file", advice)
        if kind is not torch.Tensor:
            refuse(what, f"of a {kind.__name__}, whose memory is its own", advice)
        if found.group._reset_sharded_params and parameter._local_tensor.dtype != own.dtype:
            why = f"from {parameter._local_tensor.dtype} to {own.dtype} after a forward pass of a sharded model"
            refuse(what, why, do="give the model another dtype before it runs")
    assign_memory(parameter, own, found)


@functools.cache
def take_exchanged() -> None:
    """Let parallel models take the values of parameters set in them from now on. A second call changes nothing."""
    register_module_parameter_registration_hook(_set_module_parameter)  # type: ignore[arg-type]
    call_before_steps(_check_optimizer)


def _set_module_parameter(module: nn.Module, name: str, new: nn.Parameter) -> nn.Parameter | None:
    """Handle `module.name = new`: return the parameter that the module keeps, if it is not `new`."""
    former = module._parameters.get(name)
    if former is None or former.is_meta or new.is_meta:
        return None
    if former is new:
        if new in _untied and _untied[new][:2] != (id(module), name):  # the other name has it, too: tied again
            _untied.pop(new)[2].remove()
        return None
    models = [model for model in list_parallel_models() if any(inner is module for inner in model.modules())]
    found = find_holder_at(module, name, models) if models else None
    if found is not None and found.knows(new):
        return None
    gathers = found is not None and found.group._reset_sharded_params  # before, loading has put its own there
    parameter = found.held.sharded_param if found is not None and gathers else former
    if not models or not isinstance(parameter, DTensor):
        return None
    path = _name_parameter(models[0], module, name)
    # What the config ties to this weight transformers ties again when it has loaded both.
    pairs = getattr(models[0], "_hf_parallel_tied_keys", {}).items()
    others = {one if path == other else other for one, other in pairs if path in (one, other)}
    if any(key in others and held is new for key, held in models[0].named_parameters(remove_duplicate=False)):
        return None
    what = f"{path} = nn.Parameter(x)"
    if find_holder(new, models) or any(new is parameter for model in models for parameter in model.parameters()):
        why = "it is another weight of the model: ranks hold parts, which cannot be tied afterwards"
        refuse(what, why, do="set tie_word_embeddings of the config before the model is loaded, or give it a copy")
    if found is not None:
        found.group.reshard()  # where rows have an order of their own, it is found by the parameter in the module
    store(parameter, new.detach(), what)
    _taken[new] = what
    parameter.requires_grad_(new.requires_grad)
    held = dict(models[0].named_parameters(remove_duplicate=False))
    still = next((other for other in others if held.get(other) is former), None)
    if still is not None and parameter not in _untied:
        check = functools.partial(_refuse_untied, what, still)
        _untied[parameter] = (id(module), name, models[0].register_forward_pre_hook(check, prepend=True))
    return cast(nn.Parameter, parameter)


def _refuse_untied(what: str, other: str, model: nn.Module, args: tuple) -> None:
    """Refuse, before a forward pass, that one of two tied names has got a weight of its own."""
    why = f"ranks hold one parameter for it and {other}, which the config ties"
    refuse(what, why, do="untie and save the model in one process, or call tie_weights() if it shall stay tied")


@contextlib.contextmanager
def note_former_parameters(model: nn.Module) -> Iterator[None]:
    """Note which parameters the model has lost after what runs inside, and keep none of them alive.

    Raises:
        SpecError: a script has hooked the gradient of one of them.
    """
    before = [(name, weakref.ref(parameter)) for name, parameter in model.named_parameters()]
    yield
    model_reference, current = weakref.ref(model), {id(parameter) for parameter in model.parameters()}
    for name, reference in before:
        parameter = reference()
        if parameter is not None and id(parameter) not in current:
            if _is_hooked(parameter):
                _refuse_hook(name)
            former_parameters[parameter] = (model_reference, name)


def refuse_changed_parameters(root: nn.Module, gathers: bool, model: nn.Module, args: tuple) -> None:
    """Refuse hooks on gradients, and parameters put into a module's own table. In one walk, before a forward pass.

    FSDP2 calls no hooks and a pipeline calls them per micro-batch; the next gather would undo what was put in.

    Args:
        gathers: whether the model gathers weights as one, so that its parameters can be exchanged.
    """
    ties = {} if root is model else getattr(model, "_hf_parallel_tied_keys", {})
    parameters = dict(model.named_parameters(remove_duplicate=False)) if ties else {}
    for one, other in ties.items():  # of a stage: gradients of both are summed with those of the other one's stage
        if is_tie_broken(parameters, one, other):
            _refuse_untied(f"{one} = nn.Parameter(x)", other, model, args)
    whole = getattr(root, WHOLE, ())  # each calls its hooks, on the gradient of this rank's examples
    for module in list_modules(root):
        for leaf, parameter in module._parameters.items():
            if parameter is not None and _is_hooked(parameter) and parameter not in whole:
                _refuse_hook(_name_parameter(model, module, leaf))
        for group in get_groups_of(module) if isinstance(module, FSDPModule) else ():
            for held in group.fsdp_params:
                where = held._module_info
                if where.module._parameters.get(where.param_name) is held.sharded_param:
                    continue
                if _is_hooked(held.sharded_param):  # of which the module may have a gathered copy
                    _refuse_hook(_name_parameter(model, where.module, where.param_name))
                if gathers:
                    _refuse_exchanged(model, group, held)


def _name_parameter(model: nn.Module, module: nn.Module, leaf: str) -> str:
    path = next((path for path, inner in model.named_modules() if inner is module), "")
    return f"{path}.{leaf}".lstrip(".")


def _refuse_exchanged(model: nn.Module, group: FSDPParamGroup, held: FSDPParam) -> None:
    """Refuse what a module has in place of the parameter that FSDP2 has stored, unless that is its gathered copy."""
    module, name = held._module_info.module, held._module_info.param_name
    there = module._parameters.get(name)
    if there is None and is_parametrized(module, name):
        what = f"a parametrization of {_name_parameter(model, module, name)}"
        refuse(what, "its weight is shared out already", do="register it before the model is made parallel")
    if group._reset_sharded_params and (there is None or not Held(group, held, "").knows(there)):
        why = "it was put there past the module, and the next gather would undo it"
        what = f"another parameter for {_name_parameter(model, module, name)}"
        refuse(what, why, do="module.weight.data = x, or copy_ into it")


def _is_hooked(parameter: nn.Parameter) -> bool:
    """Return whether a script has put hooks on the parameter's gradient; some of the layout are its own."""
    tables: tuple[Any, ...] = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
    if not any(tables):
        return False
    hooks = [getattr(hook, "func", hook) for table in tables for hook in (table or {}).values()]
    return any(not getattr(hook, "__module__", "").startswith("hf_parallel.") for hook in hooks)


def _refuse_hook(name: str) -> NoReturn:
    why = "sharded weights call no hooks, and pipelines call them once per micro-batch"
    how = "change p.grad before the optimizer's step: in a callback's on_pre_optimizer_step, or after the backward"
    refuse(f"a hook on the gradient of {name}", why, do=how)


def refuse_gradients_of_gradients(model: nn.Module, args: tuple, output: object) -> None:
    """Refuse a backward pass that is to be differentiated again: sharded and split layers cannot."""

    def refuse_graph(gradient: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "hf_parallel: create_graph=True: the gradient of a gradient is not computed over ranks; one process "
                "works, and so does the difference of the gradients of two passes"
            )

    held = dict.values(output) if isinstance(output, dict) else output if isinstance(output, tuple) else (output,)
    for tensor in held if torch.is_grad_enabled() else ():  # as they lie there: logits that nobody reads stay parts
        if torch.is_tensor(tensor) and tensor.requires_grad:
            tensor.register_hook(refuse_graph)


def _check_optimizer(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Refuse, at its first step, an optimizer of parameters that no model trains: it would do nothing."""
    if optimizer in _checked:
        return
    _checked.add(optimizer)
    given = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    for parameter in given.values():
        if parameter in former_parameters:
            why = f"it was made before the model became parallel and has its former {former_parameters[parameter][1]}"
            refuse(type(optimizer).__name__, why, do="make it afterwards, or accelerator.prepare(model, optimizer)")
        if parameter in _taken:
            why = "the model has taken its values, and trains the parameter it has"
            refuse(f"an optimizer of the x in {_taken[parameter]}", why, do="give it model.parameters()")
    # Beside a model's parameters, those in no model: data ranks would each train their own
    models = [model for model in list_parallel_models() if cast(Any, model)._hf_parallel.mesh.data_size > 1]
    states = [cast(Any, model)._hf_parallel for model in models]
    around = [module for state in states if state.around is not None and (module := state.around()) is not None]
    known = {id(parameter) for module in (*models, *around) for parameter in module.parameters()}
    groups = [group for state in states for group in iterate_parameter_groups(state.root)]
    known |= {id(held.sharded_param) for group in groups for held in group.fsdp_params}
    known |= {id(parameter) for state in states for parameter in vars(state.root).get(WHOLE, ())}
    stray = next((parameter for key, parameter in given.items() if key not in known), None)
    if stray is not None and known & given.keys():
        why = "it is in no parallel model: each data rank would train its own by its own examples"
        how = "make it a parameter of the model before that is made parallel"
        refuse(f"a parameter of {tuple(stray.shape)} in {type(optimizer).__name__}", why, do=how)
    for model in list_parallel_models():
        state: Any = model._hf_parallel
        if state.mesh.config.sharing_size == 1:
            continue
        late = [parameter for *_, new in iterate_late_parameters(state.root, trained=True) for parameter in new]
        for name, parameter in model.named_parameters():
            if id(parameter) in given and any(parameter is one for one in late):
                why = "it came into the model after its weights were shared out, and each data rank trains its own"
                refuse(name, why, do="put it there before, or give the model to Accelerator.prepare or Trainer then")
    roots = [cast(Any, model)._hf_parallel.root for model in list_parallel_models()]
    held = (one for root in roots for group in iterate_parameter_groups(root) for one in group.fsdp_params)
    # Between a forward and a backward pass FSDP2 registers gathered parameters.
    if any(hasattr(one, "_unsharded_param") and id(one._unsharded_param) in given for one in held):
        why = "it was made after a forward pass with gradients, and has copies of weights that ranks hold parts of"
        refuse(type(optimizer).__name__, why, do="make it before the model runs, or after loss.backward()")

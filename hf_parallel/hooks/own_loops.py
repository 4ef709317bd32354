"""Torch's tools for loops of a script's own, on lists of tensors: clipping, averages of weights.

A parallel model's lists hold shards of several meshes beside whole tensors, and under a pipeline those of one stage.
"""

from __future__ import annotations

import gc
import hashlib
import json
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from hf_parallel.apply import mixed
from hf_parallel.apply.own_code import is_trying_own_code
from hf_parallel.apply.own_files import note_optimizer
from hf_parallel.apply.parallelize import ParallelState, clip_together, state_of
from hf_parallel.apply.weights import (
    compare_whole,
    full_tensor,
    list_parallel_models,
    reduce_to_whole_number,
    store,
)
from hf_parallel.ask.session import of_process, of_session
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.data.copies import find_resting_parameter
from hf_parallel.axes.data.stopped_pass import end_unannounced_backward
from hf_parallel.axes.data.units import keeps_apart, place_gradients, sum_in_one_dtype
from hf_parallel.axes.pipeline.batches import find_leaves
from hf_parallel.axes.pipeline.stage_runner import pipelines_of
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import patch, replace
from hf_parallel.ranks.mesh import STORED, find_stored_parameter, get_stored, place_as
from hf_parallel.ranks.steps import call_before_steps

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup


def _find_states_of(parameters: Sequence[torch.Tensor]) -> list[ParallelState]:
    """Return the states of the models that own these. All stages of a pipeline take part, also without any."""
    wanted = set(map(id, parameters))
    states = [(model, state) for model in list_parallel_models() if (state := state_of(model)) is not None]
    found = [state for model, state in states if wanted & _list_ids_of(model)]
    return found or [state for _, state in states if not wanted and state.pipeline is not None]


def _list_ids_of(model: nn.Module) -> set[int]:
    """Return the `id` of each parameter, and of each stored one of which a forward pass has left a copy."""
    return {id(one) for parameter in model.parameters() for one in (parameter, find_stored_parameter(parameter))}


@patch("torch.nn.modules.module:Module.named_parameters", "names copies that FSDP2 has gathered, and drops")
def named_parameters(
    original: Callable, self: nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """Name the stored parameters where a forward pass without a backward pass has left copies gathered."""
    for name, parameter in original(self, prefix, recurse, remove_duplicate):
        yield name, find_resting_parameter(parameter) if STORED in parameter.__dict__ else parameter


@patch("torch.nn.utils.clip_grad:clip_grad_norm_", "norm of one stage, or mixes shards and whole tensors", copies=True)
def clip_grad_norm_(
    original: Callable,
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip the gradients of a parallel model as `Accelerator.clip_grad_norm_` does. Collective over its ranks."""
    parameters = parameters if isinstance(parameters, torch.Tensor) else list(parameters)
    states = _find_states_of([parameters] if isinstance(parameters, torch.Tensor) else parameters)
    if not states:
        return original(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    norm = clip_together(parameters, states, max_norm, norm_type)
    if error_if_nonfinite and not bool(norm.isfinite()):
        raise RuntimeError(f"hf_parallel: the norm of the gradients is {float(norm):g} (error_if_nonfinite=True)")
    return norm


@patch("torch.nn.utils.clip_grad:clip_grad_value_", "mixes shards and whole tensors", copies=True)
def clip_grad_value_(
    original: Callable,
    parameters: torch.Tensor | Iterable[torch.Tensor],
    clip_value: float,
    foreach: bool | None = None,
) -> None:
    """Clamp every number, on the parts that this rank stores."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    original([SimpleNamespace(grad=get_stored(gradient)) for gradient in gradients], clip_value, foreach)


@patch("torch.nn.utils.convert_parameters:parameters_to_vector", "cannot join shards of odd sizes", copies=True)
def join_parameters(original: Callable, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
    """Join whole parameters to one vector, which `vector_to_parameters` takes back. Collective over their ranks.

    Raises:
        NotImplementedError: the vector would have a gradient in one process.
    """
    given = list(parameters)
    if not any(isinstance(one, DTensor) for one in given):
        return original(given)
    if torch.is_grad_enabled() and any(one.requires_grad for one in given):
        raise NotImplementedError(
            "hf_parallel: parameters_to_vector of shards has no gradient; in torch.no_grad() it is the whole vector"
        )
    return original([full_tensor(one) if isinstance(one, DTensor) else one for one in given])


@patch(
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.post_backward",
    "mixes gradients of two dtypes before torch 2.15, and adds its own to those of a penalty that lie otherwise",
)
def end_backward_of_group(original: Callable, self: FSDPParamGroup, *args: object) -> None:
    """Reduce a group's gradients, all of one dtype, also where a parameter has one in the last micro-batch alone."""
    if keeps_apart(self.fsdp_params[0]):
        sum_in_one_dtype(self)
    place_gradients(self)
    original(self, *args)


@patch("torch.optim.swa_utils:get_{ema,swa}_multi_avg_fn", "mixes shards and whole tensors", copies=True)
def average(original: Callable, *args: object, **kwargs: object) -> Callable:
    """Average weights as `AveragedModel` does: parts as this rank stores them, whole tensors as they are."""
    own = original(*args, **kwargs)

    @torch.no_grad()
    def of_parts(means: Iterable[torch.Tensor], values: Iterable[torch.Tensor], count: int | torch.Tensor) -> None:
        pairs = list(zip(means, values, strict=True))
        alike = [get_stored(value) if isinstance(mean, DTensor) else full_tensor(value) for mean, value in pairs]
        own([get_stored(mean) for mean, _ in pairs], alike, count)

    return of_parts


# ---- Scripts that put other values into weights: optimizers of their own, averages that are swapped in and out
# torch's own answer is lost in silence: `p.data = x` changes what a DTensor says of itself and not what is stored.


@replace("torch.distributed.tensor:DTensor.data", "`p.data = x` is lost")
def data(original: Any) -> property:
    """Store what is assigned, and count what is written to `p.data` as a change of the weight, as torch does not."""

    def read(tensor: DTensor) -> torch.Tensor:
        return original.__get__(tensor) if torch.is_inference_mode_enabled() else tensor.detach()

    return property(read, store)


@replace("torch.distributed.tensor:DTensor.grad", "optimizers and norms take a whole gradient for a part")
def grad(original: Any) -> property:
    """Keep this rank's part of a whole gradient that a script assigns, such as a part of one vector of all."""

    def assign(parameter: DTensor, value: torch.Tensor | None) -> None:
        is_whole = value is not None and not isinstance(value, DTensor) and value.shape == parameter.shape
        if value is not None and is_whole and mixed.is_of_layout(parameter):
            value = mixed.take_part_of_gradient(value, parameter)
        original.__set__(parameter, value)

    return property(original.__get__, assign, original.__delete__)


@patch(
    "torch.distributed.tensor:DTensor.{norm,sum,mean,max,min}",
    "gives a DTensor, which does not mix with numbers of whole tensors",
)
def reduce_to_number(original: Callable, self: DTensor, *args: Any, **kwargs: Any) -> Any:
    """Reduce a tensor to one number as if it were whole; rows and columns stay torch's."""
    return mixed.make_number(original(self, *args, **kwargs))


@patch("torch.functional:norm", "gives a DTensor, which does not mix with numbers of whole tensors", copies=True)
def norm(original: Callable, input: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    """Compute the norm of a weight as if it were whole."""
    return mixed.make_number(original(input, *args, **kwargs))


@patch(
    "torch.distributed.tensor:DTensor.{__add__,__radd__,__iadd__,__sub__,__rsub__,__mul__,__rmul__,__truediv__}",
    "a loss does not mix with a number that is computed of parts of weights",
)
def add_number(original: Callable, self: DTensor, other: object) -> object:
    """Add a penalty of weights to a loss: the number of whole tensors, whose gradient each part gets."""
    if self.ndim or not isinstance(other, torch.Tensor) or other.ndim:
        return original(self, other)
    if isinstance(other, DTensor) and other.device_mesh == self.device_mesh:
        return original(self, other)
    own = mixed.make_number(self)
    if isinstance(own, DTensor):
        return original(self, other)
    return getattr(own, original.__name__)(mixed.make_number(other))


@patch(
    "torch.distributed.tensor:DTensor.{item,tolist,numpy,__float__,__int__,__bool__,__index__,__complex__,__format__}",
    "reads what this rank holds of a sum",
)
def read_number(original: Callable, self: DTensor, *args: Any, **kwargs: Any) -> object:
    """Read one number that a script computes of a weight, a gradient or a moment, or an array: of the whole tensor.

    What is written into an array would not reach the weight, as it does on a CPU in one process: it is read-only.
    """
    if self.numel() == 1:
        return getattr(reduce_to_whole_number(self), original.__name__)(*args, **kwargs)
    if original.__name__ not in ("numpy", "tolist") or self.requires_grad or not mixed.is_of_layout(self):
        return original(self, *args, **kwargs)
    device = self.device_mesh.device_type
    moved = self if self.device.type == device else place_as(self, get_stored(self).to(device))
    found = getattr(full_tensor(moved).cpu(), original.__name__)(*args, **kwargs)
    if original.__name__ == "numpy" and device == "cpu":
        found.flags.writeable = False
    return found


@replace(
    "torch.distributed.tensor:DTensor._op_dispatcher._custom_op_handlers",
    "`torch.equal` asks all ranks, those of other stages too; `torch.allclose` and mixes of parts and copies fail",
)
def take_whole_tensors(original: dict[Any, Callable]) -> dict[Any, Callable]:
    """Compare weights as whole tensors, on the ranks that have a part, and compute with copies of whole weights."""

    def compare(operation: Any, args: tuple, kwargs: dict) -> bool:
        return compare_whole(operation, *args, **kwargs)

    mixed.pause_in_steps()
    aten = torch.ops.aten
    compared = {aten.equal.default: compare, aten.allclose.default: compare}
    return {**original, **compared, **dict.fromkeys(mixed.list_operations(), mixed.combine)}


# ---- Loops that train a model which the layout does not know, because its class made it


@dataclass
class _Seen:
    """The optimizers that have taken a step under this layout, how many backward passes there were, and a weight.

    The weight is one of this rank, with its numbers before the first step of a Trainer.
    """

    optimizers: weakref.WeakSet[Optimizer] = field(default_factory=weakref.WeakSet)
    backwards: int = 0
    weight: tuple[nn.Parameter, torch.Tensor] | None = None


@dataclass
class _Beside:
    """The optimizers of parameters that are in no parallel model: a name for each, and how often it has stepped.

    They outlast a layout, as what ranks leave in their store does.
    """

    counts: Counter[str] = field(default_factory=Counter)
    names: weakref.WeakKeyDictionary[Optimizer, str] = field(default_factory=weakref.WeakKeyDictionary)
    steps: weakref.WeakKeyDictionary[Optimizer, tuple[str, int]] = field(default_factory=weakref.WeakKeyDictionary)

    def name_next(self, optimizer: Optimizer) -> str:
        """Name an optimizer by what it holds, and number it among its like: ranks that train others compare the same.

        Ranks make optimizers in one order, as a script does; which of two steps first may follow from a rank's batch.
        """
        groups = [
            (group.get("param_names"), [(str(p.dtype), tuple(p.shape)) for p in group["params"]])
            for group in optimizer.param_groups
        ]
        held = hashlib.sha256(repr((type(optimizer).__qualname__, groups)).encode()).hexdigest()[:16]
        self.counts[held] += 1
        self.names[optimizer] = f"{held}-{self.counts[held] - 1}"
        return self.names[optimizer]

    def refuse_training_apart(self, optimizer: Optimizer) -> None:
        """Refuse a step by gradients that other data ranks do not have; looks at them ever more rarely.

        Each rank leaves the norms of its gradients in the store of the ranks, and looks at those that are there: the
        last one sees all. A rank that trains something by itself waits for nobody.
        """
        name, step = self.steps[optimizer]
        self.steps[optimizer] = name, step + 1
        if step & (step - 1):
            return
        mesh, default = runtime.mesh(), dist.distributed_c10d._get_default_store()
        store = dist.PrefixStore(f"hf_parallel/beside/{name}/{step}", default)
        given = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        own = torch.tensor([float(gradient.float().norm()) for gradient in given])
        store.set(str(mesh.rank), json.dumps(own.tolist()))
        for rank in dist.get_process_group_ranks(mesh.data_group):
            if rank == mesh.rank or not store.check([str(rank)]):
                continue
            theirs = torch.tensor(json.loads(store.get(str(rank))))
            finite = bool(own.isfinite().all() and theirs.isfinite().all())
            if finite and not (len(own) == len(theirs) and torch.allclose(own, theirs, rtol=1e-3, atol=0)):
                refuse(
                    f"{type(optimizer).__name__} trains {len(own)} parameters that are in no parallel model",
                    f"ranks {mesh.rank} and {rank} have other gradients of them, and each would train its own",
                    do="accelerator.prepare(module, optimizer) works, and so does the mean of their gradients over "
                    "ranks",
                )


def watch_optimizers() -> None:
    """Look at each optimizer before its first step under a layout. A second call changes nothing."""
    call_before_steps(_refuse_optimizer_of_plain_model)


def _refuse_optimizer_of_plain_model(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Look at what an optimizer is about to train, once; at what is in no parallel model again, ever more rarely."""
    if not _trains_together():
        return
    if pipelines_of(runtime.mesh()).session is not None:
        what, size = f"{type(optimizer).__name__}.step() in the script's loss", runtime.mesh().size("pp")
        refuse(what, f"pp_size={size} has micro-batches", do="pp_size=1 works, and so does a later step")
    seen, beside = of_session(_Seen), of_process(_Beside)
    if optimizer not in seen.optimizers:
        seen.optimizers.add(optimizer)
        parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
        trained = {id(p): p for p in parameters if isinstance(p, nn.Parameter) and p.grad is not None}
        _refuse_plain_model(set(trained), type(optimizer).__name__)
        known = {id(parameter) for model in list_parallel_models() for parameter in model.parameters()}
        plain = not any(isinstance(p, DTensor) for p in trained.values()) and known.isdisjoint(trained)
        if trained and plain and runtime.mesh().data_size > 1:
            beside.steps[optimizer] = beside.names.get(optimizer) or beside.name_next(optimizer), 0
    if optimizer in beside.steps:
        beside.refuse_training_apart(optimizer)


@patch("torch.autograd:backward", "nothing else tells that a loop without an optimizer trains a model")
def backward(original: Callable, tensors: Any, *args: object, **kwargs: object) -> None:
    """Look at what has gradients while no model is parallel: after the first backward passes, and later ever less.

    Look before a script's backward pass at penalties of weights, of which a stage of a pipeline has its part, and
    after it at gradients that FSDP2 has not reduced.
    """
    if _trains_together():
        _refuse_penalty_of_stages([tensors] if torch.is_tensor(tensors) else tensors)
    try:
        original(tensors, *args, **kwargs)
    except RuntimeError as error:
        if "storage of size 0" not in str(error):
            raise
        raise NotImplementedError(
            "hf_parallel: the loss reads what was put aside in the middle of a layer, whose weights are not gathered "
            "for it; what a hook keeps (module.register_forward_hook) works, and so does zero_stage=2"
        ) from error
    if _trains_together():
        for model in list_parallel_models() if torch._C._current_graph_task_id() == -1 else ():
            end_unannounced_backward(model)
        seen = of_session(_Seen)
        seen.backwards += 1
        if not list_parallel_models() and seen.backwards & (seen.backwards - 1) == 0:
            _refuse_plain_model(None, "a loop")


def _refuse_penalty_of_stages(losses: Iterable[torch.Tensor]) -> None:
    """Look at the weights from which a script computes its loss beside the stages, whose own passes go uninspected."""
    engines = [engine for one in pipelines_of(runtime.mesh()).engines if (engine := one()) is not None]
    is_within = torch._C._current_graph_task_id() != -1 or any(stage.work for one in engines for stage in one.stages)
    if not engines or is_within:
        return
    leaves, passes = find_leaves(losses)
    for engine in engines if passes else ():
        engine.refuse_penalty(leaves, [engine.model])


@patch("torch.autograd:grad", "nothing else tells that a loop without an optimizer trains a model")
def gradients(original: Callable, outputs: object, inputs: Any, *args: object, **kwargs: object) -> object:
    """Look at parameters whose gradients a loop asks for: while no model is parallel, or of one that is.

    Raises:
        NotImplementedError: data ranks or stages would give them gradients in `backward()` alone.
    """
    asked = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    parameters = [one for one in asked if isinstance(one, nn.Parameter)] if _trains_together() else []
    for state in _find_states_of(parameters) if parameters else []:
        sizes = {"pp_size": state.mesh.size("pp"), "data and context ranks": state.mesh.config.sharing_size}
        shown = next((f"{name}={size}" for name, size in sizes.items() if size > 1), None)
        if shown is not None:
            raise NotImplementedError(
                f"hf_parallel: torch.autograd.grad(loss, parameters) with {shown} would give none, or a part: "
                "loss.backward() and p.grad give gradients of the whole batch and model"
            )
    found = original(outputs, asked, *args, **kwargs)
    if _trains_together():
        of_session(_Seen).backwards += 1
    if _trains_together() and not list_parallel_models():
        _refuse_plain_model(set(map(id, parameters)), "a loop")
    return found


def note_first_weight(model: nn.Module) -> None:
    """Keep the numbers of one small weight of this rank, before a Trainer's first step under a layout."""
    seen = of_session(_Seen)
    if seen.weight is None and not seen.backwards and _trains_together():
        trained = [p for p in model.parameters() if p.requires_grad and get_stored(p).numel()]
        if trained:
            smallest = min(trained, key=lambda p: get_stored(p).numel())
            seen.weight = smallest, get_stored(smallest).detach().clone()


def refuse_steps_without_backward(who: str) -> None:
    """Refuse a trainer whose first step has changed weights and had no backward pass, as MeZO's (arXiv:2305.17333).

    It steps by numbers that it draws per parameter and by the loss of its process. Stages would draw numbers of their
    own, and data ranks would go different ways.

    Raises:
        NotImplementedError: there are several of them.
    """
    seen = of_session(_Seen)
    if seen.weight is None or seen.backwards:
        return
    (weight, before), mesh = seen.weight, runtime.mesh()
    sizes = {"pp_size": mesh.size("pp"), "data ranks": mesh.data_size}
    shown = next((f"{name}={size}" for name, size in sizes.items() if size > 1), None)
    if shown is not None and not torch.equal(get_stored(weight), before):
        raise NotImplementedError(
            f"hf_parallel: a step of {who} changes weights without a backward pass, and with {shown} each rank would "
            "draw numbers for its own parameters, or go by the loss of its own examples; tp_size and cp_size work"
        )


@patch("torch.optim.optimizer:Optimizer.__init__", "fails on a stage without a parameter that trains")
def make_optimizer(original: Callable, self: Optimizer, params: Any, *args: Any, **kwargs: Any) -> None:
    """Make the optimizer of a stage whose layers a script has frozen: it has nothing to do in its steps.

    Each optimizer is named where it is made, for the comparison of those beside the model.
    """
    if isinstance(params, Iterable) and not isinstance(params, torch.Tensor) and _trains_together():
        params = list(params)
        if not params and any(state.pipeline is not None for state in map(state_of, list_parallel_models()) if state):
            params = [{"params": []}]
        params = [{**group, "params": list(group["params"])} if _is_open(group) else group for group in params]
        _refuse_no_parameters(type(self).__name__, params)
    original(self, _take_stored(params), *args, **kwargs)
    if _trains_together():
        of_process(_Beside).name_next(self)
    note_optimizer(self)


def _take_stored(params: Any) -> Any:
    """Put stored parameters in the place of copies in what an optimizer is given, in groups and by name, too."""
    if isinstance(params, torch.Tensor):
        return find_stored_parameter(cast(nn.Parameter, params))
    if isinstance(params, dict):
        return {**params, "params": _take_stored(params["params"])}
    return type(params)(map(_take_stored, params)) if type(params) in (list, tuple) else params


def _refuse_no_parameters(name: str, groups: list) -> None:
    """Refuse an optimizer with nothing to train, beside a model that could: where linears are split they are no more

    of the very class `nn.Linear`, by which a script may look for those that it gives adapters, as minLoRA does.
    """
    config, models = runtime.mesh().config, list_parallel_models()
    if config.tp_size == 1 or config.pp_size > 1 or not groups:
        return
    is_empty = all(isinstance(group, dict) and not group["params"] for group in groups)
    if is_empty and any(parameter.requires_grad for model in models for parameter in model.parameters()):
        what, why = f"{name} without parameters under tp_size={config.tp_size}", "nothing would train"
        do = (
            "isinstance(module, nn.Linear) is True of split linears, type(module) is nn.Linear is not; tp_size=1 works"
        )
        refuse(what, why, do=do)


def _is_open(group: Any) -> bool:
    """Return whether this is a group whose parameters are still to be read, of which torch makes a list, too."""
    return isinstance(group, dict) and isinstance(group.get("params"), Iterator)


def _trains_together() -> bool:
    """Return whether a layout of several processes is active, and trains the script's model rather than a copy."""
    active = runtime.current()
    is_real = active is not None and not active.pretended and active.config.world_size > 1
    return is_real and not is_trying_own_code()


def _refuse_plain_model(trained: set[int] | None, who: str) -> None:
    """Refuse to train a transformers model that no layout has made parallel: each process would do so by itself.

    The collector knows all models that exist, copies included; it is asked only where gradients are of parameters
    that are in no parallel model.

    Args:
        trained: ids of parameters that have gradients, as far as it is known which.
    """
    known = {id(parameter) for model in list_parallel_models() for parameter in model.parameters()}
    if trained is not None and trained <= known:
        return
    for model in (item for item in gc.get_objects() if issubclass(type(item), PreTrainedModel)):
        own = (p for p in model.parameters() if id(p) not in known)
        if state_of(model) is None and any(p.grad is not None if trained is None else id(p) in trained for p in own):
            config = runtime.mesh().config
            spec = config.to_spec()
            refuse(
                f"{who} trains a {type(model).__name__} that is not parallel",
                f"each of the {config.world_size} processes of {spec} would train it by itself",
                do=f'before the optimizer is made, model = hf_parallel.parallelize(model, "{spec}"); from_pretrained, '
                "or accelerator.prepare(model, optimizer), works, too",
            )

"""Cut a Hugging Face model into pipeline stages without copying it.

The model object itself becomes this rank's stages: layers of other ranks turn into stand-ins, so the names of what
stays are the Hub's names and the script's own object is the one that trains. What belongs where comes from the
backbone's plan (`anatomy.py`: what runs before the layers, the layers, what runs after them); what is outside the
backbone is on the last stage.

    four layers, pp=2      embed_tokens   layers.0  layers.1  layers.2  layers.3   norm   lm_head
    stage 0                     x            x         x        exit       ->       ->      ->
    stage 1                     ->           ->       entry      x         x        x       x

The layer just before a stage's own layers is its entry, which returns what the previous stage computed. So what the
model does between embedding and layers (scaling, positions, dropout) happens once, on the first stage. The layer just
after them is its exit, where the forward pass ends. A rank with several stages shows the model one of them at a time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_parallel.axes.pipeline.part import PipelinePart, list_layer_ranges
from hf_parallel.model.anatomy import Backbone
from hf_parallel.ranks.local import make_class

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# ---- What stands in a model where modules of other stages were ------------------------------------------------------
# StandIn      has the class, the name, the children and the attributes of the module it stands for, so that scripts
#              may walk the model, count and print it, and ask for shapes; no parameters, and no forward
# PassThrough  the same while a stage runs: hands the hidden states on
# Described    a tensor of such a module: all but its values


Kind = TypeVar("Kind", bound="StandIn")


class Described(torch.Tensor):
    """A tensor of another stage: writing to it does nothing, as whoever holds it writes too; it has no values."""

    origin: tuple[str, torch.device]  # what it is and where it is held, and the device of this rank's tensors

    @classmethod
    def __torch_function__(cls, func: Callable, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        kwargs = kwargs or {}
        own = next(value for value in tree_leaves((args, kwargs)) if isinstance(value, Described))
        if func == _DEVICE:
            return own.origin[1]
        if func == _SET_DATA:
            return None
        if func is torch.Tensor.__repr__:
            return f"tensor(..., size={tuple(own.shape)}, dtype={own.dtype})  # {own.origin[0]}"
        if func.__name__ in _DRAWS:
            empty = torch.empty(own.shape, dtype=own.dtype, device=own.origin[1])
            given = {key: empty if value is own else value for key, value in kwargs.items()}
            func(*(empty if value is own else value for value in args), **given)
        try:
            result = super().__torch_function__(func, types, args, kwargs)
        except (RuntimeError, NotImplementedError) as error:
            raise RuntimeError(
                f"hf_parallel: {own.origin[0]}, so {func.__name__} cannot have its values; "
                "hf_parallel.full_state_dict(model), called on all ranks, gathers them"
            ) from error
        for tensor in tree_leaves(result):
            if isinstance(tensor, Described):
                tensor.__dict__.setdefault("origin", own.origin)
        return result


#: Functions that draw a random number for each element: all ranks must draw as many.
_DRAWS = {
    *("normal_", "uniform_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_"),
    *("rand_like", "randn_like", "kaiming_uniform_"),
}
_DEVICE, _SET_DATA = torch.Tensor.device.__get__, torch.Tensor.data.__set__  # type: ignore[attr-defined]


class StandIn(nn.Module):
    """Mixin in front of the class of the module it stands for."""

    real: nn.Module  # that module, without values
    where: str
    device_here: Callable[[], torch.device]
    same: dict[str, tuple[nn.Module, str]]  # tied parameters, which a module of this rank holds too

    def forward(self, *args: object, **kwargs: object) -> object:
        raise RuntimeError(f"hf_parallel: {self.where}, and cannot be called by itself here; pp_size=1 works")

    __call__ = nn.Module.__call__  # the class behind may have one of its own, such as checkpointing

    def __repr__(self) -> str:
        return repr(self.real)

    def __getattr__(self, name: str) -> Any:
        try:
            return nn.Module.__getattr__(self, name)
        except AttributeError:
            if name.startswith("__") or "real" not in vars(self):
                raise
        if name in self.same:
            owner, leaf = self.same[name]
            return getattr(owner, leaf)
        value = getattr(self.real, name)
        if not isinstance(value, torch.Tensor) or not value.is_meta:
            return value
        known = vars(self).setdefault("described", {}).get(name)
        if known is None or known[0] is not value:
            module, _, rest = self.where.partition(" ")  # "lm_head is held …" -> "lm_head.weight is held …"
            described: Any = value.detach().as_subclass(Described)
            described.origin = f"{module}.{name} {rest}", self.device_here()
            described._is_param = isinstance(value, nn.Parameter)
            known = value, described.requires_grad_(value.requires_grad)
            self.described[name] = known
        return known[1]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Keep the shape of a parameter that a script sets, or ties; its values belong to the rank that holds the
        module.
        """
        empty = None if param is None else torch.empty(param.shape, dtype=param.dtype, device="meta")
        self.real._parameters[name] = None if empty is None else nn.Parameter(empty)


class PassThrough(StandIn):
    """Stands where another stage's module was while a stage runs: hands the hidden states on."""

    tuples = False  # do the layers it stands among return tuples?

    def forward(self, *args: object, **kwargs: object) -> object:
        hidden = args[0] if args else next(iter(kwargs.values()))
        return (hidden, None) if self.tuples else hidden


class Entry(PassThrough):
    """Stands where the previous stage's last layer was: gives that layer's output."""

    hidden: torch.Tensor | None = None

    def forward(self, *args: object, **kwargs: object) -> object:
        return PassThrough.forward(self, self.hidden)


class LeaveAtExit(BaseException):  # not an Exception: model code that catches errors must let it pass
    """Unwinds the model's forward on every stage but the last, carrying what leaves for the next stage."""

    def __init__(self, carried: Any) -> None:
        super().__init__()
        self.carried = carried


class Exit(PassThrough):
    """Stands where the next stage's first layer was: what reaches it leaves for that stage."""

    def forward(self, *args: object, **kwargs: object) -> object:
        raise LeaveAtExit(args[0] if args else kwargs["hidden_states"])


class AddsNothing(PassThrough):
    """Stands where an embedding was whose output is added to the stream, such as that of positions."""

    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        return torch.zeros(
            (), device=next(value for value in (*args, *kwargs.values()) if torch.is_tensor(value)).device
        )


def get_stand_in_for(module: nn.Module, kind: type[Kind]) -> Kind:
    """Return the stand-in in the place of `module`, or of the one that `module` stands for."""
    known = {key: vars(module)[key] for key in ("real", "same", "where", "device_here") if isinstance(module, StandIn)}
    real = known.get("real", module)
    front: type = kind
    behind: type = type(real)
    new: Any = object.__new__(make_class(behind.__name__, behind.__module__, front, behind))
    nn.Module.__init__(new)
    vars(new).update({"real": real, "same": {}, **known}, training=module.training)
    new._is_hf_initialized = True  # transformers need not draw its weights
    if kind is StandIn:
        new._modules.update(
            {name: child and get_stand_in_for(child, StandIn) for name, child in real._modules.items()}
        )
    elif known:  # a layer that this rank runs in another stage shows no parts: they have parameters
        new._modules.update(module._modules)
    return new


def find_stand_ins(model: nn.Module, prefix: str = "") -> dict[str, StandIn]:
    """Return the stand-ins in `model` by name, without those that are parts of another one."""
    found: dict[str, StandIn] = {}
    for name, child in model.named_children():
        full = f"{prefix}{name}"
        found.update({full: child} if isinstance(child, StandIn) else find_stand_ins(child, f"{full}."))
    return found


# ---- What other stages hold of a model, for code that must see the whole of it --------------------------------------
# Whoever matches names of modules and draws random numbers for them, as adapters do, must find on every stage what it
# would find in one process. The modules of other stages are kept aside on the meta device, without values.


@dataclass(eq=False)
class RemoteModules:
    """The modules of other stages, by name."""

    modules: dict[str, nn.Module]

    @contextlib.contextmanager
    def shown(self, model: PreTrainedModel) -> Iterator[None]:
        """Show all modules in `model`. What those of other stages turn into stays aside for the next time."""
        places = {
            name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in self.modules
        }
        here = {name: owner._modules[leaf] for name, (owner, leaf) in places.items()}
        for name, (owner, leaf) in places.items():
            owner._modules[leaf] = self.modules[name]
        try:
            yield
        finally:
            for name, (owner, leaf) in places.items():
                self.modules[name], owner._modules[leaf] = owner._modules[leaf], here[name]

    @contextlib.contextmanager
    def counted(self, model: PreTrainedModel) -> Iterator[None]:
        """Show all modules, and both ends of a tie as one parameter, where one is another stage's: to count them."""
        former: list[tuple[dict, str, nn.Parameter]] = []
        with self.shown(model):
            for target, source in model._hf_parallel_tied_keys.items():
                (held, leaf), (other, name) = (_find_inside_adapters(model, key) for key in (target, source))
                former.append((held, leaf, held[leaf]))
                held[leaf] = other[name]
            try:
                yield
            finally:
                for held, leaf, parameter in former:
                    held[leaf] = parameter


def _find_inside_adapters(model: nn.Module, key: str) -> tuple[dict, str]:
    """Return the parameters of the module with this one, and its name there; adapters around the module change its
    key.
    """
    owner, _, leaf = key.rpartition(".")
    module: Any = model.get_submodule(owner)
    while hasattr(module, "base_layer"):
        module = module.base_layer
    return module._parameters, leaf


def follow_wrappers(stages: nn.ModuleList, model: nn.Module) -> None:
    """Let the stages hold the wrappers that have been put around their parts in `model`."""
    around = {id(module.base_layer): module for module in model.modules() if hasattr(module, "base_layer")}
    for stage in stages:
        parts: Any = stage.parts
        for i, part in enumerate(parts):
            parts[i] = around.get(id(part), part)


def without_values(module: nn.Module) -> nn.Module:
    """Return the module with tensors on the meta device. Other modules may keep the former tensors."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                part._parameters[name] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for name, buffer in part._buffers.items():
            part._buffers[name] = None if buffer is None else buffer.to("meta")
    return module


Swap = tuple[nn.Module, str, nn.Module | None]  # owner, name, what stands there


@dataclass
class StageView:
    """A stage of this rank: what the model must look like while it runs."""

    index: int
    layers: list[nn.Module]
    entry: Entry | None  # None on the first stage, which embeds
    modules: list[nn.Module]  # all that hold its parameters
    swaps: list[Swap]


@contextlib.contextmanager
def hold_modules(swaps: list[Swap]) -> Iterator[None]:
    """Let modules stand in their places while the context is open: the model is one stage then."""
    former = [(owner, name, owner._modules[name]) for owner, name, _ in swaps]
    for owner, name, module in swaps:
        owner._modules[name] = module
    try:
        yield
    finally:
        for owner, name, module in former:
            owner._modules[name] = module


def cut_into_stages(model: PreTrainedModel, part: PipelinePart, rank: int) -> tuple[list[StageView], RemoteModules]:
    """Keep the modules of pipeline rank `rank`'s stages in `model`, replace the others, which are returned too."""
    plan, backbone = part.facts.plan, model.get_submodule(part.facts.backbone)
    layers = backbone.get_submodule(plan.layers)
    ranges, own = list_layer_ranges(part), part.config.stages_of_rank(rank)
    whole = dict(model.named_modules(remove_duplicate=False))
    is_last, kept = len(ranges) - 1 in own, None
    for i, layer in enumerate(layers):
        if not any(ranges[stage][0] <= i < ranges[stage][1] for stage in own):
            layers[i] = get_stand_in_for(layer, StandIn)
    elsewhere: list[tuple[nn.Module, str, nn.Module]] = []
    if 0 not in own:
        # A tied head keeps the embedding beside it: the shared parameter's home.
        kept = model.get_input_embeddings() if is_last and part.tied else None
        children = _find_children(backbone, plan.before).items()
        elsewhere += [(backbone, name, child) for name, child in children if child is not kept]
    if not is_last:
        elsewhere += [(backbone, name, child) for name, child in _find_children(backbone, plan.after).items()]
        outside = [(name, child) for name, child in model.named_children() if backbone not in child.modules()]
        elsewhere += [(model, name, child) for name, child in outside]
    for parent, name, child in elsewhere:
        setattr(parent, name, get_stand_in_for(child, StandIn))
    prefix = "".join(f"{name}." for name, module in model.named_modules() if module is backbone and name)
    stages = {f"{prefix}{name}": 0 for name in plan.before}
    for stage, (first, last) in enumerate(ranges):
        stages.update({f"{prefix}{plan.layers}.{i}": stage for i in range(first, last)})
    stand_ins = find_stand_ins(model)
    parts = {
        f"{top}.{name}".rstrip("."): (part, top)
        for top, module in stand_ins.items()
        for name, part in module.named_modules()
    }
    for name, (part_of, top) in parts.items():  # stand-ins learn what they are
        held_by = stages.get(top, len(ranges) - 1)
        part_of.where = f"{name} is held by pipeline stage {held_by}, not by this rank"
        part_of.device_here = lambda: next(model.parameters()).device
    for pair in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        for absent, present in (pair, pair[::-1]):
            (owner, _, leaf), (home, _, theirs) = absent.rpartition("."), present.rpartition(".")
            if owner in parts and home not in parts:
                parts[owner][0].same[leaf] = (model.get_submodule(home), theirs)
    views = [_view(model, backbone, plan, ranges, stage) for stage in own]
    gone = {name: without_values(whole[name]) for name in stand_ins}
    if kept is None:
        return views, RemoteModules(gone)
    views[-1].modules.append(kept)  # so that FSDP2 shards the one parameter under both its names
    # Nobody runs the embedding of a tied head here.
    return views, RemoteModules({**gone, **{name: module for name, module in whole.items() if module is kept}})


def _view(
    model: nn.Module, backbone: PreTrainedModel, plan: Backbone, ranges: list[tuple[int, int]], stage: int
) -> StageView:
    layers, (first, last) = list(backbone.get_submodule(plan.layers)), ranges[stage]
    own, modules = layers[first:last], layers[first:last]
    shown: list[nn.Module] = [get_stand_in_for(layer, PassThrough) for layer in layers]
    entry = get_stand_in_for(layers[first - 1], Entry) if stage > 0 else None
    shown[first:last] = own
    if last < len(layers):
        shown[last] = get_stand_in_for(layers[last], Exit)
    if entry is None:
        modules = [*_find_children(backbone, plan.before).values(), *modules]
    else:
        shown[first - 1] = entry
    if stage == len(ranges) - 1:
        outside = [child for child in model.children() if backbone not in child.modules()]
        modules = [*modules, *_find_children(backbone, plan.after).values(), *outside]
    for module in shown:
        if isinstance(module, PassThrough):
            module.tuples = plan.tuples
    swaps: list[Swap] = [(backbone, plan.layers, nn.ModuleList(shown))]
    for name, child in _find_children(backbone, plan.before).items() if stage > 0 else ():
        kind = AddsNothing if isinstance(child, nn.Embedding) else PassThrough
        swaps.append((backbone, name, get_stand_in_for(child, kind)))
    return StageView(stage, own, entry, modules, swaps)


def make_mirrored_view(
    model: PreTrainedModel, part: PipelinePart, stage: int, remote: RemoteModules
) -> tuple[StageView, list[Swap]]:
    """Return the view of a stage of another rank, whose modules are kept aside. They have no values yet.

    Returns:
        the view, and what stands outside the backbone while the stage's head runs.
    """
    plan, backbone, ranges = part.facts.plan, model.get_submodule(part.facts.backbone), list_layer_ranges(part)
    with remote.shown(model):
        view = _view(model, backbone, plan, ranges, stage)
        inside = [*(plan.before if stage == 0 else ()), *(plan.after if stage == len(ranges) - 1 else ())]
        view.swaps += [(backbone, name, child) for name, child in _find_children(backbone, inside).items()]
        outside = [(name, child) for name, child in model.named_children() if backbone not in child.modules()]
    return view, [(model, name, child) for name, child in outside if stage == len(ranges) - 1]


def _find_children(parent: nn.Module, names: Iterable[str]) -> dict[str, nn.Module]:
    """Return the modules of these names that `parent` has: some models of a family lack one."""
    found = {name: getattr(parent, name, None) for name in names}
    return {name: child for name, child in found.items() if isinstance(child, nn.Module)}


def find_boundary_dtype(layers: list[nn.Module]) -> torch.dtype:
    """Return the dtype of activations between stages: that of the residual stream, which follows the weights.

    Linears in 4 bits have no dtype to follow, and adapters in fp32 give what they are given: frozen norms tell.
    """
    first, packed = None, False
    for parameter in (p for layer in layers for p in layer.parameters()):
        if not parameter.is_floating_point():
            packed = True
        elif not packed or not parameter.requires_grad:
            return parameter.dtype
        elif first is None:
            first = parameter.dtype
    assert first is not None
    return first

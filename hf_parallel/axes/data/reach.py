"""Find how much one step of an optimizer reads: each number by itself, one tensor at a time, or several together.

What ranks may do with the parts that they store follows from it. Of torch's own optimizers it is known; every other
is tried once on small tensors, with its own settings, before its first step:

    together      as in one process
    one by one    each tensor in a step of its own     other weights or counts?                       -> ALL
    in parts      each rank's parts by themselves      other weights or counts, or a product or sum?  -> TENSORS
                                                       else                                           -> NUMBERS

One by one and in parts it gets new tensors at each step, which have the states of those before, as on a layout. What
an optimizer begins after 30 steps a trial does not see.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import enum
import inspect
import types
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_parallel.ranks.mesh import get_stored
from hf_parallel.ranks.steps import step_without_hooks

if TYPE_CHECKING:
    from torch.optim import Optimizer


class Reach(enum.Enum):
    """The numbers that a step reads to change one."""

    NUMBERS = "each number by itself"
    TENSORS = "one tensor at a time"
    ALL = "several tensors together"
    APART = "several tensors together, with states in a place of its own"
    RANDOM = "random numbers"
    OWN = "parts or DTensors, in a way of its own"
    UNKNOWN = "unknown, as it cannot be tried"


#: Where torch defines the steps that treat every number by itself; the others read whole matrices or norms.
_KINDS = ("adadelta", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")
_BY_NUMBERS = {f"torch.optim.{kind}" for kind in _KINDS}
#: Where optimizers are defined that read rows, columns or norms of one parameter at a time.
_BY_TENSORS = {"torch.optim._adafactor", "torch.optim._muon", "transformers.optimization"}
#: Libraries whose optimizers take parts or DTensors in ways of their own, with codes for states.
_OWN_WAYS = {"bitsandbytes", "torchao"}
_FOUND, _NUMBERED = "_hf_parallel_reaches", "_hf_parallel_numbered"
#: Attributes and options that are no counts or settings.
_NO_SETTINGS = {"params", "param_names", "state", "param_groups"}
#: Steps of a trial, and its tensors by number of dimensions: sizes that no block and no vector of a processor divides.
_STEPS = 30
_SHAPES = {1: (263,), 2: (137, 131), 3: (3, 133, 129), 4: (31, 17, 3, 5)}
_RATES = 1e-3, 0.1  # the least and the most: a warm-up's first rate, zero, would move nothing, and large ones diverge
#: Of how far the weights move; parts differ by rounding alone, about 1e-6, norms of parts by much more than this.
_TOLERANCE = 1e-4


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether it is one of torch's optimizers that treat every number by itself."""
    if type(optimizer).step.__module__ not in _BY_NUMBERS:
        return False
    return not any(group.get("differentiable") for group in optimizer.param_groups)


def find_reaches(optimizer: Optimizer) -> list[Reach]:
    """Return how much a step reads, for each group of parameters. Every rank finds the same."""
    own = vars(optimizer)
    if _FOUND not in own:
        states = [slots for slots in optimizer.state.values() if isinstance(slots, dict)]
        numbers = [{n: v for n, v in slots.items() if isinstance(v, (int, float))} for slots in states]
        own.update({_FOUND: [], _NUMBERED: any(each != numbers[0] for each in numbers)})
    found: list[Reach] = own[_FOUND]
    for group in optimizer.param_groups[len(found) :]:
        found.append(_find_reach(optimizer, group))
    return found


def reads_whole_tensors(optimizer: Optimizer) -> bool:
    """Return whether a step reads rows, columns or norms, and so needs whole tensors."""
    return not {Reach.TENSORS, Reach.ALL}.isdisjoint(find_reaches(optimizer))


def numbers_parameters(optimizer: Optimizer) -> bool:
    """Return whether an optimizer numbers its parameters when it is made, as APOLLO seeds each by its place."""
    find_reaches(optimizer)
    return vars(optimizer)[_NUMBERED]


def _find_reach(optimizer: Optimizer, group: dict[str, Any]) -> Reach:
    module = type(optimizer).step.__module__
    if module in _BY_NUMBERS:
        return Reach.NUMBERS if is_elementwise(optimizer) else Reach.OWN
    if module in _BY_TENSORS:
        return Reach.TENSORS
    if module.partition(".")[0] in _OWN_WAYS:
        return Reach.OWN
    trained = [parameter for parameter in group["params"] if parameter.requires_grad]
    if not trained:
        return Reach.NUMBERS
    # A class made in a function, such as PEFT's Riemannian one: a trial would step on the script's own tensors.
    cells = getattr(inspect.unwrap(type(optimizer).step), "__closure__", None) or ()
    if not all(_has_copy(cell.cell_contents) for cell in cells):
        return Reach.UNKNOWN
    group, device = {**group, "params": trained}, get_stored(trained[0]).device
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type="cuda" if device.type == "cpu" else device.type):
        try:
            with torch.compiler.set_stance("force_eager"), torch.enable_grad():
                return _try(optimizer, group, device)
        except Exception:  # of another's code, which may need a closure, a graph, or states that it makes elsewhere
            return Reach.UNKNOWN


def _try(optimizer: Optimizer, group: dict[str, Any], device: torch.device) -> Reach:
    shapes = [_SHAPES[n] for n in sorted({min(max(p.ndim, 1), 4) for p in group["params"]})]
    tasks = [_Task.draw(shape, device) for shape in (*shapes, tuple(size + 2 for size in shapes[-1]))]
    joins = _Joins()
    expected = _Trial(optimizer, group, tasks).run(watched=joins)
    moved = [float((weight - task.start).abs().max()) for weight, task in zip(expected.weights, tasks, strict=True)]
    if not all(0 < distance < float("inf") for distance in moved):
        return Reach.UNKNOWN

    def is_alike(*trials: _Trial) -> bool:
        joined = [torch.cat(parts) for parts in zip(*(trial.weights for trial in trials), strict=True)]
        return all(trial.numbers == expected.numbers for trial in trials) and all(
            float((own - weight).abs().max()) <= _TOLERANCE * distance
            for own, weight, distance in zip(joined, expected.weights, moved, strict=True)
        )

    if not is_alike(_Trial(optimizer, group, tasks).run()):
        return Reach.RANDOM
    if not is_alike(_Trial(optimizer, group, tasks).run(renew=True)):  # it keeps states in a place of its own
        return Reach.UNKNOWN if is_alike(_Trial(optimizer, group, tasks).run(one_by_one=True)) else Reach.APART
    if not is_alike(_Trial(optimizer, group, tasks).run(renew=True, one_by_one=True)):
        return Reach.ALL
    halves = zip(*(task.cut() for task in tasks), strict=True)
    if joins.found or not is_alike(*(_Trial(optimizer, group, half).run(renew=True) for half in halves)):
        return Reach.TENSORS
    return Reach.NUMBERS


#: Operations without torch's tag `pointwise` that treat every number by itself, too.
_MOVES = {"_to_copy", "alias", "copy", "detach", "empty", "empty_like", "fill", "full", "full_like", "lift_fresh"}
_MOVES |= {"_local_scalar_dense", "masked_fill", "ones_like", "reshape", "scalar_tensor", "unsqueeze", "view", "zero"}
_MOVES |= {"zeros", "zeros_like", "new_empty", "new_zeros", "_unsafe_view", "squeeze", "expand"}


class _Joins(TorchDispatchMode):
    """Was there, inside the `with`, an operation that joins numbers, such as a sum or a product?"""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at one operation; of a list of tensors, at what it does to one."""
        if func.namespace == "profiler":  # which torch calls around the step of a base class
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.removeprefix("_foreach_").rstrip("_")
        packet = getattr(torch.ops.aten, name, func.overloadpacket)
        tags = {tag for overload in packet.overloads() for tag in getattr(packet, overload).tags}
        if name not in _MOVES and torch.Tag.pointwise not in tags:
            self.found = True
        return func(*args, **(kwargs or {}))


@dataclass
class _Task:
    """A tensor to move towards a goal, by gradients whose rows and steps are of unlike sizes and directions."""

    start: torch.Tensor
    goal: torch.Tensor
    noise: torch.Tensor  # [step, *shape]
    slope: torch.Tensor  # by row

    @classmethod
    def draw(cls, shape: tuple[int, ...], device: torch.device) -> _Task:
        """Return the same task on every rank."""
        generator = torch.Generator().manual_seed(sum(shape))
        start, goal, *noise = torch.randn(2 + _STEPS, *shape, generator=generator).mul_(0.01)
        slope = torch.logspace(-1, 1, shape[0]).view(-1, *(1 for _ in shape[1:]))
        return cls(start.to(device), goal.to(device), torch.stack(noise).to(device), slope.to(device))

    def cut(self) -> tuple[_Task, _Task]:
        """Return the tasks of two ranks, of which each has a part of the rows."""
        rows = len(self.start) // 2 + 1
        start, goal, slope = (tensor.split(rows) for tensor in (self.start, self.goal, self.slope))
        pieces = zip(start, goal, self.noise.split(rows, 1), slope, strict=True)
        first, second = (_Task(*piece) for piece in pieces)
        return first, second

    def compute_gradient(self, weight: torch.Tensor, step: int) -> torch.Tensor:
        """Return the gradient of a step: to the goal, at random, large, at right angles to each row, or small."""
        weight, noise = weight.detach(), self.noise[step]
        kinds = {
            0: weight - self.goal + noise,
            1: noise,
            2: 10 * (weight - self.goal),
            3: noise - weight * ((noise * weight).sum(-1, True) / weight.square().sum(-1, True)),
            4: 0.01 * noise,
        }
        gradient = kinds[step % 5 if weight.ndim > 1 or step % 5 != 3 else 1]
        return gradient * self.slope


class _Trial:
    """A copy of an optimizer, with the settings of one group, and the tensors that it moves."""

    def __init__(self, optimizer: Optimizer, group: dict[str, Any], tasks: Any) -> None:
        self.tasks: list[_Task] = list(tasks)
        self.weights: list[torch.Tensor] = [nn.Parameter(task.start.clone()) for task in self.tasks]
        self.numbers: list[dict[str, Any]] = []
        self.optimizer: Any = object.__new__(type(optimizer))
        own = vars(self.optimizer)
        for name, value in vars(optimizer).items():
            if name.startswith("_optimizer_"):  # hooks
                own[name] = OrderedDict()
            elif isinstance(value, types.MethodType) and value.__self__ is optimizer:
                own[name] = types.MethodType(value.__func__, self.optimizer)
            elif _is_setting(name, value):
                own[name] = copy_setting(value)
        settings = {name: copy_setting(value) for name, value in group.items() if name != "params"}
        rate = settings.get("lr")
        if torch.is_tensor(rate):
            rate.clamp_(*_RATES)
        elif isinstance(rate, (int, float)):
            settings["lr"] = min(max(rate, _RATES[0]), _RATES[1])
        own["param_groups"] = [{**settings, "params": self.weights}]
        # States that the optimizer has kept since it was made, before any step; those of steps are left out.
        former = [optimizer.state.get(parameter, {}) for parameter in group["params"][: len(self.weights)]]
        former += [dict(former[-1])] * (len(self.weights) - len(former))
        has_stepped = any(torch.is_tensor(value) and value.ndim for slots in former for value in slots.values())
        states = [{} if has_stepped else copy_setting(slots) for slots in former]
        own["state"] = defaultdict(dict, zip(self.weights, states, strict=True))
        own["state"].update({n: copy_setting(v) for n, v in optimizer.state.items() if _is_setting(n, v)})

    def run(
        self,
        renew: bool = False,
        one_by_one: bool = False,
        watched: contextlib.AbstractContextManager | None = None,
    ) -> _Trial:
        """Take the steps.

        Args:
            watched: around each step of the optimizer.
            renew: at each step the optimizer sees new tensors.
            one_by_one: it is called for each tensor, and counts as if it were called once.
        """
        optimizer, (group,) = self.optimizer, self.optimizer.param_groups
        for step in range(_STEPS):
            if renew:
                former, self.weights = self.weights, [nn.Parameter(weight.detach().clone()) for weight in self.weights]
                for old, new in zip(former, self.weights, strict=True):
                    if old in optimizer.state:
                        optimizer.state[new] = optimizer.state.pop(old)
            for task, weight in zip(self.tasks, self.weights, strict=True):
                weight.grad = task.compute_gradient(weight, step)
            counts = read_settings(optimizer)
            for weights in [[weight] for weight in self.weights] if one_by_one else [self.weights]:
                set_settings(optimizer, counts)
                group["params"] = weights
                with watched or contextlib.nullcontext():
                    step_without_hooks(optimizer)
        self.weights = [weight.detach() for weight in self.weights]
        self.numbers = [
            {name: float(value) for name, value in own.items() if isinstance(value, (int, float, torch.Tensor))}
            for own in read_settings(optimizer)
        ]
        return self


def read_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return copies of an optimizer's options and counts: of each group, of its own, then those among its states."""
    return [
        {name: _copy_if_setting(value) for name, value in own.items() if _is_setting(name, value)}
        for own in _list_settings(optimizer)
    ]


def set_settings(optimizer: Optimizer, settings: list[dict[str, Any]]) -> None:
    """Set the options and counts that `read_settings` returned, and forget those that there were not."""
    for own, former in zip(_list_settings(optimizer), settings, strict=True):
        for name in [name for name, value in own.items() if _is_setting(name, value) and name not in former]:
            if _has_copy(own[name]):  # others are states that it keeps there
                del own[name]
        own.update({name: _copy_if_setting(value) for name, value in former.items()})


def _list_settings(optimizer: Optimizer) -> list[dict[Any, Any]]:
    return [*optimizer.param_groups, vars(optimizer), optimizer.state]


def _is_setting(name: object, value: object) -> bool:
    if not isinstance(name, str):  # a parameter, in the states
        return False
    if name == "step" and callable(value):  # as a schedule of learning rates has wrapped it
        return False
    bound = isinstance(value, types.MethodType)
    return name not in _NO_SETTINGS and not bound and not name.startswith(("_hf_parallel", "_optimizer_"))


def copy_setting(value: Any) -> Any:
    """Copy numbers, texts, and what contains them.

    Raises:
        TypeError: it is, or contains, something else, such as a model or another optimizer.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, enum.Enum, torch.dtype, torch.device)):
        return value
    if isinstance(value, type | types.BuiltinFunctionType) or getattr(value, "__closure__", ()) is None:
        return value
    if torch.is_tensor(value) and value.ndim == 0:
        return value.detach().clone()
    if isinstance(value, dict):
        copied = copy.copy(value)
        copied.update({name: copy_setting(item) for name, item in value.items()})
        return copied
    if type(value) in (list, tuple, set, collections.deque):
        return type(value)(copy_setting(item) for item in value)
    raise TypeError(f"{type(value).__name__} is no setting")


def _copy_if_setting(value: Any) -> Any:
    return copy_setting(value) if _has_copy(value) else value  # a script may leave anything there


def _has_copy(value: Any) -> bool:
    try:
        copy_setting(value)
    except TypeError:
        return False
    return True

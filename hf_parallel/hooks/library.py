"""`hf_parallel.parallelize`: what a loop written by hand calls, without a layout for the whole process.

Of all patches only those of PEFT and bitsandbytes are put in place, when the script imports these libraries: adapters
come into a parallel model, and a model with adapters becomes parallel, as under the runner. And what a script writes
into weights, what masks of a pipeline's micro-batches hide, and how a layer is recomputed, where transformers is older
than that.
"""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.tensor import DTensor

from hf_parallel.apply.parallelize import ParallelState, clip_together, state_of
from hf_parallel.apply.parallelize import parallelize as make_parallel
from hf_parallel.apply.weights import store
from hf_parallel.apply.whole import parallel_models, whole_number
from hf_parallel.ask.config import AUTO, ParallelConfig, choose_spec
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.axis import Packing
from hf_parallel.check.links import free_port
from hf_parallel.hooks import activation, model_parts, runtime
from hf_parallel.hooks.patching import DECLARED, Patch, apply, apply_when_imported, patch, replace, undo
from hf_parallel.hooks.peft.before import make_parallel_below
from hf_parallel.hooks.trainer.joining import asked_by, refuse_joining
from hf_parallel.hooks.transformers import masks
from hf_parallel.ranks.mesh import ParallelMesh, stored

if TYPE_CHECKING:
    from torch import nn


# ---- Scripts that put other values into weights: optimizers of their own, averages that are swapped in and out
# torch's own answer is lost in silence: `p.data = x` changes what a DTensor says of itself and not what is stored.


@replace("torch.distributed.tensor:DTensor.data", "`p.data = x` is lost")
def data(original: Any) -> property:
    """Reading it stays torch's; what is assigned is stored."""

    return property(original.__get__, store)


@patch(
    "torch.distributed.tensor:DTensor.{norm,sum,mean,max,min}",
    "gives a DTensor, which does not mix with numbers of whole tensors",
)
def reduce_to_number(original: Callable, self: DTensor, *args: Any, **kwargs: Any) -> Any:
    """One number, as of a whole tensor; of rows or columns, and where autograd follows, torch's."""
    found = original(self, *args, **kwargs)
    return whole_number(found) if isinstance(found, DTensor) and not found.ndim and not found.requires_grad else found


@patch(
    "torch.distributed.tensor:DTensor.{item,tolist,numpy,__float__,__int__,__bool__,__index__,__complex__,__format__}",
    "reads what this rank holds of a sum",
)
def read_number(original: Callable, self: DTensor, *args: Any, **kwargs: Any) -> object:
    """What a script computes of a weight, a gradient or a moment and reads as one number is of the whole tensor."""
    if self.numel() != 1:
        return original(self, *args, **kwargs)
    return getattr(whole_number(self), original.__name__)(*args, **kwargs)


_undo_list: list[tuple[object, str, object]] = []


@functools.wraps(make_parallel)
def parallelize(
    model: nn.Module,
    config: ParallelConfig | str | None = None,
    mesh: ParallelMesh | None = None,
    pack: Packing | None = None,
) -> nn.Module:
    if not activation.active():
        _check(ParallelConfig.parse(config or ParallelConfig()) if mesh is None else mesh.config)
    if not activation.active() and not _undo_list:
        _install()
    make = functools.partial(make_parallel, config=config, mesh=mesh, pack=pack)
    if hasattr(model, "peft_config") and state_of(model) is None:
        make_parallel_below(model, make)
    else:
        make(model)
    state = state_of(model)
    assert state is not None
    runtime.equalise_within_model(of=state.mesh)  # dropout: ranks that hold the same drop the same
    return model


def _check(config: ParallelConfig) -> None:
    """Before the model is changed."""
    if asked_by(config)[1]:
        refuse_joining("a loop written by hand makes its own batches", config=config)


def withdraw() -> None:
    """Before a layout for the whole process, whose patches are the same and more."""
    undo(_undo_list)


def _install() -> None:
    """For peft now or after its import, in the midst of which the list of all patches could not be imported."""
    rooms = {model_parts.__name__, masks.__name__, __name__}
    _undo_list.extend(apply([patch for patch in DECLARED if patch.room in rooms]))
    packages = ["peft", "bitsandbytes"]
    if "bitsandbytes" in sys.modules:
        _undo_list.append(apply_when_imported(packages.pop(), _patches("bitsandbytes")))
    _undo_list.append(apply_when_imported("peft", _patches(*packages)))  # it imports bitsandbytes itself


def _patches(*packages: str) -> Iterator[Patch]:
    """Those of libraries that are imported. The list of all takes a while to import: this waits until it is read."""
    from hf_parallel.hooks.patches import all_patches

    imported = [package for package in packages if package in sys.modules]
    yield from (patch for patch in all_patches() if patch.library in imported)


# ---- `hf_parallel.notebook_launcher`: accelerate's, with a spec. Each process it forks becomes a rank of the layout
# from hf_parallel import notebook_launcher
#
# def train():                     # imports, model and Trainer as they are, all inside
#     ...
#
# notebook_launcher(train, num_processes=4, parallel="tp=2,pp=2")


_SOURCE = "notebook_launcher(parallel=…)"


def notebook_launcher(
    function: Callable[..., object],
    args: Sequence[object] = (),
    num_processes: int | None = None,
    *accelerate_args: object,
    parallel: str | ParallelConfig | None = None,
    **accelerate_options: object,
) -> None:
    """Run `function(*args)` on `num_processes` processes under a spec.

    Args:
        function: everything of the training, the model included: a device used before cannot be forked.
        num_processes: default: one per GPU; on a machine without GPUs the product of the spec's sizes.
        parallel: the spec; default: the environment's HF_PARALLEL. Without either this is accelerate's launcher.
        accelerate_args, accelerate_options: all else that `accelerate.notebook_launcher` takes, such as
            `num_nodes` or `max_restarts`. `use_port` is a free one by default.

    Raises:
        SpecError: the spec is not understood, or does not fit the processes; nothing was started.
    """
    from accelerate import notebook_launcher as launch

    asked = parallel.to_spec() if isinstance(parallel, ParallelConfig) else parallel
    chosen = choose_spec(asked, _SOURCE)
    if chosen is None:
        return launch(function, args, num_processes, *accelerate_args, **accelerate_options)
    spec = chosen[0]
    nodes = cast(int, accelerate_options.get("num_nodes", 1))
    number = num_processes or _one_per_gpu() or _product(spec)
    if spec != AUTO:
        ParallelConfig.parse(spec).resolve(number * nodes)
    if nodes == 1 and len(accelerate_args) < 2:
        accelerate_options.setdefault("use_port", str(free_port()))  # two notebooks of one machine must not meet
    return launch(_Rank(function, spec), args, number, *accelerate_args, **accelerate_options)


class _Rank:
    """What runs in each process: part of the layout from before the function to its end."""

    def __init__(self, function: Callable[..., object], spec: str) -> None:
        self.function, self.spec = function, spec
        self.__name__ = self.__qualname__ = getattr(function, "__name__", "train")  # elastic's records say it

    def __call__(self, *args: object) -> None:
        import torch

        several = int(os.environ.get("WORLD_SIZE", 1)) > 1
        if several and not torch.accelerator.is_available() and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # a pool of threads does not survive a fork, and N pools slow one another down
        activation.activate(self.spec, source=_SOURCE)
        self.function(*args)  # after an error groups stay open: to end them is to wait for the other ranks
        from hf_parallel.ranks.mesh import end_groups

        activation.deactivate()
        end_groups()


def _one_per_gpu() -> int:
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def _product(spec: str) -> int:
    """As many processes as the sizes that are given; the axis that takes what is left takes one."""
    if spec == AUTO:
        refuse("notebook_launcher", "there is no GPU to count", "num_processes=4")
    return math.prod(size for size in ParallelConfig.parse(spec).sizes.values() if size > 0)


# ---- What torch offers to loops of a script's own, for lists of tensors: clipping, averages of weights --------------
# A parallel model's lists hold shards of several meshes beside whole tensors, and under a pipeline those of one stage.


def _listed(parameters: torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _states_of(parameters: list[torch.Tensor]) -> list[ParallelState]:
    """Of the parallel models that these are of; all stages of a pipeline take part, also one that has none of them."""
    wanted = set(map(id, parameters))
    states = [(model, state) for model in parallel_models() if (state := state_of(model)) is not None]
    found = [state for model, state in states if any(id(p) in wanted for p in model.parameters())]
    return found or [state for _, state in states if not wanted and state.pipeline is not None]


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
    parameters = _listed(parameters)
    states = _states_of(parameters)
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
    gradients = [parameter.grad for parameter in _listed(parameters) if parameter.grad is not None]
    original([SimpleNamespace(grad=stored(gradient)) for gradient in gradients], clip_value, foreach)


@patch("torch.optim.swa_utils:get_{ema,swa}_multi_avg_fn", "mixes shards and whole tensors", copies=True)
def average(original: Callable, *args: object, **kwargs: object) -> Callable:
    """What `AveragedModel` does to all weights at once, on the parts that this rank stores."""
    own = original(*args, **kwargs)

    @torch.no_grad()
    def of_parts(means: Iterable[torch.Tensor], values: Iterable[torch.Tensor], count: int | torch.Tensor) -> None:
        own(list(map(stored, means)), list(map(stored, values)), count)

    return of_parts

"""What torch offers to loops of a script's own, for lists of tensors: clipping, averages of weights.

A parallel model's lists hold shards of several meshes beside whole tensors, and under a pipeline those of one stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace

import torch

from hf_parallel.hooks.patching import patch
from hf_parallel.mesh import stored
from hf_parallel.parallelize import ParallelState, clip_together, state_of
from hf_parallel.whole import parallel_models


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

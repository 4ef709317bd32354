"""Parts of a model that rank 0 saves by itself, as if they were the whole.

    state = trainer.model.state_dict()                                        on all ranks
    if trainer.args.should_save:
        trainer._save(folder, state_dict={k: v.cpu() for k, v in state.items()})

What rank 0 has then are the model's own values, of this rank. So it asks the others for theirs. So it does for a
save under `if is_main_process:` that ends a script.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.checkpoint.slices import axes_and_dims
from hf_parallel.collectives import AloneError, ask, assert_all_ranks
from hf_parallel.collectives.requests import on_request
from hf_parallel.mesh import stored

M = TypeVar("M", bound=nn.Module)

_ADVICE = "call trainer.save_model(), or model.save_pretrained without state_dict, on all ranks (docs/idioms.md)"
_OTHERWISE = "save what hf_parallel.full_state_dict(model) gives, called on all ranks (docs/idioms.md)"
_numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()


def let_ask(model: M, gather: Callable[[M], object]) -> None:
    """Rank 0 may ask for the whole tensors of a model. All ranks call this for the same models in the same order.

    Args:
        gather: returns them on rank 0. Collective.
    """
    if model in _numbers or dist.get_backend() == "fake":  # a dry run may be one rank's own
        return
    _numbers[model] = len(on_request)
    on_request.append((weakref.ref(model), gather))


def is_alone(call: str, model: nn.Module) -> bool:
    """Is this rank 0, and are the others at the end of their script? Else all are in this call when it returns."""
    try:
        assert_all_ranks(call)
    except AloneError as error:
        if not error.at_end or dist.get_rank() > 0 or model not in _numbers:
            raise
        return True
    return False


def asked(model: M, gather: Callable[[M], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Whole tensors, with the help of the other ranks, who are not in this call. Rank 0 alone calls it.

    Raises:
        AloneError: they are not where they can be asked.
    """
    ask("save_pretrained", _numbers[model], _ADVICE)
    return gather(model)


def are_parts(model: nn.Module, given: Mapping[str, torch.Tensor], names: Iterable[str]) -> bool:
    """Does a state dict hold what this rank stores, and no more?

    Args:
        names: of all that is saved of the model, other stages' too.
    """
    own = model.state_dict()
    here, elsewhere = ([name for name in names if (name in own) == held] for held in (True, False))
    of_one_stage = any(name in given for name in here) and elsewhere and not any(name in given for name in elsewhere)
    return bool(of_one_stage) or any(isinstance(x, DTensor) and axes_and_dims(x) for x in given.values())


def made_whole(
    model: M, given: Mapping[str, torch.Tensor], names: Iterable[str], gather: Callable[[M], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """What rank 0 is to save where it was given parts, in their dtype. Rank 0 alone calls it.

    Raises:
        AloneError: the other ranks are not where they can be asked.
        NotImplementedError: what is given is not what the model holds.
    """
    own = model.state_dict()
    wrong = [name for name, value in given.items() if name not in own or not _same(own[name], value)]
    if wrong := wrong + [name for name in names if name in own and name not in given]:
        raise NotImplementedError(
            "hf_parallel: save_pretrained on one rank is given a part of the model that is not as it is now, first at "
            f"{wrong[0]}; {_OTHERWISE}"
        )
    whole = asked(model, gather)
    dtypes = {value.dtype for value in given.values() if value.is_floating_point()}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in whole.items()}


def _same(own: torch.Tensor, given: torch.Tensor) -> bool:
    """But for dtype and device."""
    a, b = stored(own).detach(), stored(given).detach()
    return a.shape == b.shape and torch.equal(a.to(b.dtype).cpu(), b.cpu())

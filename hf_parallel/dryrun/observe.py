"""Two training steps of a parallel model, with a `Recorder` beside them: in a real process or in a dry run."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hf_parallel.ask.keys.sizes import SHARDS
from hf_parallel.axes.data.compressed import groups_of
from hf_parallel.axes.data.reduction import before_the_last
from hf_parallel.dryrun.recorder import Recorder, Traffic
from hf_parallel.mesh import EXPERT_AXES
from hf_parallel.model.unread_logits import unread_logits
from hf_parallel.parallelize import ParallelState, state_of
from hf_parallel.spec import refuse

Communication = dict[str, dict[str, Traffic]]  # axis -> kind of collective -> what it moved
OPTIMIZERS = ("adamw", "sgd", "sgd_momentum")


@dataclass
class Observed:
    """What the second of two steps did on one rank; the first one fills the optimizer's state.

    peaks: bytes by kind at the fullest moment of each part of the step.
    kept: bytes by kind between the backward pass and `zero_grad`.
    """

    peaks: list[Counter[str]]
    kept: Counter[str]
    communication: Communication = field(default_factory=dict)

    @property
    def peak(self) -> Counter[str]:
        """Bytes by kind at the fullest moment."""
        return max(self.peaks, key=lambda peak: peak.total())


def observe(
    model: nn.Module,
    batches: list[dict[str, torch.Tensor]],
    optimizer: str = "adamw",
    autocast: torch.dtype | None = None,
    layers: tuple[tuple[nn.Module, ...], ...] = (),
    scalars: int | None = None,
) -> Observed:
    """Train two steps and say what the second kept and sent.

    Args:
        model: parallel, with memory for its weights.
        batches: what one step accumulates over.
        autocast: compute products in this dtype, whatever weights are stored in.
        layers: of each of this rank's stages, to part the step where layers begin and end.
        scalars: see `Recorder`.
    """
    state = state_of(model)
    assert state is not None
    with Recorder(axis_names(state), scalars=scalars) as recorder, _parted(recorder, layers):
        kinds = {recorder.note(tensor): "parameters" for tensor in (*model.parameters(), *model.buffers())}
        update = build_optimizer(optimizer, model)
        for accumulated in (batches[-1:], batches):  # the first step only fills the optimizer's state
            recorder.traffic.clear()
            recorder.moments.clear()
            recorder.remember()
            _accumulate(model, accumulated, autocast)
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            kinds |= {recorder.note(gradient): "gradients" for gradient in gradients}
            recorder.remember()
            update.step()
            states = [x for values in update.state.values() for x in values.values() if torch.is_tensor(x)]
            kinds |= {recorder.note(tensor): "optimizer" for tensor in states}
            recorder.remember()
            kept = recorder.now(kinds)
            del gradients, states
            update.zero_grad()
        traffic = {axis: dict(by_kind) for axis, by_kind in recorder.traffic.items()}
        return Observed(recorder.peaks(kinds), kept, traffic)


def _accumulate(model: nn.Module, batches: list[dict[str, torch.Tensor]], autocast: torch.dtype | None) -> None:
    """Forward and backward of each batch, as Trainer runs them."""
    state = state_of(model)
    assert state is not None
    for i, batch in enumerate(batches):
        more = i < len(batches) - 1
        with before_the_last(state.root, state.config) if more else contextlib.nullcontext():
            with torch.autocast(state.mesh.device.type, autocast, enabled=autocast is not None), unread_logits():
                loss = model(**batch)["loss"]
            loss.backward()


def build_optimizer(name: str, model: nn.Module) -> torch.optim.Optimizer:
    """As Trainer builds it: AdamW in one kernel where all parameters are of one sort.

    Raises:
        SpecError: an optimizer that is not known here.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if name == "adamw":
        fused = len({isinstance(p, DTensor) for p in parameters}) == 1
        return torch.optim.AdamW(parameters, fused=fused, foreach=None if fused else False)
    if name in ("sgd", "sgd_momentum"):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if name == "sgd_momentum" else 0.0, foreach=False)
    refuse(f"optimizer={name}", f"the dry run knows {', '.join(OPTIMIZERS)}", "adamw")


def axis_names(state: ParallelState) -> dict[str, str]:
    """What to call process groups: their axis, also of a part of it, as cp's rings and groups of Ulysses; `data` that
    of all data ranks; both ends of a pipeline are pp too."""
    mesh, ranks_of = state.mesh, dist.get_process_group_ranks
    known = {"data": mesh.data_group, "pp": state.pipeline.tied_group if state.pipeline else None}
    cp = set(ranks_of(mesh.group("cp")))
    names: dict[str, str] = {group.group_name: "cp" for group in mesh.groups.made() if cp.issuperset(ranks_of(group))}
    names |= {group.group_name: name for name, group in known.items() if group is not None}
    names |= {group.group_name: "dp_shard" for group in groups_of(mesh)}
    axes = [*(EXPERT_AXES if mesh.config.ep_size > 1 else ()), *mesh.config.sizes]  # of the same ranks the latter
    names |= {mesh.group(axis).group_name: axis for axis in axes}
    if mesh.size("cp") > 1:  # FSDP2 shards over dp_shard x cp
        names |= {mesh.attention_group.group_name: "cp", mesh.sharing_mesh.get_group(SHARDS).group_name: "dp_shard"}
    return names


@contextlib.contextmanager
def _parted(recorder: Recorder, stages: tuple[tuple[nn.Module, ...], ...]) -> Iterator[None]:
    """Remember when a stage's last layer has run forward and backward, and when its first one begins backward.

    Memory grows or shrinks evenly in between, so that no part's fullest moment jumps when there are more layers.
    """
    handles = []
    for layers in stages:
        first, last = layers[0], layers[-1]
        handles.append(first.register_forward_hook(lambda *call: _at_gradient(call[2], recorder.remember)))
        handles.append(last.register_forward_hook(lambda *call: recorder.remember()))
        before = lambda _, args, kwargs: _at_gradient((args, kwargs), recorder.remember)  # noqa: E731
        handles.append(last.register_forward_pre_hook(before, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _at_gradient(values: object, call: Callable[[], None]) -> None:
    """Call when the gradient of the first tensor in `values` that has one is there."""
    tensors = torch.utils._pytree.tree_leaves(values)
    hidden = next((x for x in tensors if torch.is_tensor(x) and x.requires_grad), None)
    if hidden is not None:
        hidden.register_hook(lambda gradient: call())

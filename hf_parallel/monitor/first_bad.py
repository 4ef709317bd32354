"""A search for the module that first gave a number that is not finite, by hooks on all of them.

    search = Search(model, stages)
    with search.looking(micro_batch=1): loss = step(batch)
    sentence(findings of all ranks)       # "the forward of model.layers.3.mlp.down_proj on rank 1, micro-batch 2 of 4"

Forward, a module's output tells; backward, the gradient of its input. What a stage has received from another is that
one's finding. Among ranks the earliest counts: by micro-batch, forward before backward, in the order of the program.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from hf_parallel.monitor.hang_report import format_rank_numbers
from hf_parallel.ranks.mesh import get_stored

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle


WEIGHTS, FORWARD, BACKWARD, GRADIENT = range(4)
Finding = dict


@dataclass(slots=True)
class _Trace:
    """The trace of a tensor that has a gradient: whose output it is, and whose input."""

    part: int
    producer: str = ""
    consumers: list[str] = field(default_factory=list)
    received: bool = False


class Search:
    """Looks at the modules of one rank, and keeps the first finding.

    Args:
        stages: what a pipeline's schedule calls, and whether it is the last; its micro-batches are parts of ours.
    """

    def __init__(self, model: nn.Module, stages: Iterable[tuple[nn.Module, bool]] = ()) -> None:
        self.model, self.stages = model, dict(stages)
        self.finding: Finding | None = None
        self._micro_batch, self._order = 1, 0
        self._calls: Counter[nn.Module] = Counter()  # of stages
        self._part = 1

    def look_at_weights(self) -> None:
        """Before the first micro-batch."""
        for name, parameter in self.model.named_parameters():
            if is_bad(parameter):
                return self._found(WEIGHTS, name)

    def look_at_gradients(self) -> None:
        """After the last one, where no module gave anything away."""
        for name, parameter in self.model.named_parameters():
            if self.finding is None and is_bad(parameter.grad):
                self._found(GRADIENT, name)

    @contextlib.contextmanager
    def looking(self, micro_batch: int) -> Iterator[None]:
        """Look at this micro-batch, which runs forward and backward."""
        self._micro_batch, self._part = micro_batch, 1
        self._calls.clear()
        handles: list[RemovableHandle] = []
        for name, module in [*self.model.named_modules(), *(("", stage) for stage in self.stages)]:
            handles += self._hook_module(name, module)
        try:
            with torch.compiler.set_stance("force_eager"):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def look_at_loss(self, loss: torch.Tensor) -> None:
        """Look at a loss that none of the modules gave."""
        if is_bad(loss):
            self._found(FORWARD, "the loss")

    def _hook_module(self, name: str, module: nn.Module) -> list[RemovableHandle]:
        is_stage = module in self.stages

        def before(_: nn.Module, args: tuple, kwargs: dict) -> None:
            if is_stage and torch._C._current_graph_task_id() == -1:  # else it is run again, in a backward
                self._calls[module] += 1
                self._part = self._calls[module]  # of modules inside, too, which run in pieces of a sequence
            if is_stage and any(map(is_bad, tree_leaves((args, kwargs)))):
                self._found(FORWARD, name, self._part, received=True)
            for trace in self._make_traces((args, kwargs), self._part):
                if not is_stage:  # the innermost module that a tensor is given to names it
                    outer = [other for other in trace.consumers if other and not name.startswith(f"{other}.")]
                    trace.consumers = [*outer, name]

        def after(_: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
            self._order += 1
            if self.finding is None and not is_stage and any(map(is_bad, tree_leaves(output))):
                self._found(FORWARD, name, self._part, before=any(map(is_bad, tree_leaves((args, kwargs)))))
            for trace in self._make_traces(output, self._part):
                trace.producer = trace.producer or name
                trace.received = trace.received or not self.stages.get(module, True)

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        ]

    def _make_traces(self, values: object, part: int) -> Iterator[_Trace]:
        for tensor in tree_leaves(values):
            if torch.is_tensor(tensor) and tensor.requires_grad and not tensor.is_leaf:
                if "_first_bad" not in tensor.__dict__:
                    trace = tensor.__dict__["_first_bad"] = _Trace(part)
                    tensor.register_hook(lambda gradient, trace=trace: self._look_at_gradient(gradient, trace))
                yield tensor.__dict__["_first_bad"]

    def _look_at_gradient(self, gradient: torch.Tensor, trace: _Trace) -> None:
        self._order += 1
        if self.finding is None and is_bad(gradient):
            name = " or ".join(trace.consumers) or f"what follows {trace.producer or 'the model'}"
            self._found(BACKWARD, name, trace.part, received=trace.received)

    def _found(self, phase: int, name: str, part: int = 1, before: bool = False, received: bool = False) -> None:
        if self.finding is None:
            self.finding = {
                "phase": phase,
                "name": name or "the model",
                "micro_batch": self._micro_batch,
                "part": part if self.stages else None,
                "before": before,
                "received": received,
                "order": self._order,
            }


def is_bad(value: object) -> bool:
    """Return whether a number in it is not finite. Waits for the device."""
    if not torch.is_tensor(value) or not value.is_floating_point() or value.is_meta:
        return False
    return not bool(torch.isfinite(get_stored(value.detach())).all())  # a checkpointed layer counts what it saves


# ---- of all ranks --------------------------------------------------------------------------------------------------


def format_findings(findings: dict[int, Finding | None], micro_batches: int, step: int) -> str:
    """Say where the first bad number comes from, by rank."""
    own = {rank: found for rank, found in findings.items() if found is not None}
    if not own:
        return "no module gave it when the step was computed once more"
    # A later stage runs the same part later; ranks that split a layer run it in the same order.
    places = {
        rank: (
            found["phase"] != WEIGHTS,
            found["received"],
            found["micro_batch"],
            found["phase"],
            found["part"] or 0,
            found["order"],
        )
        for rank, found in own.items()
    }
    least = min(places.values())
    first = [rank for rank, place in places.items() if place == least]
    found, ranks = own[first[0]], format_rank_numbers(first)
    name, phase = found["name"], found["phase"]
    if phase == WEIGHTS:
        after = f"the optimizer's step {step - 1}" if step > 1 else "it was loaded"
        return f"it first appears in weight {name}, after {after} on {ranks}"
    if phase == GRADIENT:
        return f"it first appears in the gradient of {name} on {ranks}"
    part = "" if found["part"] is None else f" (micro-batch {found['part']} of the pipeline)"
    batch = f"micro-batch {found['micro_batch']} of {micro_batches}{part}"
    if phase == BACKWARD:
        return f"it first appears in the backward of {name} on {ranks}, {batch}"
    where = f"what {name} was given" if found["before"] else f"the forward of {name}"
    return f"it first appears in {where} on {ranks}, {batch}"

"""All rows of a batch through the stages, whatever is then done with the outputs: GPipe's order, by hand.

Forwards go micro-batch by micro-batch; the head and the loss run once, over all rows, and the outputs appear on every
rank as one autograd node. Its backward sends the gradient back through the stages, micro-batch by micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from hf_parallel.pipeline.batches import Batch, fresh_gradients, split_rows, tokens_of
from hf_parallel.pipeline.outputs import broadcast_outputs, detached_node


@dataclass
class Pass:
    """One micro-batch through the layers of one stage: what came in and what went out, for the backward."""

    hidden: torch.Tensor | None
    output: torch.Tensor | None = None
    handed_on: torch.Tensor | None = None  # on the last stage: the output as the head and the script's loss see it


def run_whole(engine: Any, batch: Batch, rows: int) -> Any:
    """All rows through the stages; the model's outputs on every rank."""
    grad = torch.is_grad_enabled()
    parameters = engine._trainable()  # taken now: during the forward FSDP2 registers gathered ones in their place
    tape: list[dict[int, Pass]] = []
    outputs = _forward_whole(engine, batch, min(rows, 2 * engine.config.pp_size), tape)
    outputs, tensors = broadcast_outputs(outputs, engine.group, engine.last_rank, engine.mesh.device, engine.loss_only)
    values = [tensor.detach() for tensor in tensors]
    if grad:
        values = detached_node(values, lambda gradients: _backward_whole(engine, parameters, tape, tensors, gradients))
    return outputs(values)


def run_once(engine: Any, batch: Batch, call: Callable[[], Any]) -> dict[str, Any]:
    """All rows at once through the stages, the last of which finishes `call`, a loss or a loss and outputs."""
    result: dict[str, Any] = {}
    for view, stage in zip(engine.views, engine._stages(), strict=True):
        hidden = None if view.index == 0 else _receive(engine, view.index, batch)
        stage.work = lambda hidden, i, view=view: engine._enter(view, hidden, call)
        output = stage(hidden)
        if view.index == engine.last_index:
            loss, outputs = output if isinstance(output, tuple) else (output, {})
            result = {**outputs, "loss": loss}
        else:
            _send(engine, output.detach(), view.index + 1)
    rebuilt, tensors = broadcast_outputs(result, engine.group, engine.last_rank, engine.mesh.device, engine.loss_only)
    return rebuilt(tensors)


def _forward_whole(engine: Any, batch: Batch, count: int, tape: list[dict[int, Pass]]) -> Any:
    """Each micro-batch through this rank's stages in turn; the last stage waits until it has them all."""
    for part in split_rows(batch, count):
        tape.append({})
        for view, stage in zip(engine.views, engine._stages(), strict=True):
            hidden = None if view.index == 0 else _receive(engine, view.index, part)
            tape[-1][view.index] = Pass(hidden)
            if view.index != engine.last_index:
                stage.work = lambda hidden, i, view=view, part=part: engine._enter(
                    view, hidden, lambda: engine._model_forward(**part)
                )
                tape[-1][view.index].output = output = stage(hidden)
                _send(engine, output.detach(), view.index + 1)
    if not engine.last:
        return None
    return _last_stage(engine, batch, [passes[engine.last_index] for passes in tape])


def _last_stage(engine: Any, batch: Batch, passes: list[Pass]) -> Any:
    """The model's forward, once for all rows: only its backbone runs micro-batch by micro-batch."""

    def backbone(*args: Any, **kwargs: Any) -> Any:
        results = []
        for done, part in zip(passes, split_rows(engine._named(args, kwargs), len(passes)), strict=True):
            results.append(engine._run_backbone(done.hidden, **part))
            done.output = results[-1]["last_hidden_state"]
            # Cut here, so that the backward of the layers too goes micro-batch by micro-batch.
            done.handed_on = done.output.detach().requires_grad_(done.output.requires_grad)
        results[0]["last_hidden_state"] = torch.cat([cast(torch.Tensor, done.handed_on) for done in passes])
        return results[0]

    view, stage = engine.views[-1], engine._stages()[-1]
    stage.work = lambda hidden, i: engine._enter(view, backbone, lambda: engine._model_forward(**batch))
    return stage()


def _receive(engine: Any, index: int, batch: Batch) -> torch.Tensor:
    """What stage `index` works on, from the stage before it."""
    source = engine.config.rank_of_stage(index - 1)
    if source == engine.group.rank():
        assert engine._handed_over is not None
        hidden, engine._handed_over = engine._handed_over, None
    else:
        hidden = engine._boundary(tokens_of(batch), engine.mesh.device)
        dist.recv(hidden, group=engine.group, group_src=source)
    return hidden.requires_grad_(torch.is_grad_enabled())


def _send(engine: Any, tensor: torch.Tensor, index: int) -> None:
    """Hand a stage's output, or its input's gradient, to stage `index`."""
    target = engine.config.rank_of_stage(index)
    if target == engine.group.rank():
        engine._handed_over = tensor
    else:
        dist.send(tensor.contiguous(), group=engine.group, group_dst=target)


def _backward_whole(
    engine: Any, parameters: list, tape: list[dict[int, Pass]], tensors: list[torch.Tensor], gradients: list
) -> None:
    """Send the gradient of the outputs, known to every rank, back through the stages."""
    with fresh_gradients(parameters) as fresh:
        for stage in engine._stages():
            _reduce_in(stage, False)
        if engine.last:
            pairs = [(t, g) for t, g in zip(tensors, gradients, strict=True) if g is not None and t.requires_grad]
            torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
        for i, passes in enumerate(tape):
            for view, stage in reversed(list(zip(engine.views, engine._stages(), strict=True))):
                _reduce_in(stage, i == len(tape) - 1)
                _backward_pass(engine, view.index, passes[view.index])
    engine._accumulate(fresh, None)


def _backward_pass(engine: Any, index: int, done: Pass) -> None:
    assert done.output is not None
    if done.handed_on is not None:
        gradient = done.handed_on.grad
    else:
        gradient = _receive_gradient(engine, index, done.output)
    if done.output.requires_grad and gradient is not None:
        torch.autograd.backward(done.output, gradient)
    if done.hidden is not None:
        hidden = done.hidden
        _send(engine, torch.zeros_like(hidden) if hidden.grad is None else hidden.grad, index - 1)


def _receive_gradient(engine: Any, index: int, output: torch.Tensor) -> torch.Tensor:
    source = engine.config.rank_of_stage(index + 1)
    if source == engine.group.rank():
        assert engine._handed_over is not None
        gradient, engine._handed_over = engine._handed_over, None
        return gradient
    gradient = torch.empty_like(output, memory_format=torch.contiguous_format)
    dist.recv(gradient, group=engine.group, group_src=source)
    return gradient


def _reduce_in(stage: Any, last: bool) -> None:
    """FSDP2 reduces a stage's gradients, and frees its weights, after the last micro-batch only.

    So the number of collectives does not depend on the number of rows, which data ranks may differ in.
    """
    if isinstance(stage, FSDPModule):
        stage.set_requires_gradient_sync(last)
        stage.set_reshard_after_backward(last)
        stage.set_is_last_backward(last)

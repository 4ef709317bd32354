"""A pipeline behind `model(**batch)`: one call runs all micro-batches through all stages.

Every stage runs the model's own forward on its micro-batch as far as its last layer; there the first stage embeds the
tokens, the others take the activations they received, and all but the last leave. So masks, rotary embeddings and head
are Hugging Face's own code, and the last stage computes the model's own loss.

Two ways through the stages, chosen per call and both exact:

    scheduled   training with a loss that adds up over micro-batches, the model's own or the script's: one of torch's
                schedules; the last stage computes each micro-batch's loss as soon as it arrives
    served      everything else (evaluation; losses over whole batches; ragged tails): all forwards, then, where the
                result has a gradient, all backwards, as GPipe does; outputs appear on every rank
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch

from hf_parallel.arguments import by_name
from hf_parallel.axes.pipeline import unscheduled
from hf_parallel.axes.pipeline.batches import by_positions, count_targets, split_rows, tokens_of, without_count
from hf_parallel.axes.pipeline.outputs import PipelineLoss, refuse_partial_outputs
from hf_parallel.axes.pipeline.scheduled import scheduled
from hf_parallel.axes.pipeline.schedules import can_be_cut, micro_batch_count
from hf_parallel.axes.pipeline.stage_runner import Handler, StageRunner
from hf_parallel.axes.pipeline.stages import StageView
from hf_parallel.model.anatomy import backbone_of
from hf_parallel.model.batches import Batch
from hf_parallel.model.known_masks import known_mask
from hf_parallel.model.unread_logits import logits_are_unread, unread_logits

if TYPE_CHECKING:
    from transformers.utils import ModelOutput


class PipelineEngine(StageRunner):
    """Runs one pipelined model behind its `forward`."""

    # ---- attaching ---------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Put the engine behind `model.forward` and cut the backbone's forward.

        Plain functions, called with the model as first argument or without: accelerate rebinds what it wraps.
        """
        backbone = backbone_of(self.model)
        self._model_forward, self._backbone_forward = self.model.forward, backbone.forward
        self._signature = inspect.signature(self._model_forward)
        self._backbone_signature = inspect.signature(self._backbone_forward)

        @functools.wraps(self._model_forward)
        def model_forward(*args: object, **kwargs: object) -> ModelOutput:
            return self.run(*(args[1:] if args and args[0] is self.model else args), **kwargs)

        @functools.wraps(self._backbone_forward)
        def backbone_forward(*args: object, **kwargs: object) -> ModelOutput:
            args = args[1:] if args and args[0] is backbone else args
            return self._cut_backbone(by_positions(by_name(self._backbone_signature, args, kwargs)))

        self.model.forward, backbone.forward = model_forward, backbone_forward

    def set_forward(self, forward: Callable) -> None:
        """What computes the model's outputs around its backbone from here on: the last stage's loss among them."""
        self._model_forward, self._signature = forward, inspect.signature(forward)

    # ---- one call ------------------------------------------------------------------------------------------------

    def run(self, *args: object, **kwargs: object) -> ModelOutput:
        """`model(**batch)` on every rank of the pipeline; returns the same values on all of them."""
        batch = by_name(self._signature, args, kwargs)
        if self.services.balance is None:  # nobody asks
            batch = without_count(by_positions(batch))
        refuse_partial_outputs(self.model.config, batch, self.services.balance is not None)
        if "use_cache" in self._signature.parameters:
            batch["use_cache"] = False
        if self.items is not None and self.sums_over_tokens and batch.get("labels") is not None:
            batch["num_items_in_batch"] = batch.get("num_items_in_batch", self.items)
        if self._view is not None:  # a script's loss, on the last stage, calls its model
            return self._model_forward(**batch)
        if self.pipelines.session is not None:  # or another one
            return self.pipelines.session.within(self, lambda: self._model_forward(**batch))
        rows = tokens_of(batch).shape[0]
        if self._schedulable(batch, rows):
            batch = {"num_items_in_batch": count_targets(batch), **batch}
            parts = split_rows(batch, micro_batch_count(rows, self.config))
            run = functools.partial(self._own_loss, parts)
            with known_mask(batch, tokens_of(batch)):
                return PipelineLoss(loss=scheduled(self, len(parts), tokens_of(parts[0]), run))
        return unscheduled.served(self, batch, lambda: self._outputs(batch))[0]

    def _schedulable(self, batch: Batch, rows: int) -> bool:
        summed = self._trains(batch) and self.sums_over_tokens
        return summed and can_be_cut(rows, self.config) and self.balance_of(batch) is None

    def _trains(self, batch: Batch) -> bool:
        """Will this call's own loss go backward?"""
        return torch.is_grad_enabled() and self.model.training and batch.get("labels") is not None

    def _own_loss(self, parts: list[Batch], view: StageView, hidden: torch.Tensor | None, i: int) -> torch.Tensor:
        handler = functools.partial(self.run_backbone, hidden)
        with unread_logits(self.services.loss_in_chunks):
            return self.enter(view, handler, lambda: self._model_forward(**parts[i])["loss"])

    def _outputs(self, batch: Batch) -> ModelOutput:
        outputs = self._model_forward(**batch)
        if self._trains(batch) and self.balance_of(batch) is not None:
            return PipelineLoss(loss=outputs["loss"], aux_loss=outputs["aux_loss"])
        if (self.loss_only or logits_are_unread()) and outputs.get("loss") is not None:
            return type(outputs)(loss=outputs["loss"])
        # What is no tensor, such as a cache, is of this stage only.
        return type(outputs)(**{key: value for key, value in outputs.items() if torch.is_tensor(value)})

    def _cut_backbone(self, kwargs: Batch) -> ModelOutput:
        refuse_partial_outputs(self.model.config, kwargs, self.services.balance is not None)
        if "use_cache" in self._backbone_signature.parameters:
            kwargs["use_cache"] = False
        if self._on_call is not None:
            return self._on_call(kwargs)
        if self.pipelines.session is not None:
            session = self.pipelines.session
            return session.within(self, lambda: session.answer(self, kwargs))
        return unscheduled.served(self, kwargs, lambda: cast(Handler, self._on_call)(kwargs))[0]

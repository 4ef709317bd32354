"""Cut batches along the sequence where tokens enter the backbone; join hidden states where they leave it.

    model(input_ids, labels)                     the script's own loss, heads that read one token, …
      backbone: cut -> layers on s / cp            backbone: cut -> layers on s / cp -> join
      head on s / cp                               head on s
      loss: labels shifted, then cut;              loss: the script's, on every cp rank alike
            summed over cp ranks

The left way needs the model's own loss, a sum over tokens. Logits then stay in parts, and are joined only if a script
reads them. The right way is exact whatever a script does with the outputs.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from hf_parallel.axes.context import packs
from hf_parallel.axes.context.attention import Cut, Exchanged, current, join, sum_over_ranks, take, take_part
from hf_parallel.axes.context.choose import Choice
from hf_parallel.axes.context.layout import Layout, Shape
from hf_parallel.model.anatomy import Draws, find_checkpoint_settings
from hf_parallel.model.calls import (
    CACHES,
    bind_arguments_of,
    compute_targets_of,
    count_items,
    get_tokens_of,
    has_cache,
    hold_tokens,
)
from hf_parallel.model.known_masks import KnownMask, use_known_mask
from hf_parallel.ranks.local import whole_when_read
from hf_parallel.ranks.observed import ATTENTION, Store, Within

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from transformers import PreTrainedModel
    from transformers.utils import ModelOutput

    from hf_parallel.model.calls import Batch


# ---- Activation checkpointing that does not attend twice: output and log-sum-exp of each attention are kept ---------
# A recomputed layer computes its queries, keys and values again, but not the attention with its communication: d + 1
# numbers are kept per token and head, and a whole ring is saved.


def make_checkpoint_contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the contexts of the first and the second run of a checkpointed layer (torch's `context_fn`)."""
    store = Store(frozenset({ATTENTION}))
    return Within(store, False), Within(store, True)


#: So many outputs of padded batches are looked at: a loss that reads those at padding does so from the first on.
_LOOKED_AT = 16
#: Arguments that tell flash attention where documents begin. They are left out: our kernels ask the layout.
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass(eq=False)
class SequenceCut:
    """Cuts the batches of one model.

    Args:
        choice: the variant for each batch.
        ways: how each variant shares tokens, and attends.
        local_length: the number of tokens that each rank holds of a row of so many.
        packed: do positions that start again at 0 begin another document, as in most causal models?
        own_loss: is the model's loss a sum over tokens?
        caches: may the model keep a key/value cache? Calls with one (generation) are not cut.
    """

    group: dist.ProcessGroup
    choice: Choice
    ways: dict[str, tuple[Shape, Exchanged]]
    local_length: Callable[[int], int]
    packed: Callable[[], bool]
    own_loss: bool
    caches: bool
    _parts: bool = False  # do outputs of the backbone stay in parts?
    _batch: Batch = field(default_factory=dict)
    _last: tuple[tuple, tuple, Layout] | None = None  # sizes and versions, mask, positions and boundaries
    _looked_at: int = 0  # outputs of padded batches
    _draws: Draws = field(init=False)  # the backbone

    # ---- around the model ----------------------------------------------------------------------------------------

    def attach(self, model: PreTrainedModel, backbone: PreTrainedModel) -> None:
        """Replace the forward of model and backbone. Do so before a pipeline does: its stages each call both."""
        self._draws = Draws(backbone)
        names = list(inspect.signature(backbone.forward).parameters)
        hook = functools.partial(self._make_router_logits_whole, names)
        backbone.register_forward_hook(hook, with_kwargs=True)
        backbone.forward = self._run_around(backbone, self._run_backbone)
        for module in backbone.children():
            if "pooler" in type(module).__name__.lower():
                module.register_forward_pre_hook(self._make_whole_for_pooler)
        if backbone is not model:
            model.forward = self._run_around(model, self._model)
            if self.own_loss:
                model.loss_function = functools.partial(self._compute_loss, model.loss_function)
                names = list(inspect.signature(model.forward).parameters)
                hook = functools.partial(self._make_logits_whole, names)
                model.register_forward_hook(hook, with_kwargs=True)

    def _run_around(self, module: PreTrainedModel, call: Callable[..., object]) -> Callable[..., object]:
        forward, names = module.forward, list(inspect.signature(module.forward).parameters)

        @functools.wraps(forward)
        def cut(*args: object, **kwargs: object) -> object:
            return call(module, forward, names, bind_arguments_of(names, args, kwargs, module))

        return cut

    def _model(self, module: PreTrainedModel, forward: Callable, names: list[str], batch: Batch) -> ModelOutput:
        self._refuse_cache_in_training(batch)
        former = self._parts, self._batch
        self._parts, self._batch = self._loss_is_own(module, batch), batch
        try:
            return forward(**batch)
        finally:
            self._parts, self._batch = former

    def _loss_is_own(self, model: PreTrainedModel, batch: Batch) -> bool:
        labels = batch.get("labels") is not None or batch.get("shift_labels") is not None
        keep = batch.get("logits_to_keep")
        all_logits = keep is None or (isinstance(keep, int) and keep == 0)
        asked = batch.get("output_hidden_states")
        hidden = getattr(model.config, "output_hidden_states", False) if asked is None else asked
        return self.own_loss and labels and all_logits and not hidden

    def _compute_loss(
        self,
        loss: Callable[..., torch.Tensor],
        logits: torch.Tensor,
        labels: torch.Tensor | None,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: torch.Tensor | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Compute the model's own loss over this rank's tokens, and sum it over the ranks."""
        if not self._parts:
            return loss(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs)
        targets = compute_targets_of(labels, shift_labels, ignore_index)
        own = take(targets, self._find_layout(self._batch), self.group.rank(), ignore_index).contiguous()
        items = count_items(targets, num_items_in_batch, ignore_index)
        part = loss(logits, None, vocab_size, items, ignore_index, own, **kwargs)
        return sum_over_ranks(part, self.group)

    def _make_logits_whole(
        self, names: list[str], model: PreTrainedModel, args: tuple, kwargs: Batch, output: ModelOutput
    ) -> None:
        """Let logits be joined when they are read. A hook that must run after FSDP2's, which reads all outputs."""
        batch = bind_arguments_of(names, args, kwargs, model)
        if isinstance(output, dict) and dict.get(output, "logits") is not None and self._loss_is_own(model, batch):
            layout = self._find_layout(batch)
            whole_when_read(output, "logits", lambda logits: self._join_and_look(logits, layout))

    # ---- around the backbone -------------------------------------------------------------------------------------

    def _run_backbone(self, module: PreTrainedModel, forward: Callable, names: list[str], batch: Batch) -> ModelOutput:
        if not self._batch:  # the script's own call
            self._refuse_cache_in_training(batch)
        asked = batch.get("output_attentions")
        if getattr(module.config, "output_attentions", False) if asked is None else asked:
            raise ValueError("hf_parallel: output_attentions=True needs whole matrices of scores; cp_size=1 works")
        if self._is_generation(batch):
            return forward(**batch)
        mask = batch.get("attention_mask")
        if isinstance(mask, dict) or (torch.is_tensor(mask) and mask.dim() > 2):
            raise ValueError(
                "hf_parallel: an attention_mask of queries by keys cannot be cut along the sequence; a mask of tokens "
                "[rows, length], or cp_size=1, works"
            )
        layout = self._find_layout(batch)
        for layer in module.modules():  # checkpointed ones keep the output of their attention
            settings = find_checkpoint_settings(layer) if getattr(layer, "gradient_checkpointing", False) else None
            # A checkpoint of the script's own, or a reentrant one, runs attention again.
            if settings is not None and not settings.get("use_reentrant") and "context_fn" not in settings:
                function = vars(layer)["_gradient_checkpointing_func"]
                keeping = functools.partial(function, context_fn=make_checkpoint_contexts)
                vars(layer)["_gradient_checkpointing_func"] = keeping
        former, current.cut = current.cut, Cut(layout, self._choose_way(layout.rows)[1])
        held = hold_tokens(
            (len(layout.rows), layout.length), functools.partial(take, layout=layout, rank=self.group.rank())
        )
        # The cut stands for every mask: transformers need not wait for the device to look for packs.
        asked = use_known_mask(KnownMask(layout.length, None, packs=False))
        try:
            with held, asked, _draw_own_random_numbers(self._draws, self.group):
                output = forward(**self._cut(batch, layout, names))
        finally:
            current.cut = former
        return output if self._parts else self._join_outputs(output, layout)

    def _refuse_cache_in_training(self, batch: Batch) -> None:
        """Refuse a cache that a loss would go through: a cut call leaves none, and one with a cache is not cut."""
        asked = [name for name in (*CACHES, "use_cache") if batch.get(name) not in (None, False)]
        if asked and torch.is_grad_enabled():
            raise NotImplementedError(
                f"hf_parallel: cp_size={self.group.size()} with {asked[0]}: a key/value cache cannot be cut along the "
                "sequence where gradients are computed; use_cache=False, or cp_size=1, works"
            )

    def _is_generation(self, batch: Batch) -> bool:
        asked = bool(batch.get("use_cache")) and not torch.is_grad_enabled()
        return self.caches and (asked or has_cache(batch))

    def _find_layout(self, batch: Batch) -> Layout:
        """Return which rank holds which tokens of this batch. The layout of the latest batch is kept."""
        tokens = get_tokens_of(batch)
        mask, positions, boundaries = (batch.get(key) for key in ("attention_mask", "position_ids", "cu_seq_lens_q"))
        given = (mask, positions, boundaries)
        # Tensors of inference mode have no version, so a change of them cannot be seen.
        known = not any(tensor is not None and tensor.is_inference() for tensor in given)
        versions = [tensor._version if known and tensor is not None else None for tensor in given]
        key = tokens.shape[:2], versions
        if self._last is not None and known:
            former_key, former_given, layout = self._last
            if former_key == key and all(a is b for a, b in zip(former_given, given, strict=True)):
                return layout
        rows = packs.find((tokens.shape[0], tokens.shape[1]), mask, positions, boundaries)
        if mask is None and any(len(row.lengths) > 1 for row in rows) and not self.packed():
            rows = packs.make_unpacked_rows(tokens.shape[0], tokens.shape[1])
        layout = Layout(rows, self._choose_way(rows)[0], self.local_length(tokens.shape[1]))
        self._last = key, given, layout
        return layout

    def _choose_way(self, rows: list[packs.Row]) -> tuple[Shape, Exchanged]:
        """Choose how the ranks share these rows. All cp ranks choose alike, because they see whole rows."""
        return self.ways[self.choice.of(sum(sum(row.lengths) for row in rows), packs.compute_mean_length(rows))]

    def _cut(self, batch: Batch, layout: Layout, names: list[str]) -> Batch:
        rank, whole = self.group.rank(), (len(layout.rows), layout.length)
        own = {key: value for key, value in batch.items() if key not in _BOUNDARIES}
        for key, value in own.items():
            if torch.is_tensor(value) and value.dim() >= 2 and value.shape[:2] == whole:
                trains = value.requires_grad
                own[key] = take_part(value, layout, self.group) if trains else take(value, layout, rank)
        if "position_ids" in names:
            positions = batch.get("position_ids")
            if positions is None:
                positions = torch.arange(layout.length, device=get_tokens_of(batch).device)
            sets = [positions] if positions.dim() <= 2 else positions  # several where rotations have sections
            taken = [take(one.expand(whole), layout, rank) for one in sets]
            own["position_ids"] = taken[0] if positions.dim() <= 2 else torch.stack(taken)
        if "attention_mask" in own:
            own["attention_mask"] = None
        if "use_cache" in names:
            own["use_cache"] = False
        return own

    def _join_outputs(self, output: ModelOutput, layout: Layout) -> ModelOutput:
        """Make the backbone's outputs per token whole."""

        def whole(value: object) -> object:
            if isinstance(value, tuple):
                return tuple(whole(item) for item in value)
            if torch.is_tensor(value) and value.dim() == 3 and value.shape[1] == layout.local:
                return self._join_and_look(value, layout)
            return value

        if isinstance(output, tuple):
            return whole(output)
        for key, value in list(output.items()):
            output[key] = whole(value)
        return output

    def _join_and_look(self, outputs: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Join hidden states or logits, of which a loss may not read those at padding."""
        joined = join(outputs, layout, self.group)
        if joined.requires_grad and self._looked_at < _LOOKED_AT and layout.padding is not None:
            self._looked_at += 1
            joined.register_hook(functools.partial(self._refuse_gradient_at, layout.padding.to(joined.device)))
        return joined

    def _refuse_gradient_at(self, padding: torch.Tensor, gradient: torch.Tensor) -> None:
        """Refuse a loss that reads outputs at padding, where attention over the ranks computes none.

        What multiplies a gradient that is not finite by a mask makes NaN of it, so such gradients tell nothing.
        """
        largest = torch.linalg.vector_norm(gradient, float("inf"), dim=-1)  # without a copy of the size of logits
        read = largest[padding].nan_to_num(0, 0, 0).count_nonzero()
        if read:
            raise ValueError(
                f"hf_parallel: cp_size={self.group.size()}: the loss reads outputs of {int(read)} tokens that "
                "attention_mask hides, where cp computes none; a loss that leaves them out, or cp_size=1, works"
            )

    def _make_router_logits_whole(
        self, names: list[str], module: nn.Module, args: tuple, kwargs: Batch, output: ModelOutput
    ) -> None:
        """Make router logits [rows * length, experts] whole, because what balances experts is no sum over tokens.

        A hook of the backbone, after that of tp, whose ranks have parts of a cp rank's tokens.
        """
        logits, batch = getattr(output, "router_logits", None), bind_arguments_of(names, args, kwargs, module)
        if logits and not self._is_generation(batch):
            layout = self._find_layout(batch)
            shape = len(layout.rows), layout.local
            if not all(torch.is_tensor(t) and t.dim() == 2 and len(t) == math.prod(shape) for t in logits):
                raise ValueError(
                    f"hf_parallel: router logits of {type(module).__name__} are not a row for each token, and cannot "
                    "be put together along the sequence; output_router_logits=False, or cp_size=1, works"
                )
            whole = (self.whole_tokens(layer.unflatten(0, shape), batch).flatten(0, 1) for layer in logits)
            output["router_logits"] = tuple(layer.clone() for layer in whole)  # FSDP2 warns of outputs that are views

    def whole_tokens(self, tensor: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Join [rows, own tokens, …] to [rows, tokens, …] on all ranks, which must then compute the same with it."""
        return join(tensor, self._find_layout(batch), self.group)

    def _make_whole_for_pooler(self, module: nn.Module, args: tuple) -> tuple | None:
        cut = current.cut
        return None if cut is None else (self._join_and_look(args[0], cut.layout), *args[1:])


@contextlib.contextmanager
def _draw_own_random_numbers(draws: Draws, group: dist.ProcessGroup) -> Iterator[None]:
    """Draw from a seed of this rank's own inside the `with`: cp ranks share a random state, but not their tokens."""
    if not draws:
        yield
        return
    device = next(draws.module.parameters()).device
    random: Any = torch if device.type == "cpu" else torch.get_device_module(device)
    seed = int(torch.randint(2**31, (1,)))
    state = random.get_rng_state()
    random.manual_seed(seed + group.rank())
    try:
        yield
    finally:
        random.set_rng_state(state)

"""The rows of a batch, and how those that are repeated to fill a ragged last batch are left out.

A batch holds its examples in one of four ways:

    plain     one row per example
    blocks    k rows per example, all the first ones, then all the second ones: TRL's chosen and rejected
    turns     k rows per example, those of an example behind one another: chosen, rejected, chosen, rejected, …
    joined    all examples behind one another in a single row: batches without padding; JOINED says whose a token is
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeAlias, TypeGuard, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.utils import ModelOutput

from hf_parallel.ranks.nested_batches import BETWEEN, is_path

#: What a collator gives: tensors by name, and what a script puts beside them.
Batch: TypeAlias = MutableMapping[str, Any]
Value = TypeVar("Value")
#: How the keys of pictures, films and sounds begin.
MEDIA = ("pixel_", "image_", "video_", "input_features")
#: Key of a tensor [1, tokens] with the number of each token's example; taken out before a model sees the batch.
JOINED = "hf_parallel_example_of_token"
#: Key of labels [1, tokens] that Trainer counts in the place of `labels`; taken out when they are counted.
LABELS_COUNTED = "hf_parallel_labels_counted"
#: Key of the padded length of each token's example [1, tokens]; taken out before a model sees the batch.
PADDED_LENGTHS = "hf_parallel_padded_lengths"
#: Key of the reason why a batch cannot be trained on; `refused_batches.py` lets all data ranks stop for it.
REFUSED = "hf_parallel_refused"


def count_examples(batch: Batch, blocks: int = 1) -> int | None:
    """Count the examples of the batch; None if that is not known."""
    if not isinstance(batch, dict) and not hasattr(batch, "items"):
        return None
    if JOINED in batch:
        return int(batch[JOINED].max()) + 1
    sizes = [value.shape[0] for value in batch.values() if torch.is_tensor(value) and value.ndim > 0]
    if len(set(sizes)) > 1 and any(map(is_path, batch)):  # the batches in it are of unlike sizes
        return None
    return sizes[0] // blocks if sizes else None


def tell_rows_apart(batch: Batch, full: int) -> Batch:
    """Return a single row that stands for up to `full` examples, with JOINED where the batch says where they begin."""
    tokens = batch.get("input_ids") if hasattr(batch, "get") else None
    if full == 1 or not torch.is_tensor(tokens) or tokens.ndim != 2 or len(tokens) != 1 or JOINED in batch:
        return batch
    # Which tokens of the row begin an example?
    ends, positions, numbers = (batch.get(key) for key in ("cu_seq_lens_q", "position_ids", "seq_idx"))
    if torch.is_tensor(ends):
        starts = ends.new_zeros(1, tokens.shape[1], dtype=torch.bool)
        starts[0, ends[:-1].long()] = True
        return {**batch, JOINED: starts.cumsum(1) - starts[:, :1].long()}
    if torch.is_tensor(positions) and positions.ndim == 2:
        changes = positions.diff() != 1
    elif torch.is_tensor(numbers):
        changes = numbers.diff() != 0
    else:
        return batch
    starts = torch.cat([torch.ones_like(changes[:, :1]), changes], 1)
    return {**batch, JOINED: starts.cumsum(1) - starts[:, :1].long()}


def are_in_turns(collate: Callable, example: object, each: int) -> bool | None:
    """Return whether a collator puts the rows of an example behind one another; None if this example does not tell.

    It collates the example alone and twice: [chosen, rejected] becomes [chosen, rejected, chosen, rejected] or
    [chosen, chosen, rejected, rejected]. Numbers that it draws may differ, so the majority of entries decides.

    Args:
        each: rows per example.
    """
    alone, twice = (collate([copy.deepcopy(example) for _ in range(count)]) for count in (1, 2))
    lead = 0
    for key, value in alone.items():
        both = twice[key]
        if not torch.is_tensor(value) or value.ndim == 0 or len(value) != each or both.shape[1:] != value.shape[1:]:
            continue
        turns, blocks = torch.cat([value, value]), value.repeat_interleave(2, dim=0)
        lead += int((both == turns).sum()) - int((both == blocks).sum())
    return lead > 0 if lead else None


def trim(batch: Batch, real: int, rows: int, blocks: int = 1, in_turns: bool = False) -> dict:
    """Return only the real examples; one without a target where there are none, so that the rank still takes part.

    Args:
        rows: number of examples.
        blocks: rows per example.
        in_turns: are the rows of an example behind one another?
    """
    kept = max(1, real)
    if JOINED in batch:
        tokens, trimmed = int((batch[JOINED] < kept).sum()), dict(batch)
        for key, value in batch.items():
            trimmed[key] = value[:, :tokens] if torch.is_tensor(value) and value.ndim > 1 else value
        for key in ("cu_seq_lens_q", "cu_seq_lens_k"):  # they tell attention kernels where sequences begin
            if key in trimmed:
                trimmed[key] = trimmed[key][trimmed[key] <= tokens]
                trimmed["max_length_" + key[-1]] = int(trimmed[key].diff().max())
    else:
        trimmed = {**batch}
        for key, value in batch.items():
            is_list = isinstance(value, list)  # one thing per example, such as the boxes of an image
            if not is_list and (not torch.is_tensor(value) or not value.ndim):
                continue
            if len(value) == rows or in_turns and len(value) == rows * blocks:
                trimmed[key] = value[: kept * len(value) // rows]
            elif len(value) == rows * blocks:
                places = [block * rows + example for block in range(blocks) for example in range(kept)]
                trimmed[key] = [value[place] for place in places] if is_list else value[places]
    return trimmed if real else without_targets(trimmed, 0, kept)


def open_batch(batch: Batch) -> Batch:
    """Return the batch as a model takes it."""
    return {key: value for key, value in batch.items() if key != JOINED} if JOINED in batch else batch


def without_targets(batch: Batch, real: int, rows: int, in_turns: bool = False) -> dict:
    """Leave targets only in the first `real` examples: the others add nothing to a loss per token.

    Where there is no real row, one label per row stays. Nothing of an absent rank counts, and a head for classes may
    not know -100, or would leave out its loss and the collectives in it.

    Args:
        rows: number of examples.
        in_turns: are the rows of an example behind one another?
    """
    kept = dict(batch)
    for key, labels in batch.items():
        if str(key).rpartition(BETWEEN)[2] not in ("labels", "shift_labels", LABELS_COUNTED):
            continue
        if key == "labels" and real == 0 and torch.is_tensor(labels) and labels.ndim == 1:
            kept[LABELS_COUNTED] = torch.full_like(labels, -100)
            continue
        if torch.is_tensor(labels) and labels.ndim < 3 and not labels.is_floating_point():  # pixels ignore others
            places = torch.arange(len(labels))
            kept[key] = labels.clone()
            kept[key][(places // (len(labels) // rows) if in_turns else places % rows) >= real] = -100
    return kept


def with_tokens_for_decoder(batch: dict, model: nn.Module) -> dict:
    """Give a decoder tokens where no label is left that it could shift, as on a rank without a real row.

    MBart looks for the last label of each row. PEFT's prompts of several tasks shift labels themselves.
    """
    labels, decodes = batch.get("labels"), getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    prompts = getattr(getattr(model, "active_peft_config", None), "peft_type", None)
    if not decodes or not torch.is_tensor(labels) or labels.ndim != 2 or "decoder_input_ids" in batch:
        return batch
    if prompts == "MULTITASK_PROMPT_TUNING":
        return batch
    return batch if bool((labels != -100).any()) else {**batch, "decoder_input_ids": torch.zeros_like(labels)}


class OfBatch(TorchFunctionMode):
    """Follows, inside its `with`, the tensors that a script computes from those of a batch."""

    def __init__(self, batch: list[torch.Tensor]) -> None:
        super().__init__()
        self.batch, self._made = batch, WeakTensorKeyDictionary(dict.fromkeys(batch, True))

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if any(torch.is_tensor(value) and value in self._made for value in tree_leaves((args, kwargs))):
            changed = args[0] if func is torch.Tensor.__setitem__ else made
            self._made.update({value: True for value in tree_leaves(changed) if torch.is_tensor(value)})
        return made

    def made_any_of(self, tensors: list[torch.Tensor]) -> bool:
        """Return whether one of these is of the batch, or comes from it and has as many rows."""
        sizes = {len(value) for value in self.batch if value.ndim}
        return any(value.ndim and len(value) in sizes and value in self._made for value in tensors)


class PerExample(list):
    """A list of one thing per example, such as the boxes of each image. Their tensors have unlike sizes."""


def mark_per_example(value: Value, rows: int) -> Value:
    """Return a batch's outputs with lists of one mapping per row as `PerExample`."""

    def is_one_per_row(item: object) -> bool:
        return isinstance(item, list) and len(item) == rows and all(isinstance(each, Mapping) for each in item)

    return tree_map(lambda item: PerExample(item) if is_one_per_row(item) else item, value, is_leaf=is_one_per_row)


def find_lists_per_example(batch: object) -> dict[str, PerExample]:
    """Return a loop's lists of one tensor per example, such as the masks of each image, by their key in its batch."""
    if not isinstance(batch, MutableMapping) or isinstance(batch, ModelOutput):
        return {}
    rows = count_examples(batch)
    lists = {key: value for key, value in batch.items() if isinstance(value, list) and value and len(value) == rows}
    return {key: PerExample(value) for key, value in lists.items() if all(map(torch.is_tensor, value))}


def has_encoder_outputs(predictions: object) -> TypeGuard[tuple]:
    """Return whether predictions are logits beside outputs of an encoder, such as features of images.

    transformers 5.24 and later return them as `image_outputs`, `video_outputs` and `audio_outputs`.
    """
    return isinstance(predictions, tuple) and any(isinstance(part, ModelOutput) for part in predictions)


def fill_rows(value: Value, real: int, rows: int) -> Value:
    """Repeat the last row of each tensor, and the last of a list's examples, for those that `trim` took away."""

    def fill_one(item: Any) -> Any:
        if isinstance(item, ModelOutput):
            return without_stand_in(item, real)
        if isinstance(item, PerExample):
            return PerExample(item + item[-1:] * (rows - len(item)))
        if not torch.is_tensor(item) or item.ndim == 0:
            return item
        return torch.cat([item, item[-1:].expand(max(0, rows - item.shape[0]), *item.shape[1:])])

    return tree_map(fill_one, value, is_leaf=lambda item: isinstance(item, ModelOutput))


def without_stand_in(value: Value, real: int) -> Value:
    """Remove the one row with which a rank without rows takes part."""
    if real:
        return value

    def emptied(item: Any) -> Any:
        if isinstance(item, PerExample):
            return PerExample()
        if isinstance(item, ModelOutput):
            return type(item)()
        return item[:0] if torch.is_tensor(item) and item.ndim else item

    return tree_map(emptied, value, is_leaf=lambda item: isinstance(item, ModelOutput))

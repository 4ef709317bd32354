"""Before batches are joined: does joining change what the model or the script's loss makes of examples?

Both are tried on a small copy of the model (`model/shrink.py`), on every rank alike, so that no weights are gathered
and the real model, its random numbers and the trainer's counters stay as they are.

    model            outputs of three documents apart = joined (`model/joined.py`)
    script's loss    loss of two of the script's examples, padded = joined
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch.nn.utils.rnn import pad_sequence

from hf_parallel.collectives import objects
from hf_parallel.hooks import runtime
from hf_parallel.hooks.accelerate.data import replacing
from hf_parallel.hooks.trainer import losses
from hf_parallel.hooks.trainer.joining import asked, joined, refuse_joining, rows_and_collator, why_not_joined
from hf_parallel.hooks.trainer.metrics import remembered
from hf_parallel.hooks.trl import trainers as trl
from hf_parallel.model.joined import why_not_told_apart
from hf_parallel.model.shrink import small_copy
from hf_parallel.spec import SpecError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel, Trainer

#: Tokens of the two examples that a script's loss is tried on: as unlike as means of means need to show.
_LENGTHS = (31, 11)
_SAMPLE = 32  # examples among which two of such lengths are looked for
_TOLERANCE = 1e-4  # of the loss, in fp32: sums in another order are off by 1e-6
_TOLERANCE_16_BITS = 2e-2
_PADDING = {"labels": -100, "shift_labels": -100}


def refuse_other_numbers(trainer: Trainer) -> None:
    """Refuse batches that would train on other numbers when they are joined. Collective.

    Raises:
        SpecError: the model or the script's loss would.
    """
    why = why_other_numbers(trainer)
    if why is not None:
        refuse_joining(why)


def why_other_numbers(trainer: Trainer) -> str | None:
    """Why joined examples would give other numbers than examples in rows; the same words on all ranks. Collective."""
    with random_numbers_kept(), replacing(trainer, log=lambda *args, **kwargs: None):
        restore = remembered(trainer)
        try:
            why = _why_other_numbers(trainer)
        finally:
            restore()
    reasons = [why] if runtime.current() is None else objects.gather(why)
    return next((reason for reason in reasons if reason is not None), None)


def _why_other_numbers(trainer: Trainer) -> str | None:
    model = getattr(trainer.model, "_orig_mod", trainer.model)
    adapter: Any = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        return f"{adapter.peft_type} puts tokens of its own before each row"
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    try:
        copy = small_copy(model, keep=("vocab_size",)).to(trainer.args.device)
        if str(copy.config._attn_implementation).startswith(("flash", "kernels")):
            copy = copy.to(torch.bfloat16)  # the kernels know no fp32
    except SpecError as error:
        return str(error)
    why = why_not_told_apart(copy)
    if why is not None or trainer.train_dataset is None:
        return why
    try:
        examples, together = _examples(trainer)
        why = next(filter(None, map(why_not_joined, examples)), None)
        if why is None and asked()[0] == "padding_free":
            why = _why_padding_counts(together)
        if why is None and losses.is_own(trainer) and not trl.is_sft(trainer):
            why = _why_loss_differs(trainer, copy, examples)
    except Exception as error:
        return f"two examples cannot be tried ({type(error).__name__}: {first_line(error)})"
    return why


def _examples(trainer: Trainer) -> tuple[list[Mapping[str, torch.Tensor]], Mapping[str, object]]:
    """Two of the first examples as the collator makes them, the longest and the shortest; and both in a batch."""
    rows, collate = rows_and_collator(trainer)
    found = [(rows[index], index) for index in range(min(_SAMPLE, len(rows)))]
    made = [(dict(collate([row])), index) for row, index in found]
    known = [one for one in made if torch.is_tensor(one[0].get("input_ids"))] or made
    ordered = sorted(known, key=lambda one: one[0]["input_ids"].shape[-1])
    (longest, first), (shortest, second) = ordered[-1], ordered[0]
    return [longest, shortest], dict(collate([found[first][0], found[second][0]]))


def _why_padding_counts(together: Mapping[str, object]) -> str | None:
    """Rows padded on the left have one more target, and later positions: joined ones do not."""
    mask = together.get("attention_mask")
    if not torch.is_tensor(mask) or mask.ndim != 2 or bool(mask[:, 0].all()):
        return None
    return "rows are padded on the left, where padding predicts the first token of each and moves its positions"


def _why_loss_differs(trainer: Trainer, copy: PreTrainedModel, examples: list) -> str | None:
    """Call the script's loss on two examples in two rows, and joined to one."""
    copy = copy.train()  # a script may ask; nothing in it drops anything
    parts = [_cut(row, length) for row, length in zip(examples, _lengths(examples), strict=True)]
    parts = [{key: value.to(trainer.args.device) for key, value in part.items()} for part in parts]
    _set_unlike_labels(copy, parts)
    padded = {key: _padded(parts, key) for key in parts[0]}
    together = joined([{key: value.cpu() for key, value in part.items()} for part in parts])
    together = {key: value.to(trainer.args.device) for key, value in together.items()}
    items = trainer._get_num_items_in_batch([padded], trainer.args.device)
    apart, one_row = (_loss_of(trainer, copy, batch, items) for batch in (padded, together))
    tolerance = _TOLERANCE if copy.dtype == torch.float32 else _TOLERANCE_16_BITS
    if abs(apart - one_row) <= tolerance * abs(apart):
        return None
    return (
        f"the script's own loss looks at examples: it is {apart:.6g} for two of them in rows, and {one_row:.6g} for "
        "the same two joined"
    )


def _loss_of(trainer: Trainer, copy: PreTrainedModel, batch: dict, items: object) -> float:
    with torch.no_grad():
        found = type(trainer).compute_loss(trainer, copy, dict(batch), num_items_in_batch=items)
    return float(found[0] if isinstance(found, tuple) else found)


def _lengths(examples: list) -> list[int]:
    held = [row["input_ids"].shape[1] for row in examples]
    longest = min(held[0], _LENGTHS[0])
    return [longest, min(held[1], _LENGTHS[1], max(2, longest // 2))]


def _cut(row: Mapping[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    """The first tokens of an example that are no padding."""
    mask = row.get("attention_mask", torch.ones_like(row["input_ids"]))[0].bool()
    return {key: value[:, mask][:, :length].clone() for key, value in row.items()}


def _set_unlike_labels(copy: PreTrainedModel, parts: list[dict[str, torch.Tensor]]) -> None:
    """Targets that the copy predicts in the first example and not in the second: their means are then far apart."""
    for part, likely in zip(parts, (True, False), strict=True):
        with torch.no_grad():
            logits = copy(input_ids=part["input_ids"]).logits[:, :-1]
        part["labels"][:, 1:] = logits.argmax(-1) if likely else logits.argmin(-1)
        if part["labels"].shape[1] > 3:
            part["labels"][:, 1] = -100
        if "shift_labels" in part:
            part["shift_labels"][:, :-1] = part["labels"][:, 1:]
            part["shift_labels"][:, -1:] = -100


def _padded(parts: list[dict[str, torch.Tensor]], key: str) -> torch.Tensor:
    return pad_sequence([part[key][0] for part in parts], True, _PADDING.get(key, 0))


@contextlib.contextmanager
def random_numbers_kept() -> Iterator[None]:
    """What is drawn in here is as if it had not been."""
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)

"""Examples joined to one row: what a collator makes of each alone, less padding, with positions that begin anew."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import numpy
import torch
from torch.nn.utils.rnn import pad_sequence

from hf_parallel.ask.session import of_session
from hf_parallel.ask.spec import SpecError, get_first_line, refuse
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.patching import replacing
from hf_parallel.hooks.trainer import losses
from hf_parallel.hooks.trainer.bad_numbers import remember_counts
from hf_parallel.hooks.trainer.rows import LABELS_COUNTED, PADDED_LENGTHS, REFUSED
from hf_parallel.hooks.trl import trainers as trl
from hf_parallel.model.calls import get_held_tokens
from hf_parallel.model.shrink import find_reason_not_told_apart, make_small_copy
from hf_parallel.ranks import messages

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, Trainer, TrainingArguments

    from hf_parallel.ask.config import ParallelConfig
    from hf_parallel.planner.candidates import Goal


#: Examples in, a batch out.
Collate: TypeAlias = Callable[[list], Mapping]


@dataclass
class Asked:
    """The config of one process, which has no layout to ask, and what `--parallel auto` has planned on rank 0.

    Attributes:
        planned: a goal for each kind of GPU, and the layout: the choice is made once there are rows.
    """

    alone: ParallelConfig | None = None
    planned: tuple[list[Goal], ParallelConfig] | None = None


def read_asked_key(config: ParallelConfig | None = None) -> tuple[str, int | bool]:
    """Return the key that asks for joined batches, and its value, which is empty if no key does.

    Args:
        config: where it may be asked for; default: the layout in force, or what one process is given.
    """
    if config is None:
        current = runtime.current()
        config = of_session(Asked).alone if current is None else current.config
    if config is None:
        return "pack_tokens", 0
    return ("padding_free", True) if config.padding_free else ("pack_tokens", config.pack_tokens)


def refuse_joining(
    why: str, works: str | None = None, config: ParallelConfig | None = None, alone: bool = False
) -> NoReturn:
    """Refuse what cannot be joined.

    Args:
        config: who asks for it, if not the layout in force.
        alone: is it a batch of this rank's own?
    """
    key, value = read_asked_key(config)
    off = "false" if key == "padding_free" else "0"
    refuse(f"{key}={str(value).lower()}", why, works or f"{key}={off}", alone=alone)


@dataclass(frozen=True)
class Beside:
    """The entries that a joined batch brings along for Trainer; no model sees them.

    Attributes:
        labels: those in which the first of each example still counts, as Trainer counts it where it does not know that
            a model's loss shifts labels (GPT-2, BERT's decoder, …).
        lengths: of each token's example with its padding, from which the size of NEFTune's noise follows.
        of_batch: examples of one batch are padded to the longest of them.
    """

    labels: bool = False
    lengths: bool = False
    of_batch: bool = False

    @classmethod
    def wanted(cls, trainer: Trainer, of_batch: bool) -> Beside:
        """Return the entries that this trainer needs."""
        noise = getattr(trainer, "neftune_noise_alpha", None) is not None
        return cls(not getattr(trainer, "_loss_shifts_labels", True), noise, of_batch)


def join_rows(rows: Sequence[Mapping[str, object]], beside: Beside | None = None) -> dict[str, Any]:
    """Return one row of all tokens that are no padding, or a batch that says why there is none."""
    why = next(filter(None, map(find_reason_not_joined, rows)), None)
    if why is not None:
        # A joined batch without targets, in the place of one that cannot be trained on.
        tokens = torch.zeros(1, 2, dtype=torch.long)
        return {"input_ids": tokens, "labels": tokens - 100, "position_ids": torch.arange(2)[None], REFUSED: why}
    beside, parts = beside or Beside(), []
    for row in rows:
        held = {key: value for key, value in row.items() if isinstance(value, torch.Tensor)}
        mask = held.pop("attention_mask", torch.ones_like(held["input_ids"]))[0].bool()
        part = {key: value[:, mask] for key, value in held.items()}
        part.setdefault("position_ids", torch.arange(int(mask.sum()))[None])
        if beside.labels:
            part[LABELS_COUNTED] = part["labels"]
        if beside.lengths:
            part[PADDED_LENGTHS] = torch.full_like(part["labels"], len(mask))
        part["labels"] = part["labels"].clone()
        part["labels"][:, 0] = -100
        parts.append(part)
    batch = {key: torch.cat([part[key] for part in parts], 1) for key in parts[0]}
    if beside.lengths and beside.of_batch:
        batch[PADDED_LENGTHS].fill_(batch[PADDED_LENGTHS].max())
    return batch


def find_reason_not_joined(row: Mapping[str, object]) -> str | None:
    """Return why a row as the collator gives it cannot be joined to others; None if it can."""
    tokens = row.get("input_ids")
    if not torch.is_tensor(tokens) or tokens.ndim != 2 or "labels" not in row:
        return "the script's collator gives no rows of input_ids and labels"
    if len(tokens) != 1:
        return f"the script's collator gives {len(tokens)} rows for one example"
    odd = [key for key, value in row.items() if not torch.is_tensor(value) or value.shape != tokens.shape]
    if odd:
        return f"the script's collator gives {odd[0]}, which is not of one number per token"
    mask, positions = row.get("attention_mask"), row.get("position_ids")
    if torch.is_tensor(mask):
        # A token in a hole is not attended to, but has a position: joined, the hole would be gone.
        shown = mask[0].bool()
        if int((shown[1:] & ~shown[:-1]).sum()) + int(shown[:1].sum()) > 1:
            inside = ~shown & shown.cumsum(0).bool() & shown.flip(0).cumsum(0).flip(0).bool()
            return f"the attention_mask of an example has a hole at token {int(inside.nonzero()[0])}"
    if not torch.is_tensor(positions):
        return None
    # Where positions begin anew tells examples apart: those of each count up from 0. A row may hold several documents
    # if it has no mask: with one, models do not look for them.
    kept = positions[0][mask[0].bool()] if torch.is_tensor(mask) else positions[0]
    if not len(kept):
        return None
    if int(kept[0]) != 0:
        return f"position_ids of an example begin at {int(kept[0])}, not at 0"
    jumps = kept.diff() != 1
    if mask is None:
        jumps &= kept[1:] != 0
    if bool(jumps.any()):
        at = int(jumps.nonzero()[0])
        return f"position_ids of an example go from {int(kept[at])} to {int(kept[at + 1])}"
    return None


def with_counted_labels(batches: list) -> list:
    """Return the batches as Trainer counts their targets; what only the count needs is taken out of them."""
    kept = [batch.pop(LABELS_COUNTED, None) if isinstance(batch, dict) else None for batch in batches]
    return [
        batch if labels is None else {**batch, "labels": labels} for batch, labels in zip(batches, kept, strict=True)
    ]


# ---- the rows of a Trainer ------------------------------------------------------------------------------------------


def get_rows_and_collator(trainer: Trainer) -> tuple[Dataset, Collate]:
    """Return the training rows and the collator, without unused columns, as Trainer puts them together."""
    rows, collate = trainer.train_dataset, trainer.data_collator
    if hasattr(rows, "column_names"):
        return trainer._remove_unused_columns(rows, description="training"), collate
    return rows, trainer._get_collator_with_removed_columns(collate, description="training")


def find_length_column(rows: Dataset, args: TrainingArguments) -> str | None:
    """Return the column that says how long rows are, if there is one."""
    name = getattr(args, "length_column_name", "length")
    return name if name in (getattr(rows, "column_names", None) or ()) else None


def read_lengths_of(rows: Dataset, args: TrainingArguments, most: int | None = None) -> list[int] | None:
    """Return the lengths of the script's first rows, by their column or their tokens; None without any."""
    name = find_length_column(rows, args)
    if name is not None:
        return [int(length) for length in rows[name][:most]]
    first = rows[0]
    if not hasattr(first, "keys") or "input_ids" not in first:
        return None
    if hasattr(rows, "select_columns") and rows.format["type"] != "custom":  # a script's transform takes whole rows
        rows = rows.select_columns(["input_ids"])
    return [len(rows[index]["input_ids"]) for index in range(len(rows))[:most]]


# ---- Before batches are joined: does joining change what the model or the script's loss makes of examples? ----------
# Both are tried on a small copy of the model (`model/shrink.py`), on every rank alike, so that no weights are gathered
# and the real model, its random numbers and the trainer's counters stay as they are.
#
#     model            outputs of three documents apart = joined (`model/shrink.py`)
#     script's loss    loss of two of the script's examples, padded = joined


#: Tokens of the two examples on which a script's loss is tried: unlike enough to show a mean of means.
_LENGTHS = (31, 11)
_SAMPLE = 32  # examples among which two of such lengths are looked for
_TOLERANCE = 2e-5  # of the loss, in fp32: sums in another order are off by 1e-6
_TOLERANCE_16_BITS = 2e-2
_PADDING = {"labels": -100, "shift_labels": -100}
#: Tensors of a row that a model reads, or that follow from others.
_OF_MODEL = ("input_ids", "attention_mask", "position_ids", "token_type_ids", "shift_labels")


def find_reason_for_other_numbers(trainer: Trainer) -> str | None:
    """Return why joined examples would give other numbers than examples in rows; the same words on all ranks.

    Collective.
    """
    of_python, of_numpy, restore = random.getstate(), numpy.random.get_state(), remember_counts(trainer)
    try:
        with torch.random.fork_rng(), replacing(trainer, log=lambda *args, **kwargs: None):
            why = _find_own_reason_for_other_numbers(trainer)
    finally:
        restore()
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)
    reasons = [why] if runtime.current() is None else messages.gather_objects(why)
    return next((reason for reason in reasons if reason is not None), None)


def _find_own_reason_for_other_numbers(trainer: Trainer) -> str | None:
    model = getattr(trainer.model, "_orig_mod", trainer.model)
    adapter: Any = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        return f"{adapter.peft_type} puts tokens of its own before each row"
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    try:
        copy = make_small_copy(model, keep=("vocab_size",)).to(trainer.args.device)
        if str(copy.config._attn_implementation).startswith(("flash", "kernels")):
            copy = copy.to(torch.bfloat16)  # the kernels know no fp32
    except SpecError as error:
        return str(error)
    trl.add_head_to_copy(trainer, copy)
    why = find_reason_not_told_apart(copy)
    if why is not None or trainer.train_dataset is None:
        return why
    try:
        # Two of the first examples as the collator makes them, the longest and the shortest; and both in a batch.
        rows, collate = get_rows_and_collator(trainer)
        found = [(rows[index], index) for index in range(min(_SAMPLE, len(rows)))]
        made = [(dict(collate([row])), index) for row, index in found]
        known = [one for one in made if torch.is_tensor(one[0].get("input_ids"))] or made
        ordered = sorted(known, key=lambda one: one[0]["input_ids"].shape[-1])
        (longest, first), (shortest, second) = ordered[-1], ordered[0]
        examples, together = [longest, shortest], dict(collate([found[first][0], found[second][0]]))
        why = next(filter(None, map(find_reason_not_joined, examples)), None)
        mask = together.get("attention_mask")
        if why is None and is_joining_wanted() and torch.is_tensor(mask) and mask.ndim == 2:
            left = (
                "rows are padded on the left, where padding predicts the first token of each and moves its positions"
            )
            why = None if bool(mask[:, 0].all()) else left
        if why is None and losses.is_own(trainer) and not trl.is_loss_of_sft(trainer):
            why = _find_reason_of_loss(trainer, copy, examples, _list_first_targets([one for one, _ in made]))
    except Exception as error:
        return f"two examples cannot be tried ({type(error).__name__}: {get_first_line(error)})"
    return why


def _list_first_targets(examples: list[dict]) -> dict[str, torch.Tensor]:
    """List the values at the first token of some examples: a loss may read them, and a joined row may lack them."""
    found = {}
    for example in examples:
        for key, value in example.items():
            if key not in _OF_MODEL and torch.is_tensor(value) and value.shape == example["input_ids"].shape:
                first = value[0, 0]
                if first != _PADDING.get(key, 0):
                    found[key] = first
    return found


def _find_reason_of_loss(
    trainer: Trainer, copy: PreTrainedModel, examples: list, firsts: dict[str, torch.Tensor]
) -> str | None:
    """Call the script's loss on two examples in two rows, and joined to one.

    Args:
        firsts: values that stand at the first token of some examples, by their keys.
    """
    copy = copy.train()  # a script may ask; nothing in it drops anything
    held, device = [row["input_ids"].shape[1] for row in examples], trainer.args.device
    longest = min(held[0], _LENGTHS[0])
    lengths, parts = (longest, min(held[1], _LENGTHS[1], max(2, longest // 2))), []
    for row, length, likely in zip(examples, lengths, (True, False), strict=True):
        mask = row.get("attention_mask", torch.ones_like(row["input_ids"]))[0].bool()
        part = {key: value[:, mask][:, :length].clone().to(device) for key, value in row.items()}
        # Targets that the copy predicts in the first example and not in the second: their means are then far apart.
        with torch.no_grad():
            logits = copy(input_ids=part["input_ids"]).logits[:, :-1]
        part["labels"][:, 1:] = logits.argmax(-1) if likely else logits.argmin(-1)
        if part["labels"].shape[1] > 3:
            part["labels"][:, 1] = -100
        for key, first in firsts.items():
            part[key][:, 0] = part["input_ids"][:, 0] if key == "labels" else first
        if "shift_labels" in part:
            part["shift_labels"][:, :-1] = part["labels"][:, 1:]
            part["shift_labels"][:, -1:] = -100
        parts.append(part)
    padded = {key: pad_sequence([part[key][0] for part in parts], True, _PADDING.get(key, 0)) for key in parts[0]}
    together = join_rows([{key: value.cpu() for key, value in part.items()} for part in parts])
    together = {key: value.to(device) for key, value in together.items()}
    items, losses_of_two = trainer._get_num_items_in_batch([padded], device), []
    for batch in (padded, together):
        with torch.no_grad():
            found = type(trainer).compute_loss(trainer, copy, dict(batch), num_items_in_batch=items)
        losses_of_two.append(float(found[0] if isinstance(found, tuple) else found))
    apart, one_row = losses_of_two
    tolerance = _TOLERANCE if copy.dtype == torch.float32 else _TOLERANCE_16_BITS
    if abs(apart - one_row) <= tolerance * abs(apart):
        return None
    return (
        f"the script's own loss looks at examples: it is {apart:.6g} for two of them in rows, and {one_row:.6g} for "
        "the same two joined"
    )


# ---- `padding_free=true`: a Trainer's training batches, row by row those of the script, joined to one without
# padding
# Which rows make up a batch stays as it is, and so do all sums over targets: losses and weights are those of the
# padded batch, but for the order in which numbers are added. Under `--parallel auto` it is chosen for batches of
# which a tenth is padding, where the planner says that it pays and nothing below says that the numbers would change.


_MUCH = 0.1  # of the tokens: so much padding is worth a line
_GAIN = 0.95  # of the step time: less is below what the planner can tell
_PADDING_SAMPLE = 256  # rows whose lengths are looked at for it


def is_joining_wanted() -> bool:
    """Return whether training batches are joined."""
    return read_asked_key()[0] == "padding_free"


@dataclass(eq=False)
class Joined:
    """The script's collator, called with each row alone; its rows are joined."""

    collate: Collate
    beside: Beside | None = None

    def __call__(self, rows: list) -> dict[str, Any]:
        return join_rows([dict(self.collate([row])) for row in rows], self.beside)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or name == "collate":  # while it is pickled for a worker process
            raise AttributeError(name)
        return getattr(self.collate, name)


# ---- under `--parallel auto` ----------------------------------------------------------------------------------------


def choose_joining(trainer: Trainer, cannot: Callable[[Trainer], str | None]) -> None:
    """Join the batches where it pays and changes nothing, if the layout was left to the planner. Collective.

    Args:
        cannot: why this Trainer's batches cannot be joined, or None.
    """
    current = runtime.current()
    if current is None or not current.source.endswith("(auto)") or trainer.train_dataset is None:
        return
    if not messages.send_from_one(lambda: _measure_padding(trainer) is not None):
        return
    why = find_reason_for_other_numbers(trainer)
    pays, line = messages.send_from_one(lambda: _decide_joining(trainer, current.config, why, cannot))
    report.say(line)
    if pays:
        # From here on the layout says it.
        current.config = dataclasses.replace(current.config, padding_free=True)
        state = runtime.find_parallel_state(trainer.model)
        if state is not None and state.plan is not None:
            state.plan = dataclasses.replace(state.plan, config=dataclasses.replace(state.config, padding_free=True))


def _measure_padding(trainer: Trainer) -> tuple[str, list[int], float] | None:
    """Return how much of batches is padding, in words, the lengths of the first rows, and their mean.

    None if that is too little to do anything about, and for rows that cannot be looked at twice.
    """
    from hf_parallel.planner.choices import share_of

    rows, size = trainer.train_dataset, trainer.args.per_device_train_batch_size
    if isinstance(rows, torch.utils.data.IterableDataset) or not hasattr(rows, "__len__") or not len(rows):
        return None
    lengths = read_lengths_of(rows, trainer.args, _PADDING_SAMPLE) or []
    if size == 1 or len(lengths) < 2 * size or getattr(trainer.data_collator, "return_position_ids", False):
        return None
    share, mean, _ = share_of(lengths, size)
    if share <= _MUCH:
        return None
    words = f"padding is {share:.0%} of the tokens of batches of {size} rows ({len(lengths)} rows looked at)"
    return words, lengths, mean


def _decide_joining(
    trainer: Trainer, config: ParallelConfig, why: str | None, cannot: Callable[[Trainer], str | None]
) -> tuple[bool, str]:
    """Return whether batches are joined, and the line that says why.

    Args:
        why: joined examples would give other numbers.
    """
    from hf_parallel.planner.choices import compare_padding_of

    known, size, measured = of_session(Asked), trainer.args.per_device_train_batch_size, _measure_padding(trainer)
    assert measured is not None
    found, lengths, mean = measured
    tokens = max(max(lengths), round(size * mean))
    packs = f"pack_tokens={tokens} leaves it out, with batches of about as many tokens in the place of as many rows"
    packs = "" if why is not None or config.pp_size > 1 else f"; {packs}: other numbers, so it is for you to ask for"
    cuts_rows = f"a pipeline (pp_size={config.pp_size}) cuts batches by rows" if config.pp_size > 1 else None
    reason = cuts_rows or cannot(trainer)
    if reason is None:
        rows, collate = get_rows_and_collator(trainer)
        reason = does_collator_differ(collate, [rows[index] for index in range(size)])
    why = reason or why
    if why is None and known.planned is not None:
        goals, layout = known.planned
        padding = compare_padding_of(goals, layout, lengths, size)
        times = f"predicted {padding.ratio:.2f} x the step time"
        if padding.fits and padding.ratio < _GAIN:
            return True, f"auto: padding_free=true: {found}; the same rows joined: {times}, the same numbers"
        why = f"{times} by attention={goals[0].attention.name}" if padding.fits else "it would not fit"
    return False, f"auto: {found}; not padding_free=true: {why}{packs}"


def does_collator_differ(collate: Collate, rows: list) -> str | None:
    """Return why the collator makes other rows of several than of each alone, padding aside; None if it does not."""
    try:
        together, alone = dict(collate(rows)), [dict(collate([row])) for row in rows]
        why = next(filter(None, map(find_reason_not_joined, alone)), None)
        apart = join_rows(alone) if why is None else {}
    except (KeyError, TypeError, ValueError) as error:
        why = " ".join(str(error).split())
    if why is not None:
        return why
    mask = together.get("attention_mask")
    if not torch.is_tensor(mask):
        return "the script's collator makes no attention_mask, which tells padding"
    mask = mask.bool()
    if mask.ndim != 2 or not bool(mask[:, 0].all()) or bool((mask[:, 1:] & ~mask[:, :-1]).any()):
        return "rows are not padded on the right, so that positions would be others"
    targets = together["labels"].clone()
    targets[:, 0] = -100
    same = torch.equal(together["input_ids"][mask], apart["input_ids"][0])
    same = same and torch.equal(targets[mask], apart["labels"][0]) and bool((targets[~mask] == -100).all())
    return None if same else "the script's collator makes other rows of several than of each alone"


# ---- NEFTune in joined batches: the size of its noise follows from the length of an example with its padding
# The hook of Transformers takes the joined row for one example: n examples of a length L get 1 / sqrt(n) of the noise
# alpha / sqrt(L * width) that they have in n rows.


def draw_noise_of_examples(trainer: Trainer, inputs: dict) -> contextlib.AbstractContextManager:
    """Give each token of a joined batch the noise of its example; the noise's length is taken out of the batch."""
    lengths = inputs.pop(PADDED_LENGTHS, None) if isinstance(inputs, dict) else None
    handle = getattr(trainer, "neftune_hook_handle", None)
    if lengths is None or handle is None:
        return contextlib.nullcontext()
    return _scale_noise(handle, (lengths.shape[1] / lengths).sqrt()[..., None])


@contextlib.contextmanager
def _scale_noise(handle: torch.utils.hooks.RemovableHandle, scale: torch.Tensor) -> Iterator[None]:
    hooks = handle.hooks_dict_ref()
    if hooks is None:  # the module is gone
        yield
        return
    hook = hooks[handle.id]
    hooks[handle.id] = functools.partial(_add_scaled, hook, scale)
    try:
        yield
    finally:
        hooks[handle.id] = hook


def _add_scaled(
    hook: Callable, scale: torch.Tensor, module: torch.nn.Module, input: tuple[torch.Tensor], output: torch.Tensor
) -> torch.Tensor:
    noise, held = hook(module, input, torch.zeros_like(output)), get_held_tokens()
    return output + noise * (scale if held is None else held.part(scale)).to(output)

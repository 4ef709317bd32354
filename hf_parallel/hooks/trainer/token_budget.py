"""`pack_tokens=N`: a Trainer's training batches by tokens, joined to one row without padding.

The script's own collator is called with each example alone, and the rows that it gives are joined: what it does to an
example is done, and what it pads is left out. position_ids begin anew with each example, and its first label, which no
token of its own predicts, is no target.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from hf_parallel.ask.session import of_session
from hf_parallel.hooks import report, runtime
from hf_parallel.hooks.accelerate.shares import follow_trainer
from hf_parallel.hooks.accelerate.token_batches import TokenBatches
from hf_parallel.hooks.patching import Patch, around, patch, replacing
from hf_parallel.hooks.trainer import deal, joining
from hf_parallel.hooks.trainer.joining import (
    Asked,
    Beside,
    Collate,
    draw_noise_of_examples,
    find_length_column,
    get_rows_and_collator,
    join_rows,
    read_asked_key,
    read_lengths_of,
    refuse_joining,
)
from hf_parallel.hooks.trainer.refused_batches import check_batch, count_targets_of_step
from hf_parallel.hooks.trl import servers

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, Trainer, TrainingArguments

    from hf_parallel.ask.config import ParallelConfig

_MUCH = 0.1  # of the tokens: lengths that are so much off are told
_SAMPLE = 256  # rows whose lengths are compared with their tokens


def read_budget() -> int:
    """Return the tokens of a batch of one data rank; 0: batches have the rows that the script gives them."""
    key, value = read_asked_key()
    return int(value) if key == "pack_tokens" else 0


def list_patches_alone(config: ParallelConfig) -> list[Patch]:
    """In one process: what joins its batches, and nothing else."""
    of_session(Asked).alone = config
    why = "packs by tokens"
    own: dict[str, Callable] = {
        "__init__": _check_before_init,
        "get_train_dataloader": get_train_dataloader,
        "_get_num_items_in_batch": count_targets_of_step,
        "training_step": _run_joined_step,
        **deal.ALONE,
    }
    return [Patch(f"transformers.trainer:Trainer.{name}", around(function), why) for name, function in own.items()]


def _check_before_init(
    original: Callable,
    self: Trainer,
    model: PreTrainedModel | None = None,
    args: TrainingArguments | None = None,
    *rest: object,
    **kwargs: object,
) -> None:
    original(self, model, args, *rest, **kwargs)
    check_trainer_for_joining(self)


def _run_joined_step(
    original: Callable, self: Trainer, model: PreTrainedModel, inputs: dict, *args: object, **kwargs: object
) -> object:
    check_batch(inputs)
    with draw_noise_of_examples(self, inputs):
        return original(self, model, inputs, *args, **kwargs)


# ---- what it cannot go with -----------------------------------------------------------------------------------------


def check_trainer_for_joining(trainer: Trainer) -> None:
    """Refuse a Trainer whose batches would not be those that were asked for."""
    of_session(runtime.Trainers).made = True
    if not read_asked_key()[1]:
        return
    why = find_reason_against_joining(trainer)
    if why is not None:
        refuse_joining(why)
    strategy = getattr(trainer.args, "train_sampling_strategy", "random")
    if read_budget() and (strategy != "random" or getattr(trainer.args, "group_by_length", False)):
        refuse_joining(
            f"train_sampling_strategy={strategy} orders rows in another way", "train_sampling_strategy=random"
        )


def find_reason_against_joining(trainer: Trainer) -> str | None:
    """Return why this Trainer's batches cannot be joined, before a row was seen; None if they can."""
    from transformers import Trainer

    names = ("get_train_dataloader", "_get_train_sampler") if read_budget() else ("get_train_dataloader",)
    for name in names:
        if getattr(type(trainer), name) is not getattr(Trainer, name):
            return f"{type(trainer).__name__}.{name} makes batches of its own"
    if getattr(trainer.data_collator, "mlm", False):
        return "masked language modelling looks both ways, and draws what it masks"
    if isinstance(trainer.train_dataset, torch.utils.data.IterableDataset):
        return "batches of an iterable data set are dealt out by rows"
    model = getattr(trainer.model, "base_model", trainer.model)
    takes = inspect.signature(getattr(model, "forward", model)).parameters
    if "position_ids" not in takes and "kwargs" not in takes:
        return f"{type(trainer.model).__name__} takes no position_ids, which tell examples apart"
    return None


def check_loop() -> None:
    """Refuse settings of Trainer's loader, and of servers, in a loop without a Trainer.

    Raises:
        SpecError: joined batches were asked for, or what only TRL's trainers have.
    """
    if not runtime.is_loop():
        return
    if read_asked_key()[1]:
        refuse_joining("batches of a loop without a Trainer are the loop's own")
    servers.refuse_loop()


# ---- the loader -----------------------------------------------------------------------------------------------------


@patch("transformers.trainer:Trainer.get_train_dataloader", "counts batches in rows")
def get_train_dataloader(original: Callable, self: Trainer) -> object:
    """Batches of at most `pack_tokens` tokens, or the script's without padding, where that is asked for."""
    from transformers.trainer_utils import has_length, seed_worker

    if read_budget() or joining.is_joining_wanted():
        why = joining.find_reason_for_other_numbers(self)
        if why is not None:
            refuse_joining(why)
    else:
        joining.choose_joining(self, find_reason_against_joining)
    if not read_budget():
        if joining.is_joining_wanted():
            with replacing(self, data_collator=joining.Joined(self.data_collator, Beside.wanted(self, of_batch=True))):
                loader = original(self)
        else:
            loader = original(self)
        follow_trainer(loader)
        return loader
    dataset, args = self.train_dataset, self.args
    if dataset is None or isinstance(dataset, torch.utils.data.IterableDataset) or not has_length(dataset):
        refuse_joining("examples of a data set without a length cannot be dealt out", "a data set with a length")
    examples = Examples(*get_rows_and_collator(self))
    current = runtime.current()
    ranks = 1 if current is None else current.mesh.data_size
    seed = args.seed if args.data_seed is None else args.data_seed
    shares = None if current is None else current.config.shares
    batches = TokenBatches(_read_lengths(dataset, args), read_budget(), ranks, seed, shares)
    deal.record_deal(self, batches)
    filled = sum(batches.lengths) / (len(batches) * batches.budget)
    unlike = f" of at most {' '.join(map(str, batches.budgets))} tokens" if len(set(batches.budgets)) > 1 else ""
    report.say(
        f"pack_tokens={batches.budget}: {len(batches.lengths)} examples in {batches.steps} batches of each of "
        f"{batches.ranks} data ranks{unlike}, {filled:.0%} full; per_device_train_batch_size is not used for training"
    )
    workers = args.dataloader_num_workers
    loader = torch.utils.data.DataLoader(
        examples,
        batch_sampler=batches,  # type: ignore[arg-type]
        collate_fn=functools.partial(join_rows, beside=Beside.wanted(self, of_batch=False)),
        num_workers=workers,
        pin_memory=args.dataloader_pin_memory,
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        multiprocessing_context=args.dataloader_multiprocessing_context,
        in_order=args.dataloader_in_order,
        worker_init_fn=functools.partial(
            seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index
        ),
    )
    return self.accelerator.prepare(loader)


@dataclass(eq=False)
class Examples(torch.utils.data.Dataset):
    """Each example as the script's collator makes it alone; `~index` is example `index` without targets."""

    rows: Dataset
    collate: Collate

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = dict(self.collate([self.rows[index if index >= 0 else ~index]]))
        if index < 0:
            row["labels"] = torch.full_like(row["labels"], -100)
        return row


def _read_lengths(rows: Dataset, args: TrainingArguments) -> list[int]:
    lengths, name = read_lengths_of(rows, args), find_length_column(rows, args)
    if lengths is None:
        refuse_joining("rows of the data set have no input_ids to count", "a data set of tokens")
    if name is None:
        return lengths
    # Some rows all over the data set: too small lengths let batches overflow, too large ones leave them empty.
    told = counted = 0
    for index in range(0, len(rows), max(1, len(rows) // _SAMPLE)):
        row = rows[index]
        tokens = len(row["input_ids"]) if "input_ids" in row else lengths[index]
        if tokens > lengths[index]:
            why = f"the column {name} says {lengths[index]} of example {index}, which has {tokens} tokens"
            refuse_joining(why, "a data set without that column, or length_column_name")
        told, counted = told + lengths[index], counted + tokens
    if told > (1 + _MUCH) * counted:
        report.say(
            f"pack_tokens: the column {name} says {told} of examples that have {counted} tokens: batches hold less"
        )
    return lengths

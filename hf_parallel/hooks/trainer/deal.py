"""`pack_tokens`: which examples of an epoch were dealt is part of a checkpoint, so that each is seen exactly once.

The deal of an epoch follows from the budget, the number of data ranks, the seed and the lengths of the examples. A run
that goes on from the middle of an epoch finishes it with the batches of that deal, whatever its own numbers are:

    dealt for 2 data ranks    [0 1] [2 3] [4 5] [6 7]     a checkpoint after two steps: 4 batches were seen
    finished by 3             [4 5 6] [7 - -]             the next epoch is dealt for 3

Under `batch_shares` a batch is as large as the GPU it was dealt for allows, so that the epoch is finished by the same
shares alone.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict, cast

from transformers import TrainerCallback

from hf_parallel.ask.keys.data import EVEN
from hf_parallel.ask.spec import refuse
from hf_parallel.hooks import report
from hf_parallel.hooks.accelerate.token_batches import TokenBatches
from hf_parallel.hooks.patching import patch
from hf_parallel.hooks.trainer.checkpoints import record_of
from hf_parallel.model.calls import bind_by_name

if TYPE_CHECKING:
    from torch.utils.data import DataLoader
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments

#: Where Trainer's state keeps the deal, beside what callbacks remember.
PLACE = "hf_parallel_dealt_examples"
#: Of a pass over the data: what Trainer's `epoch` is off by rounding.
_WHOLE = 1e-6


class Deal(TypedDict):
    """An epoch that is under way: how it was dealt, and how many of its batches all data ranks together have seen."""

    pack_tokens: int
    data_ranks: int
    shares: str
    seed: int
    examples: int
    tokens: int
    epoch: int
    batches: int


@dataclass
class Dealing:
    """The deals of a training.

    Attributes:
        batches: as this run deals them.
        deal: how the epoch under way was dealt, and what was seen of it when it began here.
        total: batches of that epoch.
        first_step: steps taken before the epoch began here.
        resumed: steps taken by former runs; None if there was none.
    """

    batches: TokenBatches
    deal: Deal
    total: int = 0
    first_step: int = 0
    resumed: int | None = None

    def resume(self, deal: Deal, step: int) -> None:
        """Go on after this step: finish the epoch of this deal; if nothing of it is left, begin the next one.

        Raises:
            SpecError: it was dealt of other examples, or by other shares than this run's.
        """
        made, self.resumed = _make_new_deal(self.batches, deal["epoch"]), step
        if (deal["examples"], deal["tokens"]) != (made["examples"], made["tokens"]):
            refuse(
                f"pack_tokens={made['pack_tokens']}",
                f"the checkpoint is from the middle of an epoch over {deal['examples']} examples of {deal['tokens']} "
                f"tokens, and there are {made['examples']} of {made['tokens']} now",
                do="give the same data set, or ignore_data_skip=True, which begins the epoch anew",
            )
        former = self.batches
        if {deal["shares"], made["shares"]} != {EVEN}:
            # Batches are as large as the data ranks' shares: the epoch is finished by the numbers it was dealt by.
            if {**deal, "batches": 0} != made:
                dealt, ranks = f"pack_tokens={deal['pack_tokens']},batch_shares={deal['shares']}", deal["data_ranks"]
                refuse(
                    f"pack_tokens={made['pack_tokens']},batch_shares={made['shares']}",
                    f"the checkpoint is from the middle of an epoch dealt with {dealt} for {ranks} data ranks",
                    do=f"{dealt} works, or ignore_data_skip=True, which begins the epoch anew",
                )
            more = self.batches.skip(deal["epoch"], deal["batches"])
            self.deal = deal if more else {**made, "epoch": deal["epoch"] + 1}
            return
        if {**deal, "batches": 0} != made:
            former = TokenBatches(self.batches.lengths, deal["pack_tokens"], deal["data_ranks"], deal["seed"])
        real = [batch for step in former.of_epoch(deal["epoch"]) for batch in step if batch[0] >= 0]
        left = real[deal["batches"] :]
        if not left:
            self.deal = {**made, "epoch": deal["epoch"] + 1}
            return
        self.deal = deal
        self.batches.finish(deal["epoch"], left)
        if former is not self.batches:
            report.say(
                f"the checkpoint is from the middle of an epoch dealt with pack_tokens={deal['pack_tokens']} for "
                f"{deal['data_ranks']} data ranks: its last {len(left)} batches are finished as they were dealt"
            )

    @property
    def rest(self) -> int:
        """Micro-steps that finish the epoch that a former run has begun; 0 if there is none."""
        return 0 if self.batches.rest is None else len(self.batches.rest[1])

    def count_seen(self, micro_steps: float) -> int:
        """Count the batches of examples in the first micro-steps of what is run here of the epoch under way."""
        epoch, made = self.deal["epoch"], self.batches
        resumed = made.rest is not None and made.rest[0] == epoch
        if not resumed and len(made.lengths) >= len(made) and len(set(made.shares)) == 1:  # each batch has an example
            return int(min(micro_steps, made.steps)) * made.ranks
        steps = made.of_epoch(epoch)
        return sum(batch[0] >= 0 for step in steps[: int(min(micro_steps, len(steps)))] for batch in step)


def _make_new_deal(batches: TokenBatches, epoch: int) -> Deal:
    """Return an epoch as it is dealt here, of which nothing was seen."""
    return {
        "pack_tokens": batches.budget,
        "data_ranks": batches.ranks,
        "shares": EVEN if len(set(batches.shares)) == 1 else ":".join(map(str, batches.shares)),
        "seed": batches.seed,
        "examples": len(batches.lengths),
        "tokens": sum(batches.lengths),
        "epoch": epoch,
        "batches": 0,
    }


@dataclass(eq=False)
class DealtExamples(TrainerCallback):
    """Keeps the deal where checkpoints find it."""

    dealing: Dealing

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        steps, deal = state.global_step - self.dealing.first_step, self.dealing.deal
        batches = deal["batches"] + self.dealing.count_seen(steps * args.gradient_accumulation_steps)
        state.stateful_callbacks[PLACE] = {**deal, "batches": batches}
        state.epoch = deal["epoch"] + batches / self.dealing.total


def record_deal(trainer: Trainer, batches: TokenBatches) -> None:
    """Let checkpoints of this trainer say which of these batches were seen."""
    dealing = record_of(trainer).dealing = Dealing(batches, _make_new_deal(batches, 0))
    trainer.remove_callback(DealtExamples)
    trainer.add_callback(DealtExamples(dealing))


# ---- what Trainer is told -------------------------------------------------------------------------------------------


@patch("transformers.trainer:Trainer._inner_training_loop", "knows how examples were dealt when it goes on")
def inner_training_loop(
    original: Callable,
    self: Trainer,
    batch_size: int | None = None,
    args: object = None,
    *rest: object,
    **kwargs: object,
) -> object:
    """Remember the checkpoint that this training goes on from, which Trainer reads after it has counted its steps."""
    given = bind_by_name(original, (self, batch_size, args, *rest), kwargs)
    record_of(self).resumed_from = given.get("resume_from_checkpoint")
    return original(self, batch_size, args, *rest, **kwargs)


@patch("transformers.trainer:Trainer.set_initial_training_values", "takes all epochs for equally long")
def set_initial_training_values(
    original: Callable, self: Trainer, args: TrainingArguments, dataloader: DataLoader
) -> tuple:
    """Count the steps of an epoch that a former run has begun as they are.

    Raises:
        SpecError: it was dealt by tokens and this run deals by rows, or nothing says which examples were seen.
    """
    found = original(self, args, dataloader)
    dealing, folder = record_of(self).dealing, record_of(self).resumed_from
    path = None if folder is None else os.path.join(folder, "trainer_state.json")
    if path is None or not os.path.isfile(path):
        return found
    with open(path, encoding="utf-8") as file:
        state = json.load(file)
    deal, step = state.get("stateful_callbacks", {}).get(PLACE), int(state["global_step"])
    epoch = state["epoch"] or 0.0
    is_between = abs(epoch - round(epoch)) < _WHOLE
    if dealing is None:
        if deal is not None and not args.ignore_data_skip and not is_between:
            refuse(
                "pack_tokens=0",
                f"the checkpoint is from the middle of an epoch ({epoch:.2f}) dealt by tokens",
                f"pack_tokens={deal['pack_tokens']}",
            )
        return found
    if args.ignore_data_skip:
        dealing.deal, dealing.resumed = _make_new_deal(dealing.batches, int(epoch + _WHOLE)), step
        return found
    if deal is not None:
        dealing.resume(cast("Deal", {"shares": EVEN, **deal}), step)  # older checkpoints know no shares
    elif is_between:
        dealing.deal, dealing.resumed = _make_new_deal(dealing.batches, round(epoch)), step
    else:
        refuse(
            f"pack_tokens={dealing.batches.budget}",
            f"the checkpoint is from the middle of an epoch ({epoch:.2f}) and does not say which examples were seen",
            do="go on from the end of an epoch, or with ignore_data_skip=True, which begins the epoch anew",
        )
    epochs, per_epoch, examples, samples, batch, steps, most = found
    rest = math.ceil(dealing.rest / args.gradient_accumulation_steps)
    begun = dealing.deal["epoch"] + (rest > 0)  # epochs of which nothing is left then
    if args.max_steps > 0:
        epochs = begun + math.ceil(max(0, most - step - rest) / per_epoch)
    else:
        most = step + rest + math.ceil(max(0.0, args.num_train_epochs - begun) * per_epoch)
    return epochs, per_epoch, examples, samples, batch, steps, most


def find_place_to_go_on(original: Callable, self: Trainer, *args: object, **kwargs: object) -> tuple[int, int]:
    """Return the epoch, and the batches to skip in it: none where `finish` has left them out."""
    found, dealing = original(self, *args, **kwargs), record_of(self).dealing
    if dealing is None:
        self.state.stateful_callbacks.pop(PLACE, None)
        return found
    return found if dealing.resumed is None else (dealing.deal["epoch"], 0)


@patch("transformers.trainer:Trainer._run_epoch", "takes all epochs for equally long")
def run_epoch(original: Callable, self: Trainer, *args: object, **kwargs: object) -> object:
    """Run what is left of an epoch that a former run has begun as one with that many batches."""
    dealing = record_of(self).dealing
    given = bind_by_name(original, (self, *args), kwargs)
    del given["self"]
    place = getattr(given["train_dataloader"], "_place", None)
    if place is not None:
        place.rejoins = True
    if dealing is None:
        return original(self, **given)
    dealing.first_step = self.state.global_step
    if given["epoch"] != dealing.deal["epoch"]:
        dealing.deal = _make_new_deal(dealing.batches, given["epoch"])
    dealing.total = dealing.deal["batches"] + dealing.count_seen(math.inf)
    if dealing.batches.rest is not None and dealing.batches.rest[0] == given["epoch"]:
        given["steps_in_epoch"] = dealing.rest
        given["num_update_steps_per_epoch"] = math.ceil(dealing.rest / self.args.gradient_accumulation_steps)
    return original(self, **given)


#: What one process is given that joins its batches.
ALONE = {
    "_inner_training_loop": inner_training_loop,
    "set_initial_training_values": set_initial_training_values,
    "_init_training_state": find_place_to_go_on,
    "_run_epoch": run_epoch,
}

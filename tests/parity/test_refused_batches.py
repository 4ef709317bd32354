"""A batch that cannot be joined comes up on one data rank in the middle of a training: all ranks say so and stop."""

import multiprocessing
import time

import pytest
import torch
from transformers import Trainer

from hf_parallel import SpecError
from hf_parallel.hooks.trainer import refused_batches
from tests.distributed import run, run_alone
from tests.parity.test_pack_tokens import Skewed
from tests.parity.test_padding_free import script
from tests.rows import pad
from tests.training import activate

#: Neither the longest nor the shortest of the rows, which are tried before the first step.
BAD_LENGTH = sorted(len(tokens) for tokens in Skewed(11).tokens)[4]
#: Of a machine under load; ranks that wait for each other wait for minutes.
SECONDS = 60


def with_a_hole(rows):
    batch = pad(rows)
    batch["attention_mask"][batch["attention_mask"].sum(1) == BAD_LENGTH, 1] = 0
    return batch


def going_on(rows):
    """Positions of one example go on from another one."""
    batch = pad(rows)
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)
    positions[batch["attention_mask"].sum(1) == BAD_LENGTH] += 5
    return {**batch, "position_ids": positions}


BAD = {"hole": (with_a_hole, "has a hole at token 1"), "positions": (going_on, "begin at 5, not at 0")}


class Uncounted(Trainer):
    """Neither its model nor its loss takes the count of targets."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


def stopped(spec: str, folder: str, out: str, what: str, **changes) -> tuple[str, float, int]:
    """What the run says, seconds since the first step, and how many ended."""
    activate(spec)
    collate, _ = BAD[what]
    trainer, losses = script(folder, out, 2, collate=collate, **changes)
    begun: list[float] = []
    step, trainer.training_step = trainer.training_step, lambda *args: (begun.append(time.monotonic()), step(*args))[1]
    with pytest.raises(SpecError) as error:
        trainer.train()
    for worker in multiprocessing.active_children():  # they hold the pipe through which this rank answers
        worker.kill()
    return str(error.value), time.monotonic() - begun[-1] if begun else 0.0, len(losses.found)


@pytest.fixture
def folder(runs):
    return runs.initial("llama")


@pytest.mark.parametrize(
    ("spec", "what", "changes"),
    [
        ("dp_shard=2,padding_free=true", "hole", {}),
        ("dp_replicate=2,padding_free=true", "positions", {"gradient_accumulation_steps": 2}),
        ("dp_shard=2,pack_tokens=40", "positions", {"dataloader_num_workers": 1}),
        ("dp_shard=2,tp=2,padding_free=true", "hole", {}),
        ("dp_shard=2,padding_free=true", "positions", {"kind": Uncounted}),
        ("tp=2,pack_tokens=40", "hole", {"dataloader_num_workers": 1}),
        (None, "positions", {"dataloader_num_workers": 1}),
    ],
    ids=["hole", "accumulation", "workers", "tp", "uncounted", "tp alone", "one process"],
)
def test_all_ranks_say_the_same(folder, tmp_path, spec, what, changes):
    given = (folder, str(tmp_path), what)
    if spec is None:
        found = [run_alone(stopped, "padding_free=true", *given, **changes)]
    else:
        found = run(stopped, 4 if "dp_shard=2,tp" in spec else 2, spec, *given, **changes)
    key = "pack_tokens=40" if spec and "pack" in spec else "padding_free=true"
    for said, seconds, _ in found:
        assert said == found[0][0]
        assert said.startswith(f"{key}: ")
        assert BAD[what][1] in said
        assert f"for step {found[0][2] + 1})" in said
        assert ("data rank" in said) == (spec is not None and "dp_" in spec)
        assert said.endswith(f"{'pack_tokens=0' if 'pack' in key else 'padding_free=false'} works")
        assert seconds < SECONDS


def messages_sent(spec: str, folder: str, out: str, kind: type) -> tuple[int, int]:
    """How many batches a run without a bad one reads, and how often it asks whether one is bad."""
    activate(spec)
    sent: list[object] = []
    trainer, _ = script(folder, out, 3, kind=kind)
    batches = [dict(batch) for batch in trainer.get_train_dataloader()]
    for place, name in ((refused_batches, "_sum_without_trainer"), (refused_batches.messages, "gather_objects")):
        original = getattr(place, name)
        setattr(place, name, lambda *given, original=original: (sent.append(given), original(*given))[1])
    for batch in batches:
        trainer._get_num_items_in_batch([batch], torch.device("cpu"))
    return len(batches), len(sent)


@pytest.mark.parametrize(("kind", "each"), [(Trainer, 0), (Uncounted, 1)])
def test_good_batches_send_nothing_more_where_trainer_counts(folder, tmp_path, kind, each):
    for steps, sent in run(messages_sent, 2, "dp_shard=2,padding_free=true", folder, str(tmp_path), kind):
        assert steps > 1
        assert sent == each * steps

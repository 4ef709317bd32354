"""pack_tokens: each example once, data ranks of equal work, and the losses of the same examples one by one."""

import json
import os
import random
from fractions import Fraction
from functools import partial

import pytest
import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback

from hf_parallel import SpecError
from hf_parallel.hooks.accelerate.token_batches import TokenBatches
from tests import models
from tests.distributed import RankFailure, run, run_alone, run_alone_once
from tests.refusals import pattern_of_refusal
from tests.rows import pad
from tests.training import activate, axes, check_numbers, trainer_of

BUDGET, RATE, SEED = 70, 0.1, 5


class Skewed(Dataset):
    """Rows of 3 to 33 tokens, most of them short; some labels are ignored."""

    def __init__(self, size: int = 23) -> None:
        draw = random.Random(2)
        lengths = [min(33, 3 + int(draw.expovariate(0.15))) for _ in range(size)]
        generator = torch.Generator().manual_seed(7)
        self.tokens = [torch.randint(0, models.VOCABULARY, (length,), generator=generator) for length in lengths]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, labels = self.tokens[index], self.tokens[index].clone()
        labels[: index % 4] = -100
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def lengths_of(rows: Dataset) -> list[int]:
    return [len(tokens) for tokens in rows.tokens]


# ---- dealing out ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_ranks_have_equal_work_and_each_example_comes_once(ranks):
    draw = random.Random(1)
    lengths = [min(2000, 20 + int(draw.lognormvariate(4.5, 1.2))) for _ in range(3001)]
    batches, loads = TokenBatches(lengths, 2048, ranks, seed=3), []
    for epoch in (0, 1):
        steps = batches.of_epoch(epoch)
        assert sorted(index for step in steps for batch in step for index in batch) == list(range(3001))
        assert len(steps) * ranks == len(batches)
        loads = [[batches.tokens(batch) for batch in step] for step in steps]
        assert max(map(max, loads)) <= 2048
        assert max(max(step) * ranks / sum(step) for step in loads) <= 1.05
    assert sum(map(sum, loads)) / (2048 * len(batches)) > 0.95
    again = TokenBatches(lengths, 2048, ranks, seed=3)
    assert again.of_epoch(1) == batches.of_epoch(1) != batches.of_epoch(0)
    assert TokenBatches(lengths, 2048, ranks, seed=4).of_epoch(0) != batches.of_epoch(0)


@pytest.mark.parametrize("shares", [(3, 3, 2, 1), (1, 9), (2, 2, 1)])
def test_ranks_have_work_by_their_shares(shares):
    draw = random.Random(1)
    lengths = [min(900, 20 + int(draw.lognormvariate(4.5, 1.2))) for _ in range(3001)]
    ranks = len(shares)
    batches = TokenBatches(lengths, 2048, ranks, 3, tuple(map(Fraction, shares)))
    assert sum(batches.budgets) <= 2048 * ranks
    for epoch in (0, 1):
        steps = batches.of_epoch(epoch)
        assert sorted(index for step in steps for batch in step for index in batch if index >= 0) == list(range(3001))
        assert len(steps) * ranks == len(batches)
        loads = [[batches.tokens(batch) for batch in step] for step in steps]
        assert all(own <= most for step in loads for own, most in zip(step, batches.budgets, strict=True))
        late = [max(own / share for own, share in zip(step, shares, strict=True)) * sum(shares) for step in loads]
        assert sum(late) / sum(map(sum, loads)) <= 1.06
    assert sum(map(sum, loads)) / (2048 * len(batches)) > 0.9
    assert TokenBatches(lengths, 2048, ranks, 3, tuple(map(Fraction, shares))).of_epoch(1) == steps
    alike = TokenBatches(lengths, 2048, ranks, 3, (Fraction(2),) * ranks)
    assert alike.of_epoch(1) == TokenBatches(lengths, 2048, ranks, 3).of_epoch(1)


def test_an_example_goes_where_it_fits():
    batches = TokenBatches([60] * 5 + [9] * 4, 40, 2, 0, (Fraction(3), Fraction(1)))
    assert batches.budgets == [60, 20]
    steps = batches.of_epoch(0)
    assert all(batches.tokens(step[1]) <= 20 for step in steps)
    assert sorted(i for step in steps for batch in step for i in batch if i >= 0) == list(range(9))
    with pytest.raises(SpecError, match=pattern_of_refusal("pack_tokens=40", 0, 61, works="pack_tokens=41")):
        TokenBatches([61] + [9] * 4, 40, 2, 0, (Fraction(3), Fraction(1)))
    TokenBatches([61] + [9] * 4, 41, 2, 0, (Fraction(3), Fraction(1)))


@pytest.mark.parametrize(("count", "ranks", "stand_ins"), [(5, 2, 1), (2, 3, 1), (6, 2, 0), (1, 4, 3)])
def test_a_rank_without_an_example_takes_part(count, ranks, stand_ins):
    """Examples as long as the budget, each alone in its batch."""
    steps = TokenBatches([9] * count, 9, ranks, seed=0).of_epoch(0)
    found = [index for step in steps for batch in step for index in batch]
    assert sorted(index for index in found if index >= 0) == list(range(count))
    assert sum(index < 0 for index in found) == stand_ins
    assert all(len(step) == ranks and any(batch[0] >= 0 for batch in step) for step in steps)


def test_too_long_an_example_is_refused():
    with pytest.raises(SpecError, match=pattern_of_refusal("pack_tokens=8", 1, 9, works="pack_tokens=9")):
        TokenBatches([3, 9, 4], 8, 2, 0)


# ---- the unchanged Trainer script -----------------------------------------------------------------------------------


#: Of losses: SUMS, and as much again from the steps before.
TWO_EPOCHS = 2e-5


class Losses(TrainerCallback):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.found.append(logs["loss"])


def trained(spec: str, folder: str, out: str, size: int, resume: int = 0, **changes) -> tuple[list[float], float]:
    """The script: its losses, and how far its weights have gone; `resume`: from the checkpoint of this step."""
    activate(spec)
    settings = {
        **{"per_device_train_batch_size": 3, "num_train_epochs": 2, "learning_rate": RATE, "seed": SEED},
        **{"max_grad_norm": 0, "logging_nan_inf_filter": False, "save_strategy": "steps", **changes},
    }
    sets = {"train_dataset": Skewed(size), "data_collator": pad, "recorder": Losses()}
    trainer, losses = trainer_of(AutoModelForCausalLM.from_pretrained(folder), out, settings=settings, **sets)
    trainer.train(resume_from_checkpoint=f"{out}/checkpoint-{resume}" if resume else None)
    return losses.found, weight_of(trainer.model)


def weight_of(model) -> float:
    whole = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    whole = {name: getattr(value, "full_tensor", lambda v=value: v)() for name, value in whole.items()}
    return sum(value.double().square().sum().item() for value in whole.values())


def one_by_one(folder: str, ranks: int, size: int, accumulation: int = 1, shares: tuple = ()) -> list[float]:
    """The loss of each step, from its examples alone, in a loop that knows no packing."""
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    rows = Skewed(size)
    batches, losses = TokenBatches(lengths_of(rows), BUDGET, ranks, SEED, tuple(map(Fraction, shares))), []
    for epoch in (0, 1):
        steps = batches.of_epoch(epoch)
        for first in range(0, len(steps), accumulation):
            chosen = [i for step in steps[first : first + accumulation] for batch in step for i in batch if i >= 0]
            targets = sum(int((rows[i]["labels"][1:] != -100).sum()) for i in chosen)
            loss = sum(
                model(**{k: v[None] for k, v in rows[i].items()}, num_items_in_batch=targets).loss for i in chosen
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.fixture
def folder(runs):
    return runs.initial("llama")


@pytest.mark.parametrize(
    ("spec", "size"), [("dp_shard=2", 23), ("tp=2", 23), ("cp=2", 23), ("dp_shard=4", 3), ("dp_shard=2,tp=2", 23)],
)  # fmt: skip
def test_losses_of_the_examples_one_by_one(folder, tmp_path, spec, size):
    sizes = axes(spec)
    ranks = sizes["world"] // (2 if "tp" in spec or "cp" in spec else 1)
    expected = run_alone_once(one_by_one, folder, ranks, size)
    assert len(expected) >= 2
    assert expected[0] != expected[-1]
    ranks = run(trained, sizes["world"], f"{spec},pack_tokens={BUDGET}", folder, str(tmp_path), size)
    check_numbers([losses for losses, _ in ranks], expected, TWO_EPOCHS)


@pytest.mark.parametrize("spec", ["dp_shard=2", "dp_replicate=2,tp=2"])
def test_losses_under_shares(folder, tmp_path, spec):
    expected = run_alone_once(one_by_one, folder, 2, 23, 2, (2, 1))
    assert expected != run_alone_once(one_by_one, folder, 2, 23, 2)
    given = f"{spec},pack_tokens={BUDGET},batch_shares=2:1", folder, str(tmp_path), 23, 0
    ranks = run(partial(trained, gradient_accumulation_steps=2), axes(spec)["world"], *given)
    check_numbers([losses for losses, _ in ranks], expected, TWO_EPOCHS)


def resumed_with(spec: str, folder: str, out: str) -> list[float]:
    return trained(spec, folder, f"{out}/whole", 23, resume=3, save_steps=1)[0]


def test_resume_under_shares(folder, tmp_path):
    """In the middle of the second epoch; with other numbers in words."""
    spec = f"dp_shard=2,pack_tokens={BUDGET},batch_shares=2:1"
    for whole, rest, weights in run(whole_and_resumed, 2, spec, folder, str(tmp_path)):
        assert len(whole) > 3
        assert rest == pytest.approx(whole[3:], rel=1e-6)
        assert weights[0] == pytest.approx(weights[1], rel=1e-7)
    dealt, other = f"pack_tokens={BUDGET},batch_shares=2:1", f"pack_tokens={BUDGET},batch_shares=1:2"
    with pytest.raises(RankFailure, match=pattern_of_refusal(other, 2, works=f"{dealt} works")):
        run(resumed_with, 2, f"dp_shard=2,{other}", folder, str(tmp_path))


def test_one_process_packs_too(folder, tmp_path):
    losses, _ = run_alone(trained, f"pack_tokens={BUDGET}", folder, str(tmp_path), 23)
    check_numbers([losses], run_alone_once(one_by_one, folder, 1, 23), TWO_EPOCHS)


def whole_and_resumed(spec: str, folder: str, out: str) -> list[list[float]]:
    whole, weights = trained(spec, folder, f"{out}/whole", 23, save_steps=1)
    rest, again = trained(spec, folder, f"{out}/whole", 23, resume=3, save_steps=1)
    return [whole, rest, [weights, again]]


def test_resume_in_the_middle_of_the_second_epoch(folder, tmp_path):
    for whole, rest, weights in run(whole_and_resumed, 2, f"dp_shard=2,pack_tokens={BUDGET}", folder, str(tmp_path)):
        assert len(whole) == 4, "two epochs of two steps"
        assert rest[-1] == pytest.approx(whole[-1], rel=1e-6)
        assert weights[0] == pytest.approx(weights[1], rel=1e-7)


# ---- the middle of an epoch, with other numbers ---------------------------------------------------------------------

STEPS_BEFORE = 3
EXAMPLES = 61


class Seen(TrainerCallback):
    """Which examples were trained on: each has a first token of its own."""

    def __init__(self, trainer: Trainer) -> None:
        self.by_epoch: dict[int, list[int]] = {}
        step, trainer.training_step = trainer.training_step, self.step
        self.original, self.trainer, self.epoch = step, trainer, -1

    def step(self, model, inputs, *args, **kwargs):
        starts = inputs["position_ids"][0] == 0
        real = [int(n) for n, labels in self.examples(inputs, starts) if bool((labels != -100).any())]
        epoch = int((self.trainer.state.epoch or 0.0) + 1e-9)
        self.by_epoch.setdefault(epoch, []).extend(real)
        return self.original(model, inputs, *args, **kwargs)

    @staticmethod
    def examples(inputs, starts):
        bounds = [*starts.nonzero()[:, 0].tolist(), len(starts)]
        return [
            (inputs["input_ids"][0, a], inputs["labels"][0, a:b]) for a, b in zip(bounds, bounds[1:], strict=False)
        ]


class Numbered(Skewed):
    """Examples that begin with their own number, all of whose labels count."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index].clone()
        tokens[0] = index
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def seen_by(spec: str | None, folder: str, out: str, resume: int, most: int, **changes) -> tuple[dict, int, int]:
    """The examples that this rank sees by epoch, from a checkpoint on; the steps at the end, and those planned."""
    from hf_parallel.hooks.trainer import joining

    joining.find_reason_for_other_numbers = lambda trainer: None  # tried elsewhere
    activate(spec)
    settings = {
        **{"per_device_train_batch_size": 3, "num_train_epochs": 3, "learning_rate": RATE, "seed": SEED},
        **{"max_grad_norm": 0, "save_strategy": "steps", "save_steps": 1, **changes},
    }
    sets = {"train_dataset": Numbered(EXAMPLES), "data_collator": pad}
    trainer, _ = trainer_of(AutoModelForCausalLM.from_pretrained(folder), out, settings=settings, **sets)
    seen = Seen(trainer)
    if most:
        trainer.add_callback(StopsAt(most))
    trainer.train(resume_from_checkpoint=f"{out}/checkpoint-{resume}" if resume else None)
    return seen.by_epoch, trainer.state.global_step, trainer.state.max_steps


class StopsAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


def seen_by_all(folder: str, out: str, *parts: tuple) -> tuple[dict, int, int]:
    """One run after another, each `(ranks, spec, steps at which it stops, arguments)`; by epoch, what they saw."""
    total: dict[int, list[int]] = {}
    found: list[tuple[dict, int, int]] = []
    before = 0
    for ranks, spec, most, changes in parts:
        given = (spec, folder, out, before, most)
        found = [run_alone(seen_by, *given, **changes)] if ranks == 1 else run(seen_by, ranks, *given, **changes)
        for by_epoch, _, _ in found[:1] if "tp" in spec else found:
            for epoch, examples in by_epoch.items():
                total.setdefault(epoch, []).extend(examples)
        before = most
    return total, *found[0][1:]


@pytest.mark.parametrize(
    "parts",
    [
        [(2, "dp_shard=2,pack_tokens=70", 9, {}), (3, "dp_shard=3,pack_tokens=70", 0, {})],
        [(2, "dp_shard=2,pack_tokens=70", 2, {}), (2, "dp_shard=2,pack_tokens=41", 0, {})],
        [(1, "pack_tokens=41", 7, {}), (2, "dp_shard=2,pack_tokens=203", 0, {})],
        [(2, "dp_shard=2,pack_tokens=41", 3, {}), (2, "tp=2,pack_tokens=70", 6, {}), (1, "pack_tokens=70", 0, {})],
        [(2, "dp_shard=2,pack_tokens=41", 2, {}), (1, "pack_tokens=41", 4, {"gradient_accumulation_steps": 2}),
         (2, "dp_shard=2,pack_tokens=41", 0, {})],
    ],
    ids=["ranks", "smaller budget", "one to two", "chain", "accumulation"],
)  # fmt: skip
def test_each_example_once_after_a_resume_with_other_numbers(folder, tmp_path, parts):
    seen, steps, planned = seen_by_all(folder, str(tmp_path), *parts)
    assert {epoch: sorted(examples) for epoch, examples in seen.items()} == dict.fromkeys(
        range(3), list(range(EXAMPLES))
    )
    assert steps == planned


class Noted(TrainerCallback):
    """Writes down what was seen in each step that ended, and fails before one of them."""

    def __init__(self, seen: Seen, path: str, fails_after: int) -> None:
        self.seen, self.path, self.fails_after = seen, path, fails_after

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.fails_after:
            raise RuntimeError("a rank is lost")

    def on_step_end(self, args, state, control, **kwargs):
        with open(self.path, "a") as file:
            file.write(json.dumps(self.seen.by_epoch) + "\n")
        self.seen.by_epoch = {}


def attempt(folder: str, out: str, fails_after: int) -> int:
    """The script as a launcher starts it, on as many processes as there are."""
    activate("dp_shard=-1,pack_tokens=41")
    settings = {
        **{"per_device_train_batch_size": 2, "num_train_epochs": 3, "learning_rate": RATE, "seed": SEED},
        **{"max_grad_norm": 0, "save_strategy": "steps", "save_steps": 1},
    }
    sets = {"train_dataset": Numbered(EXAMPLES), "data_collator": pad}
    trainer, _ = trainer_of(AutoModelForCausalLM.from_pretrained(folder), out, settings=settings, **sets)
    path = f"{out}/seen-{fails_after}-{os.environ['RANK']}.txt"
    trainer.add_callback(Noted(Seen(trainer), path, fails_after))
    trainer.train()
    return trainer.args.gradient_accumulation_steps


def test_each_example_once_after_restarts_with_fewer_processes(folder, tmp_path):
    """The launcher starts the script again, which goes on by itself; a step keeps its rows by accumulation."""
    launch = {"TORCHELASTIC_RUN_ID": "job-7", "TORCHELASTIC_RESTART_COUNT": "0"}
    with pytest.raises(RankFailure, match="a rank is lost"):
        run(attempt, 3, folder, str(tmp_path), 5, env=launch, init=False)
    assert run(attempt, 2, folder, str(tmp_path), 0, env=launch, init=False) == [3, 3]
    seen: dict[str, list[int]] = {}
    for path in tmp_path.glob("seen-*.txt"):
        for line in path.read_text().splitlines():
            for epoch, examples in json.loads(line).items():
                seen.setdefault(epoch, []).extend(examples)
    assert {epoch: sorted(found) for epoch, found in seen.items()} == {str(n): list(range(EXAMPLES)) for n in range(3)}


def test_other_examples_are_refused_in_the_middle_of_an_epoch(folder, tmp_path):
    first = (f"pack_tokens={BUDGET}", folder, str(tmp_path), 23)
    run_alone(trained, *first, save_steps=1, max_steps=3)
    with pytest.raises(RankFailure, match=pattern_of_refusal(f"pack_tokens={BUDGET}", 23, works="21")):
        run_alone(trained, *first[:3], 21, resume=1)
    with pytest.raises(RankFailure, match=pattern_of_refusal("pack_tokens=0", works=f"pack_tokens={BUDGET} works")):
        run_alone(trained, "padding_free=true", *first[1:], resume=1)
    run_alone(trained, *first[:3], 21, resume=1, ignore_data_skip=True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"train_sampling_strategy": "group_by_length"}, "orders rows in another way"),
        ({"subclass": True}, "makes batches of its own"),
        ({"odd": True}, "not of one number per token"),
    ],
)
def test_what_it_cannot_go_with(folder, tmp_path, arguments, says):
    with pytest.raises(RankFailure, match=says):
        run_alone(refused, folder, str(tmp_path), dict(arguments))


def refused(folder: str, out: str, arguments: dict) -> None:

    class Own(Trainer):
        def get_train_dataloader(self):
            return super().get_train_dataloader()

    activate(f"pack_tokens={BUDGET}")
    kind = Own if arguments.pop("subclass", False) else Trainer
    collate = (lambda rows: {**pad(rows), "odd": torch.zeros(len(rows))}) if arguments.pop("odd", False) else pad
    settings = {"remove_unused_columns": False, **arguments}
    model = AutoModelForCausalLM.from_pretrained(folder)
    options = {"train_dataset": Skewed(), "data_collator": collate}
    trainer_of(model, out, settings=settings, kind=kind, **options)[0].train()


def test_lengths_come_from_their_column(folder, tmp_path):
    """Which the model's forward does not take, so that a Trainer removes it."""
    datasets = pytest.importorskip("datasets")

    def lengths() -> list[int]:
        activate(f"pack_tokens={BUDGET}")
        rows = [{**{key: value.tolist() for key, value in row.items()}, "length": 40} for row in Skewed()]
        model, tensors = AutoModelForCausalLM.from_pretrained(folder), datasets.Dataset.from_list(rows)
        options = {"train_dataset": tensors.with_format("torch"), "data_collator": pad}
        trainer, _ = trainer_of(model, str(tmp_path), **options)
        return trainer.get_train_dataloader().batch_sampler.lengths

    assert run_alone(lengths) == [40] * len(Skewed())


def test_a_pipeline_is_refused():
    from hf_parallel.ask.config import ParallelConfig

    with pytest.raises(SpecError, match="cuts batches by rows"):
        ParallelConfig.parse("pp=2,pack_tokens=64").resolve(2)


def test_a_column_of_too_small_lengths_is_refused():
    from hf_parallel.hooks.trainer import token_budget

    rows = pytest.importorskip("datasets").Dataset.from_list(
        [{"input_ids": [3] * 9, "length": 9 - (index == 4)} for index in range(7)]
    )
    with pytest.raises(
        SpecError, match=pattern_of_refusal("column length", 8, 4, 9, works="length_column_name works")
    ):
        token_budget._read_lengths(rows, None)
    assert token_budget._read_lengths(rows.remove_columns("length"), None) == [9] * 7

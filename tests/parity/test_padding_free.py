"""padding_free: the script's own batches joined to one row, with its losses and weights; `auto` chooses it, or not."""

import random

import pytest
import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer

from hf_parallel import SpecError
from tests.distributed import RankFailure, run, run_alone
from tests.parity.test_pack_tokens import TWO_EPOCHS, Losses, Skewed, weight_of
from tests.refusals import find_line, pattern_of_refusal
from tests.rows import pad
from tests.training import activate, axes, check_numbers, trainer_of

ROWS = 11  # of odd number: the last batch is ragged on any number of ranks


def script(folder: str, out: str, rows: int, kind: type = Trainer, collate=pad, **changes):
    """A Trainer of batches of `rows` rows, whose losses are kept."""
    given = {"max_steps": 3, "num_train_epochs": 3, "seed": 3, "max_grad_norm": 0, "save_strategy": "steps", **changes}
    settings = {**given, "per_device_train_batch_size": rows}
    sets = {"train_dataset": Skewed(ROWS), "data_collator": collate}
    return trainer_of(AutoModelForCausalLM.from_pretrained(folder), out, 1, settings, kind, Losses(), **sets)


def trained(spec: str | None, folder: str, out: str, rows: int, **changes) -> tuple[list[float], float, list]:
    """Losses, how far the weights have gone, and the shapes of the first batches."""
    activate(spec)
    trainer, losses = script(folder, out, rows, **changes)
    shapes = [tuple(batch["input_ids"].shape) for batch in trainer.get_train_dataloader()]
    trainer.train()
    return losses.found, weight_of(trainer.model), shapes


@pytest.fixture
def folder(runs):
    return runs.initial("llama")


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "cp=2", "dp_shard=2,tp=2"])
def test_losses_and_weights_of_the_padded_batches(folder, tmp_path, spec):
    """Steps of six rows, of which the second is short of one."""
    rows = 3 if "dp_shard" in spec else 6
    expected = run_alone(trained, None, folder, str(tmp_path), 6)
    joined(run(trained, axes(spec)["world"], f"{spec},padding_free=true", folder, str(tmp_path), rows), *expected)


def joined(found, losses, weight, padded):
    """Every rank has those losses and weights, and batches of one row each."""
    assert losses[0] != losses[-1]
    assert all(shape[0] > 1 for shape in padded)
    check_numbers([ours for ours, *_ in found], losses, TWO_EPOCHS)
    check_numbers([[ours] for _, ours, _ in found], [weight], 1e-6)
    assert {shape[0] for *_, shapes in found for shape in shapes} == {1}


def test_one_process_joins_too(folder, tmp_path):
    given, changes = (folder, str(tmp_path), 4), {"gradient_accumulation_steps": 2}
    joined([run_alone(trained, "padding_free=true", *given, **changes)], *run_alone(trained, None, *given, **changes))


class OwnMean(Trainer):
    """A user's loss: torch's mean over the targets of the batch, in rows or joined."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, targets)
        return (loss, outputs) if return_outputs else loss


SHARED = ("dp_shard=2,batch_shares=2:1", "dp_replicate=2,batch_shares=1:2,tp=2", "dp_shard=2,batch_shares=auto")


@pytest.mark.parametrize("spec", SHARED)
@pytest.mark.parametrize("kind", [Trainer, OwnMean])
def test_unlike_parts_of_the_padded_batches(folder, tmp_path, spec, kind):
    """As data ranks of unlike speed have them: the last batch of five examples leaves one rank with two or none."""
    changes = {"kind": kind, "gradient_accumulation_steps": 2, "max_steps": 4}
    expected = run_alone(trained, None, folder, str(tmp_path), 6, **changes)
    joined(
        run(trained, axes(spec)["world"], f"{spec},padding_free=true", folder, str(tmp_path), 3, **changes), *expected
    )


def counted_examples(spec: str, folder: str, out: str) -> list[int]:
    """Examples of this rank in each micro-step, as the monitor counts them."""
    from hf_parallel.hooks import monitoring

    activate(spec)
    found, own = list[int](), monitoring.count_tokens_and_rows

    def keep(batch, rows=None):
        found.append(own(batch, rows)[1])
        return own(batch, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitoring, "count_tokens_and_rows", keep)
        script(folder, out, 3, max_steps=2)[0].train()
    return found


def test_examples_of_a_joined_row_are_counted(folder, tmp_path):
    """By them `batch_shares=auto` tells how long one takes."""
    found = run(counted_examples, 2, "dp_shard=2,batch_shares=2:1,padding_free=true", folder, str(tmp_path))
    assert [max(counts) for counts in found] == [4, 2]


# ---- noise ----------------------------------------------------------------------------------------------------------

ALPHA = 5.0


def noise(spec: str | None, folder: str, out: str) -> list[tuple[int, float]]:
    """Of each example of the first step: its length, and the largest noise times the root of the width."""
    activate(spec)
    trainer, _ = script(folder, out, 4, neftune_noise_alpha=ALPHA, max_steps=1, num_train_epochs=1)
    found: list[tuple[int, float]] = []

    def read(module, inputs, output):
        added = (output - torch.nn.functional.embedding(inputs[0], module.weight)).detach().abs()
        row, mask = current["position_ids"], current.get("attention_mask")
        if row is None:
            rows = added.amax((1, 2)).tolist()
            found.extend(zip(mask.sum(1).tolist(), [value * output.shape[-1] ** 0.5 for value in rows], strict=True))
            return
        starts = [*(row[0] == 0).nonzero()[:, 0].tolist(), row.shape[1]]
        for a, b in zip(starts, starts[1:], strict=False):
            found.append((b - a, added[0, a:b].max().item() * output.shape[-1] ** 0.5))

    current: dict = {}
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: current.update(
            position_ids=kwargs.get("position_ids"), attention_mask=kwargs.get("attention_mask")
        ),
        with_kwargs=True,
    )
    step = trainer.training_step

    def with_hook(*args, **kwargs):
        handle = trainer.model.get_input_embeddings().register_forward_hook(read)
        try:
            return step(*args, **kwargs)
        finally:
            handle.remove()

    trainer.training_step = with_hook
    trainer.train()
    return found


def test_noise_is_of_the_padded_batch(folder, tmp_path):
    padded = run_alone(noise, None, folder, str(tmp_path))
    joined_ = run_alone(noise, "padding_free=true", folder, str(tmp_path))
    assert [length for length, _ in joined_] == [length for length, _ in padded]
    longest = max(length for length, _ in padded)
    for found in (padded, joined_):  # the largest of 200 numbers and more that are drawn evenly
        assert [value for _, value in found] == pytest.approx([ALPHA / longest**0.5] * 4, rel=0.03)


def test_noise_is_of_each_example(folder, tmp_path):
    found = run_alone(noise, "pack_tokens=70", folder, str(tmp_path))
    assert len({length for length, _ in found}) > 2
    assert [value for _, value in found] == pytest.approx([ALPHA / n**0.5 for n, _ in found], rel=0.03)


class Seeded(Trainer):
    """Draws the noise of a step from its number, whatever has been drawn before."""

    def training_step(self, *args, **kwargs):
        torch.manual_seed(self.state.global_step)
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize("spec", ["cp=2", "tp=2"])
@pytest.mark.parametrize("key", ["padding_free=true", "pack_tokens=70"])
def test_noise_of_parts_of_a_joined_row(folder, tmp_path, spec, key):
    """Ranks that hold a part of the row add the noise that one process adds to it."""
    given, changes = (folder, str(tmp_path), 4), {"neftune_noise_alpha": 50.0, "max_steps": 2, "kind": Seeded}
    losses, weight, _ = run_alone(trained, key, *given, **changes)
    assert losses[0] != pytest.approx(run_alone(trained, key, *given, max_steps=2)[0][0], rel=1e-3)
    found = run(trained, 2, f"{spec},{key}", *given, **changes)
    check_numbers([ours for ours, *_ in found], losses, TWO_EPOCHS)
    check_numbers([[ours] for _, ours, _ in found], [weight], 1e-6)


def test_adapters_are_joined(folder, tmp_path):
    """The base model is tried."""
    given = (folder, str(tmp_path), 4)
    joined([run_alone(with_adapters, "padding_free=true", *given)], *run_alone(with_adapters, None, *given))


def with_adapters(spec: str | None, folder: str, out: str, rows: int) -> tuple[list[float], float, list]:
    from peft import LoraConfig, get_peft_model

    activate(spec)
    trainer, losses = script(folder, out, rows)
    torch.manual_seed(3)
    model = get_peft_model(trainer.model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    sets = {"train_dataset": trainer.train_dataset, "data_collator": pad}
    trainer = Trainer(model, trainer.args, **sets, callbacks=[recorder := Losses()])
    shapes = [tuple(batch["input_ids"].shape) for batch in trainer.get_train_dataloader()]
    trainer.train()
    return recorder.found, weight_of(model), shapes


# ---- what would train on other numbers ------------------------------------------------------------------------------


class MeanOfMeans(Trainer):
    """Mean of means over examples."""

    def compute_loss(self, model, inputs, num_items_in_batch=None, **kwargs):
        labels = inputs["labels"]
        logits = model(input_ids=inputs["input_ids"], attention_mask=inputs.get("attention_mask")).logits
        losses = torch.nn.functional.cross_entropy(logits[:, :-1].mT, labels[:, 1:], reduction="none")
        counts = (labels[:, 1:] != -100).sum(1).clamp(min=1)
        return (losses.sum(1) / counts).mean()


class LastToken(Trainer):
    """Looks at the last token of each row."""

    def compute_loss(self, model, inputs, num_items_in_batch=None, **kwargs):
        return model(**{k: v for k, v in inputs.items() if k != "labels"}).logits[:, -1].square().mean()


class Summed(Trainer):
    """A sum over targets, divided by their count: rows make no difference."""

    def compute_loss(self, model, inputs, num_items_in_batch=None, **kwargs):
        labels = inputs.pop("labels")
        logits, targets = model(**inputs).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


class OwnLoader(Trainer):
    def get_train_dataloader(self):
        return super().get_train_dataloader()


def with_scores(rows):
    return {**pad(rows), "scores": torch.zeros(len(rows))}


def with_far_positions(rows):
    batch = pad(rows)
    return {**batch, "position_ids": 7 + batch["attention_mask"].cumsum(1) - 1}


def pad_left(rows):
    return {key: value.flip(1) for key, value in pad([{k: v.flip(0) for k, v in r.items()} for r in rows]).items()}


def with_holes(rows):
    batch = pad(rows)
    batch["attention_mask"][:, 1] = 0
    return batch


def weighted_by_example(outputs, labels, num_items_in_batch=None):
    """Rows of the first half count twice."""
    losses = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].mT, labels[:, 1:], reduction="none").sum(1)
    return (losses * (1 + (torch.arange(len(losses)) < len(losses) / 2))).sum() / num_items_in_batch


REFUSED = {
    "loader": ({"kind": OwnLoader}, ["OwnLoader"]),
    "collator": ({"collate": with_scores}, ["scores"]),
    "positions": ({"collate": with_far_positions}, ["position_ids", 7]),
    "holes": ({"collate": with_holes}, ["attention_mask", 1]),
    "padding": ({"collate": pad_left}, ["left"]),
    "mean of means": ({"kind": MeanOfMeans}, ["script's own loss"]),
    "last token": ({"kind": LastToken}, ["script's own loss"]),
    "weights": ({"loss": weighted_by_example}, ["script's own loss"]),
}


def refused(spec: str, folder: str, out: str, what: str) -> None:
    activate(spec)
    changes = dict(REFUSED[what][0])
    loss = changes.pop("loss", None)
    trainer, _ = script(folder, out, 3, remove_unused_columns=False, **changes)
    trainer.compute_loss_func = loss
    trainer.train()


@pytest.mark.parametrize("what", REFUSED)
def test_what_it_cannot_go_with(folder, tmp_path, what):
    line = pattern_of_refusal("padding_free=true", *REFUSED[what][1], works="padding_free=false works")
    with pytest.raises(RankFailure, match=line):
        run_alone(refused, "padding_free=true", folder, str(tmp_path), what)


@pytest.mark.parametrize("what", ["positions", "mean of means"])
def test_all_ranks_refuse_alike(folder, tmp_path, what):
    """And before a batch is read: none waits for another."""
    for line in run(said_by, 2, "dp_shard=2,pack_tokens=70", folder, str(tmp_path), what):
        assert find_line(line, *REFUSED[what][1])


def said_by(*given) -> str:
    with pytest.raises(SpecError) as error:
        refused(*given)
    return str(error.value)


def test_a_sum_of_the_scripts_own_is_joined(folder, tmp_path):
    given, changes = (folder, str(tmp_path), 6), {"kind": Summed}
    expected = run_alone(trained, None, *given, **changes)
    joined(run(trained, 2, "dp_shard=2,padding_free=true", *given[:2], 3, **changes), *expected)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("spec", [None, "dp_shard=2"])
def test_first_labels_that_trainer_counts_are_counted(runs, tmp_path, spec, accumulation):
    """Trainer does not know that GPT-2 shifts labels: one process divides by the first label of each row, too."""
    folder, changes = runs.initial("gpt2"), {"gradient_accumulation_steps": accumulation}
    rows = 3 if spec else 6
    expected = run_alone(trained, None, folder, str(tmp_path), 6, **changes)
    spec = f"{spec},padding_free=true" if spec else "padding_free=true"
    given = (spec, folder, str(tmp_path), rows)
    joined(run(trained, 2, *given, **changes) if rows == 3 else [run_alone(trained, *given, **changes)], *expected)


@pytest.mark.parametrize("model", ["opt", "mamba"])
def test_models_that_cannot_tell_examples_apart(runs, tmp_path, model):
    """On all ranks, before anything trains; the script's random numbers stay as they are."""
    given = ("dp_shard=2,padding_free=true", runs.initial(model), str(tmp_path))
    for line, same in run(said_of_model, 2, *given):
        assert "cannot tell examples of one row apart" in line
        assert same


def said_of_model(spec: str, folder: str, out: str) -> tuple[str, bool]:
    activate(spec)
    trainer, _ = script(folder, out, 3)
    before = torch.get_rng_state()
    with pytest.raises(SpecError) as error:
        trainer.get_train_dataloader()
    return str(error.value), torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("spec", "says"), [("pp=2,padding_free=true", "cuts batches by rows"), ("pack_tokens=9,padding_free=true", "own")]
)
def test_contradictions_are_refused(spec, says):
    from hf_parallel.ask.config import ParallelConfig

    with pytest.raises(SpecError, match=says):
        ParallelConfig.parse(spec).resolve(2)


# ---- under `--parallel auto` ----------------------------------------------------------------------------------------


class Uneven(Dataset):
    """One long row in four, and a wide model: products decide, and half of the tokens are padding."""

    def __init__(self) -> None:
        draw = random.Random(4)
        self.rows = [torch.randint(0, 99, (64 if i % 4 == 3 else 8 + draw.randrange(8),)) for i in range(32)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.rows[index]
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}


def chosen(folder: str, out: str, case: str) -> tuple[str, list[str], str]:
    """The layout at the end, what was said, and the spec of hf_parallel.json."""
    import json
    from pathlib import Path

    from hf_parallel.hooks import report, runtime

    said: list[str] = []
    report.say, saying = lambda line: (said.append(line), saying(line)), report.say
    activate("auto")
    more = {"left": {"collate": pad_left}, "own": {"kind": MeanOfMeans}}.get(case, {})
    trainer, losses = script(folder, out, 4, **more)
    trainer.train_dataset = Uneven()
    trainer.train()
    assert len(losses.found) == 3
    written = json.loads((Path(out) / "hf_parallel.json").read_text())
    return runtime.current().config.to_spec(), [line for line in said if "padding" in line], written["spec"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("plain", ["padding_free=true: padding is ", "of batches of 4 rows", "x the step time", "the same numbers"]),
        ("left", ["not padded on the right", "pack_tokens=", "other numbers"]),
        ("own", ["script's own loss looks at examples"]),
    ],
)
def test_auto_joins_what_stays_the_same(runs, tmp_path, case, words):
    shape = {"hidden_size": 128, "intermediate_size": 512, "max_position_embeddings": 64}
    for spec, said, written in run(chosen, 2, runs.initial("llama", **shape), str(tmp_path), case):
        assert len(said) == 1, said
        assert [word for word in words if word not in said[0]] == []
        assert spec == written
        assert ("padding_free=true" in spec) == (case == "plain")

"""padding_free: the script's own batches joined to one row, with its losses and weights; `auto` chooses it, or not."""

import random

import pytest
import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from hf_parallel import SpecError
from tests import models
from tests.distributed import RankFailure, run, run_alone
from tests.parity.test_pack_tokens import Losses, Skewed, weight_of
from tests.rows import pad
from tests.training import axes, spec_id

ROWS = 11  # of odd number: the last batch is ragged on any number of ranks


def script(folder: str, out: str, rows: int, kind: type = Trainer, collate=pad, **changes):
    """A Trainer of batches of `rows` rows, whose losses are kept."""
    given = {"max_steps": 3, "learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "constant", "seed": 3}
    args = TrainingArguments(
        out, per_device_train_batch_size=rows, logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True,
        max_grad_norm=0, **(given | changes)
    )  # fmt: skip
    model, losses = AutoModelForCausalLM.from_pretrained(folder), Losses()
    return kind(model, args, train_dataset=Skewed(ROWS), data_collator=collate, callbacks=[losses]), losses


def trained(folder: str, out: str, rows: int, **changes) -> tuple[list[float], float, list[tuple[int, ...]]]:
    """Losses, how far the weights have gone, and the shapes of the first batches."""
    trainer, losses = script(folder, out, rows, **changes)
    shapes = [tuple(batch["input_ids"].shape) for batch in trainer.get_train_dataloader()]
    trainer.train()
    return losses.found, weight_of(trainer.model), shapes


def on_ranks(spec: str, *given, **changes):
    from hf_parallel import hooks

    hooks.activate(spec, source="the test")
    return trained(*given, **changes)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    models.build("llama").save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("spec", ["dp_shard=2", "tp=2", "cp=2", "dp_shard=2,tp=2"], ids=spec_id)
def test_losses_and_weights_of_the_padded_batches(folder, tmp_path, spec):
    """Steps of six rows, of which the second is short of one."""
    rows = 3 if "dp_shard" in spec else 6
    expected, weights, padded = run_alone(trained, folder, str(tmp_path), 6)
    assert expected[0] != expected[-1]
    found = run(on_ranks, axes(spec)["world"], f"{spec},padding_free=true", folder, str(tmp_path), rows)
    for losses, weight, shapes in found:
        assert losses == pytest.approx(expected, rel=2e-5)  # sums of ~1e4 fp32 terms in another order
        assert weight == pytest.approx(weights, rel=1e-6)
        assert {shape[0] for shape in shapes} == {1}
    assert all(shape[0] > 1 for shape in padded)


def test_one_process_joins_too(folder, tmp_path):
    expected, weights, _ = run_alone(trained, folder, str(tmp_path), 4, gradient_accumulation_steps=2)
    given = folder, str(tmp_path), 4
    losses, weight, shapes = run_alone(on_ranks, "padding_free=true", *given, gradient_accumulation_steps=2)
    assert losses == pytest.approx(expected, rel=2e-5)
    assert weight == pytest.approx(weights, rel=1e-6)
    assert {shape[0] for shape in shapes} == {1}


def refused(folder: str, out: str, what: str) -> None:
    from hf_parallel import hooks

    class Own(Trainer):
        def get_train_dataloader(self):
            return super().get_train_dataloader()

    def odd(rows):
        return {**pad(rows), "scores": torch.zeros(len(rows))}

    hooks.activate("padding_free=true", source="the test")
    kinds = {"kind": Own} if what == "loader" else {"collate": odd}
    script(folder, out, 3, remove_unused_columns=False, **kinds)[0].train()


@pytest.mark.parametrize(
    ("what", "says"), [("loader", "makes batches of its own"), ("collator", "not of one number per token")]
)
def test_what_it_cannot_go_with(folder, tmp_path, what, says):
    with pytest.raises(RankFailure, match=f"padding_free=true: .*{says}"):
        run_alone(refused, folder, str(tmp_path), what)


@pytest.mark.parametrize(
    ("spec", "says"), [("pp=2,padding_free=true", "cuts batches by rows"), ("pack_tokens=9,padding_free=true", "own")]
)
def test_contradictions_are_refused(spec, says):
    from hf_parallel.config import ParallelConfig

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


def pad_left(rows):
    return {key: value.flip(1) for key, value in pad([{k: v.flip(0) for k, v in r.items()} for r in rows]).items()}


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, **kwargs):
        return super().compute_loss(model, inputs, **kwargs)


def chosen(folder: str, out: str, case: str) -> tuple[str, list[str], str]:
    """The layout at the end, what was said, and the spec of hf_parallel.json."""
    import json
    from pathlib import Path

    from hf_parallel import hooks
    from hf_parallel.hooks import report, runtime

    said: list[str] = []
    report.say, saying = lambda line: (said.append(line), saying(line)), report.say
    hooks.activate("auto", source="the test")
    more = {"left": {"collate": pad_left}, "own": {"kind": OwnLoss}}.get(case, {})
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
        ("own", ["script's own loss", "pack_tokens="]),
    ],
)
def test_auto_joins_what_stays_the_same(tmp_path, case, words):
    shape = {"hidden_size": 128, "intermediate_size": 512, "max_position_embeddings": 64}
    models.build("llama", **shape).save_pretrained(tmp_path / "model")
    for spec, said, written in run(chosen, 2, str(tmp_path / "model"), str(tmp_path / "out"), case):
        assert len(said) == 1, said
        assert [word for word in words if word not in said[0]] == []
        assert spec == written
        assert ("padding_free=true" in spec) == (case == "plain")

"""Its models, trainer and losses: an encoder that pools, with a layer of its own, used before and after training."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sentence_transformers")
pytest.importorskip("datasets")

from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Transformer

from tests.distributed import RankFailure, run, run_alone
from tests.outside import materials
from tests.training import Recorder, axes, none, weight_differences

ROWS, BATCH = 22, 8
TEXTS = ["an odd number of texts", "of other lengths", "three"]


@dataclass
class Outcome:
    """What one run did, on one rank or in one process."""

    before: torch.Tensor
    after: torch.Tensor
    logs: list[dict[str, float]]
    evaluated: float


def sentences(start: int) -> list[str]:
    """Texts of odd lengths."""
    words = ["assert", "while", "if", "with", "else", "for", "not", "in", "lambda", "yield"]
    return [" ".join(words[(start + row * k) % 10] for k in range(1, 3 + row % 4)) for row in range(ROWS)]


def model_of(folder: str) -> SentenceTransformer:
    """An encoder and a layer that is no transformers model's."""
    encoder = Transformer(folder)
    torch.manual_seed(3)
    return SentenceTransformer(modules=[encoder, Pooling(32), Dense(32, 11)])


def trainer_of(
    folder: str, out: str, loss: str, rows: int
) -> tuple[SentenceTransformerTrainer, Recorder, torch.Tensor]:
    """What a script makes, and what the model gives before it has a trainer."""
    model, recorder = model_of(folder), Recorder()
    before = model.encode(TEXTS, convert_to_tensor=True)
    of_model: Any = {
        "cosine": lambda: losses.CosineSimilarityLoss(model),
        "gathered": lambda: losses.MultipleNegativesRankingLoss(model, gather_across_devices=True),
        "softmax": lambda: losses.SoftmaxLoss(model, 11, num_labels=5),
    }
    columns = {"first": sentences(0), "second": sentences(5)}
    if loss == "cosine":
        columns["score"] = [row % 5 / 4 for row in range(ROWS)]
    data = Dataset.from_dict(columns)
    args = SentenceTransformerTrainingArguments(
        out,
        per_device_train_batch_size=rows,
        per_device_eval_batch_size=rows,
        num_train_epochs=1,
        learning_rate=5e-2,
        optim="sgd",
        logging_steps=1,
        save_steps=0.5,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        dataloader_drop_last=loss == "gathered",
    )
    trainer = SentenceTransformerTrainer(model, args, data, data, of_model[loss](), callbacks=[recorder])
    return trainer, recorder, before


def train(spec: str | None, folder: str, out: str, loss: str) -> Outcome:
    """Encode, train, evaluate, save; then once more from the last but one checkpoint."""
    if spec is not None:
        from hf_parallel import hooks

        hooks.activate(spec, source="test")
    rows = BATCH // (axes(spec)["data_ranks"] if spec else 1)
    trainer, recorder, before = trainer_of(folder, out, loss, rows)
    trainer.train()
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.save_model(f"{out}/end")
    again, *_ = trainer_of(folder, out, loss, rows)
    again.train(resume_from_checkpoint=f"{out}/checkpoint-{trainer.state.max_steps - 1}")
    again.model.save_pretrained(f"{out}/resumed")
    return Outcome(before, trainer.model.encode(TEXTS, convert_to_tensor=True), recorder.logs, evaluated)


def encoded(folder: str) -> torch.Tensor:
    """By the library alone."""
    return SentenceTransformer(folder).encode(TEXTS, convert_to_tensor=True)


class Desk:
    """A model to start from; each reference runs once."""

    def __init__(self, root):
        self.root, self.references = root, {}
        run_alone(self.write)

    def write(self):
        materials.model("bert", materials.MODELS["bert"][2]).save_pretrained(f"{self.root}/bert")
        materials.tokenizer("pairs").save_pretrained(f"{self.root}/bert")

    def reference(self, loss):
        if loss not in self.references:
            call = partial(train, None, f"{self.root}/bert", f"{self.root}/{loss}", loss)
            self.references[loss] = run_alone(call)
        return self.references[loss]


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    return Desk(tmp_path_factory.mktemp("sentences"))


@pytest.mark.parametrize(
    ("spec", "loss"), [("tp=2", "cosine"), ("dp_shard=2", "gathered"), ("tp=2,dp_shard=2", "gathered")], ids=str
)
def test_as_in_one_process(desk, spec, loss):
    """Under tp the ragged last batch is trained on; losses that gather compare the rows of all data ranks."""
    reference, out = desk.reference(loss), f"{desk.root}/{spec}"
    found = []
    for rank, seen in enumerate(
        run(partial(train, spec, f"{desk.root}/bert", out, loss), axes(spec)["world"], init=False)
    ):
        found += [f"rank {rank}, {name}" for name in _unlike(seen, reference)]
    for folder in ("end", "resumed"):
        found += weight_differences(f"{out}/{folder}", f"{desk.root}/{loss}/end", 1e-6)
        found += weight_differences(f"{out}/{folder}/2_Dense", f"{desk.root}/{loss}/end/2_Dense", 1e-6)
    none(found)
    torch.testing.assert_close(run_alone(encoded, f"{out}/end"), reference.after, rtol=0, atol=1e-5)
    assert "# tensor([[1." in Path(out, "end", "README.md").read_text()  # the examples of its card have run


def _unlike(seen: Outcome, reference: Outcome) -> list[str]:
    """Sums of fp32 terms in another order, and weights that differ by as much."""
    pairs = {"eval_loss": (seen.evaluated, reference.evaluated), "steps": (len(seen.logs), len(reference.logs))}
    for step, (ours, theirs) in enumerate(zip(seen.logs, reference.logs, strict=False)):
        pairs |= {f"{key} {step}": (ours[key], theirs[key]) for key in theirs}
    found = [f"{name}: {a} {b}" for name, (a, b) in pairs.items() if a != pytest.approx(b, rel=1e-5)]
    for name in ("before", "after"):
        if not torch.allclose(getattr(seen, name), getattr(reference, name), rtol=0, atol=1e-5):
            found.append(name)
    return found


def test_weights_of_a_loss_are_refused(desk):
    call = partial(train, "dp_shard=2", f"{desk.root}/bert", f"{desk.root}/softmax", "softmax")
    with pytest.raises(RankFailure, match=r"SoftmaxLoss trains classifier.weight: 2 data ranks .*; tp=2 works"):
        run(call, 2, init=False)

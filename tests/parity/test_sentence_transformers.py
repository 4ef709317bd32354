"""Its models, trainer and losses: an encoder that pools, with a layer of its own, used before and after training."""

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
from sentence_transformers.sentence_transformer.modules import Dense, Pooling, Router, Transformer
from transformers.integrations import peft as integration

from tests.counting import CountCollectives
from tests.distributed import RankFailure, run, run_alone
from tests.outside import materials
from tests.training import (
    Outcome,
    Recorder,
    activate,
    arguments_of,
    fit,
    none,
    tensor_differences,
    trainer_of,
    weight_differences,
)

ROWS = 22
TEXTS = ["an odd number of texts", "of other lengths", "three"]


def sentences(start: int) -> list[str]:
    """Texts of odd lengths."""
    words = ["assert", "while", "if", "with", "else", "for", "not", "in", "lambda", "yield"]
    return [" ".join(words[(start + row * k) % 10] for k in range(1, 3 + row % 4)) for row in range(ROWS)]


def model_of(folder: str) -> SentenceTransformer:
    """An encoder and a layer that is no transformers model's."""
    encoder = Transformer(folder)
    torch.manual_seed(3)
    return SentenceTransformer(modules=[encoder, Pooling(32), Dense(32, 11)])


def adapted(folder: str) -> SentenceTransformer:
    """The same with adapters in the encoder; its own layer trains as before."""
    from peft import LoraConfig

    integration.MIN_PEFT_VERSION = "0.20.0"  # Transformers 5.24 asks for a PEFT that is not out yet
    model = model_of(folder)
    model.add_adapter(LoraConfig(r=3, target_modules=["query", "value"], init_lora_weights=False))
    return model


def trainer_of_pairs(
    folder: str, out: str, loss: str, data_ranks: int
) -> tuple[SentenceTransformerTrainer, Recorder, torch.Tensor]:
    """What a script makes, and what the model gives before it has a trainer."""
    model = adapted(folder) if loss == "adapters" else model_of(folder)
    before = model.encode(TEXTS, convert_to_tensor=True)
    of_model: Any = {
        "cosine": lambda: losses.CosineSimilarityLoss(model),
        "adapters": lambda: losses.CosineSimilarityLoss(model),
        "gathered": lambda: losses.MultipleNegativesRankingLoss(model),
        "cosent": lambda: losses.CoSENTLoss(model),
        "matryoshka": lambda: losses.MatryoshkaLoss(model, losses.AnglELoss(model), matryoshka_dims=[11, 5]),
        "mined": lambda: losses.BatchHardTripletLoss(model),
        "cached": lambda: losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3),
        "mega": lambda: losses.MegaBatchMarginLoss(model),
        "guided": lambda: losses.GISTEmbedLoss(model, guide=SentenceTransformer(folder)),
        "softmax": lambda: losses.SoftmaxLoss(model, 11, num_labels=5),
    }
    columns = {"first": sentences(0), "second": sentences(5)}
    if loss in ("adapters", "cosine", "cosent", "matryoshka"):
        columns["score"] = [row % 5 / 4 for row in range(ROWS)]
    if loss == "mined":
        columns = {"sentence": columns["first"], "label": [row % 3 for row in range(ROWS)]}
    data = Dataset.from_dict(columns)
    settings = {
        **{"learning_rate": 5e-2, "lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 0.5},
        **{"seed": 42, "dataloader_drop_last": loss == "cached"},
    }
    arguments = arguments_of(out, data_ranks, SentenceTransformerTrainingArguments, **settings)
    sets = {"train_dataset": data, "eval_dataset": data, "loss": of_model[loss]()}
    made = trainer_of(model, out, settings=arguments, kind=SentenceTransformerTrainer, **sets)
    return *made, before


def train(spec: str | None, out: str, folder: str, loss: str) -> Outcome:
    """Encode, train, evaluate, save; then once more from the last but one checkpoint."""
    data_ranks = activate(spec)
    trainer, recorder, before = trainer_of_pairs(folder, out, loss, data_ranks)
    outcome = fit(trainer, recorder, f"{out}/end")
    again, *_ = trainer_of_pairs(folder, out, loss, data_ranks)
    again.train(resume_from_checkpoint=f"{out}/checkpoint-{trainer.state.max_steps - 1}")
    again.model.save_pretrained(f"{out}/resumed")
    outcome.more = {"before": before, "after": trainer.model.encode(TEXTS, convert_to_tensor=True)}
    return outcome


def encoded(folder: str) -> torch.Tensor:
    """By the library alone."""
    integration.MIN_PEFT_VERSION = "0.20.0"
    return SentenceTransformer(folder).encode(TEXTS, convert_to_tensor=True)


def write_encoder(path: str) -> str:
    """Write an encoder to start from, and its tokenizer; return the folder."""

    def write():
        materials.model("bert", materials.MODELS["bert"][2]).save_pretrained(path)
        materials.tokenizer("pairs").save_pretrained(path)

    run_alone(write)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model to start from."""
    return write_encoder(str(tmp_path_factory.mktemp("sentences") / "bert"))


@pytest.mark.parametrize(
    ("spec", "loss"),
    [
        *(("tp=2", "cosine"), ("dp_shard=2", "gathered"), ("tp=2,dp_shard=2", "gathered"), ("dp_shard=2", "cosent")),
        *(("dp_shard=2,zero_stage=1", "matryoshka"), ("dp_shard=2", "mined"), ("dp_shard=2", "cached")),
        *(("dp_shard=2", "adapters"), ("tp=2", "adapters")),
    ],
    ids=str,
)
def test_as_in_one_process(runs, folder, spec, loss):
    """Under tp the ragged last batch is trained on; losses that compare rows compare those of all data ranks."""
    ranks, reference = runs.compare(train, spec, folder, loss), runs.alone(train, folder, loss)
    end, out = reference.folder, str(Path(ranks[0].folder).parent)
    found = []
    for rank, outcome in enumerate(
        ranks
    ):  # sums of fp32 terms in another order, and of weights that differ by as much
        found += tensor_differences(f"rank {rank}, encoding", outcome.more, reference.more, 1e-5)
    for again, former in (("resumed", end), ("end/2_Dense", f"{end}/2_Dense"), ("resumed/2_Dense", f"{end}/2_Dense")):
        found += weight_differences(f"{out}/{again}", former, 1e-6)
    none(found)
    encodings = {"after": run_alone(encoded, f"{out}/end")}
    none(tensor_differences("encoding", encodings, {"after": reference.more["after"]}, 1e-5))
    assert "# tensor([[1." in Path(out, "end", "README.md").read_text()  # the examples of its card have run


def test_weights_of_a_loss_are_refused(folder, tmp_path):
    with pytest.raises(RankFailure, match=r"SoftmaxLoss .*classifier.weight: 2 .*; tp=2 works"):
        run(train, 2, "dp_shard=2", str(tmp_path), folder, "softmax", init=False)


@pytest.mark.parametrize(("loss", "name"), [("mega", "MegaBatchMarginLoss"), ("guided", "GISTEmbedLoss")])
def test_a_loss_that_cannot_be_gathered_is_refused(folder, tmp_path, loss, name):
    with pytest.raises(RankFailure, match=rf"{name}: .* 2 data ranks .*tp=2 works"):
        run(train, 2, "dp_shard=2", str(tmp_path), folder, loss, init=False)


# ---- Cached losses compute the backward pass of a batch in mini-batches ------------------------------------------


def towers(spec: str | None, out: str, folder: str, frozen: str, steps: int) -> Outcome:
    """A loss over mini-batches of three, by an encoder of questions and one of documents, one of which is frozen."""
    data_ranks = activate(spec)
    torch.manual_seed(3)
    encoders = [[Transformer(folder), Pooling(32), Dense(32, 11)] for _ in range(2)]
    model = SentenceTransformer(modules=[Router.for_query_document(*encoders)])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f"sub_modules.{frozen}" not in name)
    columns = {"first": sentences(0), "second": sentences(5)}
    settings = {
        **{"gradient_accumulation_steps": steps, "dataloader_drop_last": True, "learning_rate": 5e-2, "seed": 42},
        "router_mapping": {"first": "query", "second": "document"},
    }
    arguments = arguments_of(out, data_ranks * steps, SentenceTransformerTrainingArguments, **settings)
    loss = losses.CachedMultipleNegativesRankingLoss(model, mini_batch_size=3)
    options = {"train_dataset": Dataset.from_dict(columns), "loss": loss}
    counted = CountCollectives()
    trainer, recorder = trainer_of(model, out, settings=arguments, kind=SentenceTransformerTrainer, **options)
    with counted:
        outcome = fit(trainer, recorder)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    outcome.more = (counted.whole["reduce"] + counted.whole["scatter"]) / trained / trainer.state.global_step
    return outcome


@pytest.mark.parametrize("frozen", ["document", "query"])
@pytest.mark.parametrize(
    ("spec", "steps", "reductions"),
    [("dp_replicate=2", 1, 1), ("dp_replicate=2", 2, 1), ("dp_shard=2,zero_stage=1", 1, 1), ("dp_shard=2", 1, 2)],
)
def test_gradients_of_mini_batches_are_reduced_once(runs, folder, spec, steps, reductions, frozen):
    """But with zero_stage=3, which holds no whole ones: two mini-batches of four rows. Frozen ones come last, too."""
    for outcome in runs.compare(towers, spec, folder, frozen, steps):
        assert outcome.more == pytest.approx(reductions, abs=0.2)  # no pooler, but embeddings that a loss gathers

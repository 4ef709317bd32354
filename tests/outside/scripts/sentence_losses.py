"""Train embeddings of sentences with any loss of sentence-transformers, on the columns that it asks for."""

from dataclasses import dataclass

import torch
from datasets import load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from transformers import HfArgumentParser

#: Columns, as the table of losses has them.
SCORES = ("CosineSimilarityLoss", "CoSENTLoss", "AnglELoss")
LABELS = ("ContrastiveLoss", "OnlineContrastiveLoss", "SoftmaxLoss")
ONE = ("BatchAllTripletLoss", "BatchHardTripletLoss", "BatchHardSoftMarginTripletLoss", "BatchSemiHardTripletLoss")
TRIPLES = ("TripletLoss",)
TAUGHT = ("MSELoss", "EmbedDistillLoss")


@dataclass
class Arguments:
    """Model, data and loss."""

    model_name_or_path: str
    train_file: str
    validation_file: str
    loss: str = "MultipleNegativesRankingLoss"


def columns(name, row, index):
    """A row of the data set."""
    first, second = row["sentence1"], row["sentence2"]
    if name in SCORES:
        return {"sentence1": first, "sentence2": second, "score": 0.1 + 0.8 * float(row["label"])}
    if name in LABELS:
        return {"sentence1": first, "sentence2": second, "label": int(row["label"])}
    if name in ONE:
        return {"sentence": first, "label": index % 3}
    if name in TRIPLES:
        return {"anchor": first, "positive": second, "negative": " ".join(reversed(first.split()))}
    if name in TAUGHT:
        draw = torch.Generator().manual_seed(index)
        return {"sentence": first, "label": torch.randn(32, generator=draw).tolist()}
    if name in ("MarginMSELoss", "DistillKLDivLoss"):
        reverse = " ".join(reversed(first.split()))
        label = 0.3 * index if name == "MarginMSELoss" else [0.5, 0.1 * (index % 5)]
        return {"query": first, "positive": second, "negative": reverse, "label": label}
    if name == "DenoisingAutoEncoderLoss":
        return {"noisy": " ".join(first.split()[::2]), "text": first}
    return {"anchor": first, "positive": second}


def made(name, model, folder):
    """A loss with what it needs beside the model."""
    kind = getattr(losses, name)
    if name == "SoftmaxLoss":
        return kind(model, sentence_embedding_dimension=model.get_sentence_embedding_dimension(), num_labels=2)
    if name in ("GISTEmbedLoss", "CachedGISTEmbedLoss"):
        return kind(model, guide=SentenceTransformer(folder))
    if name in ("MatryoshkaLoss", "Matryoshka2dLoss"):
        return kind(model, losses.MultipleNegativesRankingLoss(model), matryoshka_dims=[32, 16])
    if name == "AdaptiveLayerLoss":
        return kind(model, losses.MultipleNegativesRankingLoss(model))
    if name == "DenoisingAutoEncoderLoss":
        return kind(model, tie_encoder_decoder=False, decoder_name_or_path=folder)
    return kind(model)


def main():
    own, args = HfArgumentParser((Arguments, SentenceTransformerTrainingArguments)).parse_args_into_dataclasses()
    model = SentenceTransformer(own.model_name_or_path)
    rows = load_dataset("json", data_files={"train": own.train_file, "validation": own.validation_file})
    names = rows["train"].column_names
    rows = rows.map(lambda row, index: columns(own.loss, row, index), with_indices=True, remove_columns=names)
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=rows["train"],
        eval_dataset=rows["validation"],
        loss=made(own.loss, model, own.model_name_or_path),
    )
    trainer.train()
    trainer.evaluate()
    model.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()

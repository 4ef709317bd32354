"""Train rerankers and sparse embeddings with any loss of sentence-transformers, on the columns that it asks for."""

import sys
from dataclasses import dataclass

from datasets import load_dataset
from sentence_transformers import (
    CrossEncoder,
    CrossEncoderTrainer,
    CrossEncoderTrainingArguments,
    SparseEncoder,
    SparseEncoderTrainer,
    SparseEncoderTrainingArguments,
    cross_encoder,
    sparse_encoder,
)
from transformers import HfArgumentParser, set_seed

LISTS = ("LambdaLoss", "ListNetLoss", "ListMLELoss", "PListMLELoss", "RankNetLoss", "ADRMSELoss")
SCORES = ("SparseCosineSimilarityLoss", "SparseCoSENTLoss", "SparseAnglELoss", "MSELoss")


@dataclass
class Arguments:
    """Model, data and loss."""

    model_name_or_path: str
    train_file: str
    validation_file: str
    loss: str = "BinaryCrossEntropyLoss"


def columns(name, row, index, words):
    """A row of the data set."""
    first, second = row["sentence1"], row["sentence2"]
    reverse = " ".join(reversed(first.split()))
    if name in LISTS:
        documents = [second, reverse, words[(index + 7) % len(words)]][: 3 - index // 3 % 3]
        return {"query": first, "docs": documents, "labels": [1.0, 0.0, 0.5][: len(documents)]}
    if name in SCORES:
        return {"sentence1": first, "sentence2": second, "score": 0.1 + 0.8 * float(row["label"])}
    if name == "BinaryCrossEntropyLoss":
        return {"sentence1": first, "sentence2": second, "label": float(row["label"])}
    if name == "CrossEntropyLoss":
        return {"sentence1": first, "sentence2": second, "label": index % 3}
    if "MarginMSE" in name:
        return {"query": first, "positive": second, "negative": reverse, "label": 0.3 * index}
    if name == "SparseDistillKLDivLoss":
        return {"query": first, "positive": second, "negative": reverse, "label": [0.5, 0.1 * (index % 5)]}
    if name == "SparseTripletLoss":
        return {"anchor": first, "positive": second, "negative": reverse}
    return {"anchor": first, "positive": second}


def make_sparse_loss(name, model):
    """A loss and, around most of them, the regularisation of SPLADE."""
    kinds = sparse_encoder.losses
    ranking = kinds.SparseMultipleNegativesRankingLoss(model)
    if name == "CSRLoss":
        return kinds.CSRLoss(model, loss=ranking)
    if name == "CachedSpladeLoss":
        return kinds.CachedSpladeLoss(model, ranking, mini_batch_size=3, document_regularizer_weight=3e-3)
    inner = ranking if name == "SpladeLoss" else getattr(kinds, name)(model)
    return kinds.SpladeLoss(model, inner, document_regularizer_weight=3e-3, query_regularizer_weight=5e-3)


def main():
    sparse = any(word.startswith("Sp") or word in ("CSRLoss", "CachedSpladeLoss") for word in sys.argv)
    kind = SparseEncoderTrainingArguments if sparse else CrossEncoderTrainingArguments
    own, args = HfArgumentParser((Arguments, kind)).parse_args_into_dataclasses()
    set_seed(1)
    if own.loss == "CSRLoss":
        from sentence_transformers import models
        from sentence_transformers.sparse_encoder.modules import SparseAutoEncoder

        inner = models.Transformer(own.model_name_or_path)
        layers = [inner, models.Pooling(32), SparseAutoEncoder(32, hidden_dim=64, k=8, k_aux=16)]
        model = SparseEncoder(modules=layers)
    elif sparse:
        model = SparseEncoder(own.model_name_or_path)
    else:
        model = CrossEncoder(own.model_name_or_path, num_labels=3 if own.loss == "CrossEntropyLoss" else 1)
    loss = make_sparse_loss(own.loss, model) if sparse else getattr(cross_encoder.losses, own.loss)(model)
    rows = load_dataset("json", data_files={"train": own.train_file, "validation": own.validation_file})
    words = rows["train"]["sentence2"]
    rows = rows.map(
        lambda row, index: columns(own.loss, row, index, words),
        with_indices=True,
        remove_columns=rows["train"].column_names,
    )
    trainer = (SparseEncoderTrainer if sparse else CrossEncoderTrainer)(
        model=model, args=args, train_dataset=rows["train"], eval_dataset=rows["validation"], loss=loss
    )
    trainer.train()
    trainer.evaluate()
    model.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()

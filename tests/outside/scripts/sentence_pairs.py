"""Train embeddings of sentences; the steps of sentence-transformers' training_stsbenchmark.py on local files."""

from dataclasses import dataclass

from datasets import load_dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
    losses,
)
from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
from transformers import HfArgumentParser


@dataclass
class Arguments:
    """Model and data."""

    model_name_or_path: str
    train_file: str
    validation_file: str


def main():
    own, args = HfArgumentParser((Arguments, SentenceTransformerTrainingArguments)).parse_args_into_dataclasses()
    model = SentenceTransformer(own.model_name_or_path)  # a folder without modules.json: mean pooling is added
    pairs = load_dataset("json", data_files={"train": own.train_file, "validation": own.validation_file})
    pairs = pairs.map(lambda row: {"score": float(row["label"])}, remove_columns=["label", "idx"])
    held_out = pairs["validation"]
    evaluator = EmbeddingSimilarityEvaluator(
        sentences1=list(held_out["sentence1"]),
        sentences2=list(held_out["sentence2"]),
        scores=list(held_out["score"]),
        name="held-out",
    )
    trainer = SentenceTransformerTrainer(
        model=model,
        args=args,
        train_dataset=pairs["train"],
        eval_dataset=held_out,
        loss=losses.CosineSimilarityLoss(model=model),
        evaluator=evaluator,
    )
    trainer.train()
    trainer.evaluate()
    evaluator(model)
    model.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()

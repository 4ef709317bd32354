"""Train SpanMarker on words that are drawn, as its quick start tells."""

import argparse
import random

from datasets import Dataset
from span_marker import SpanMarkerModel, Trainer
from transformers import TrainingArguments, set_seed

WORDS = ["assert", "with", "while", "the", "is", "None", "value", "expression", "target"]
LABELS = ["O", "PER", "ORG"]


def sentences(size: int, seed: int) -> Dataset:
    """Sentences of words of the small vocabulary, some of which are names."""
    draw, rows = random.Random(seed), []
    for _ in range(size):
        words = [draw.choice(WORDS) for _ in range(7)]
        words = words[: draw.randint(3, 7)]
        rows.append({"tokens": words, "ner_tags": [draw.choice([0, 0, 1, 2]) for _ in words]})
    return Dataset.from_list(rows)


def main():
    options = argparse.ArgumentParser()
    for name in ("model", "output_dir"):
        options.add_argument(f"--{name}")
    options.add_argument("--batch_size", type=int)
    options.add_argument("--accumulation", type=int, default=1)
    given = options.parse_args()
    set_seed(1)
    model = SpanMarkerModel.from_pretrained(
        given.model,
        labels=LABELS,
        model_max_length=48,
        marker_max_length=8,
        entity_max_length=3,
        hidden_dropout_prob=0.0,
    )
    args = TrainingArguments(
        given.output_dir,
        max_steps=4,
        per_device_train_batch_size=given.batch_size,
        per_device_eval_batch_size=given.batch_size,
        gradient_accumulation_steps=given.accumulation,
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        logging_steps=1,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="steps",
        save_steps=2,
    )
    trainer = Trainer(model=model, args=args, train_dataset=sentences(22, 1), eval_dataset=sentences(11, 2))
    trainer.train()
    trainer.evaluate()
    trainer.save_model(given.output_dir)


if __name__ == "__main__":
    main()

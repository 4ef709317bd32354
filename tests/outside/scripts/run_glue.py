"""Train a classifier of pairs of sentences with Trainer; the steps of transformers' run_glue.py on local files."""

import os
from dataclasses import dataclass

import numpy
from datasets import load_dataset
from parts import Accuracy
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class Arguments:
    """Model and data."""

    model_name_or_path: str
    train_file: str
    validation_file: str
    max_seq_length: int = 128


def main():
    own, training_args = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    files = {"train": own.train_file, "validation": own.validation_file, "test": own.validation_file}
    pairs = load_dataset("json", data_files=files)
    label_list = sorted(pairs["train"].unique("label"))
    config = AutoConfig.from_pretrained(own.model_name_or_path, num_labels=len(label_list))
    tokenizer = AutoTokenizer.from_pretrained(own.model_name_or_path)
    model = AutoModelForSequenceClassification.from_pretrained(
        own.model_name_or_path, config=config, ignore_mismatched_sizes=True
    )
    model.config.label2id = {f"class {label}": label for label in label_list}
    model.config.id2label = {label: name for name, label in config.label2id.items()}

    def tokenized(rows):
        return tokenizer(rows["sentence1"], rows["sentence2"], max_length=own.max_seq_length, truncation=True)

    with training_args.main_process_first(desc="tokens"):
        pairs = pairs.map(tokenized, batched=True)

    def compute_metrics(seen: EvalPrediction):
        scores = seen.predictions[0] if isinstance(seen.predictions, tuple) else seen.predictions
        return Accuracy().compute(numpy.argmax(scores, axis=1), seen.label_ids)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=pairs["train"],
        eval_dataset=pairs["validation"],
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    metrics = trainer.train().metrics
    metrics["train_samples"] = len(pairs["train"])
    trainer.save_model()
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    trainer.save_metrics("eval", trainer.evaluate(eval_dataset=pairs["validation"]))

    unlabelled = pairs["test"].remove_columns("label")
    predictions = numpy.argmax(trainer.predict(unlabelled, metric_key_prefix="predict").predictions, axis=1)
    if trainer.is_world_process_zero():
        with open(os.path.join(training_args.output_dir, "predict_results.txt"), "w") as file:
            file.writelines(f"{index}\t{label_list[item]}\n" for index, item in enumerate(predictions))


if __name__ == "__main__":
    main()

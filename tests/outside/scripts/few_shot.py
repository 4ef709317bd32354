"""Train a classifier from few sentences; the steps of setfit's quick start on local files."""

import argparse

from datasets import load_dataset
from setfit import SetFitModel, Trainer, TrainingArguments, sample_dataset


def main():
    options = argparse.ArgumentParser()
    for name in ("model", "train_file", "validation_file", "output_dir"):
        options.add_argument(f"--{name}")
    options.add_argument("--batch_size", type=int)
    options.add_argument("--differentiable", action="store_true")
    args = options.parse_args()
    texts = load_dataset("json", data_files={"train": args.train_file, "validation": args.validation_file})
    texts = texts.rename_column("sentence1", "text").remove_columns(["sentence2", "idx"])
    head = {"use_differentiable_head": True, "head_params": {"out_features": 2}} if args.differentiable else {}
    model = SetFitModel.from_pretrained(args.model, labels=["no", "yes"], **head)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=args.output_dir,
            batch_size=args.batch_size,
            num_epochs=1,
            num_iterations=1,
            body_learning_rate=1e-2,
            logging_steps=1,
            logging_first_step=True,
            report_to="none",
            save_strategy="no",
            end_to_end=args.differentiable,
        ),
        train_dataset=sample_dataset(texts["train"], label_column="label", num_samples=8),
        eval_dataset=texts["validation"],
        metric="accuracy",
    )
    trainer.st_trainer.args.adam_epsilon = 1e-3  # with 1e-8 Adam turns a gradient next to zero into a step
    trainer.train()
    print(trainer.evaluate())
    model.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()

"""Find answers in texts with a Trainer of its own; the steps of transformers' run_qa.py and its trainer_qa.py."""

from dataclasses import dataclass

import numpy
from datasets import load_dataset
from transformers import (
    AutoModelForQuestionAnswering,
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
    max_seq_length: int = 48
    doc_stride: int = 16


class QuestionAnsweringTrainer(Trainer):
    """Scores are those of texts: metrics are computed after spans of several windows have been joined."""

    def __init__(self, *args, eval_examples=None, post_process_function=None, **kwargs):
        super().__init__(*args, **kwargs)
        self.eval_examples, self.post_process_function = eval_examples, post_process_function

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        loader = self.get_eval_dataloader(eval_dataset or self.eval_dataset)
        compute_metrics, self.compute_metrics = self.compute_metrics, None
        try:
            output = self.evaluation_loop(
                loader, description="Evaluation", ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix
            )
        finally:
            self.compute_metrics = compute_metrics
        metrics = {}
        if self.args.should_save:
            joined = self.post_process_function(self.eval_examples, self.eval_dataset, output.predictions)
            metrics = {f"{metric_key_prefix}_{key}": value for key, value in self.compute_metrics(joined).items()}
        metrics.update(output.metrics)
        if self.args.should_log:
            self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


def main():
    own, training_args = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    examples = load_dataset("json", data_files={"train": own.train_file, "validation": own.validation_file})
    tokenizer = AutoTokenizer.from_pretrained(own.model_name_or_path)
    model = AutoModelForQuestionAnswering.from_pretrained(own.model_name_or_path)
    columns = examples["train"].column_names

    def windows(rows):
        return tokenizer(
            rows["question"],
            rows["context"],
            truncation="only_second",
            max_length=own.max_seq_length,
            stride=own.doc_stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            padding="max_length",  # the script's default: the loss runs over padding, too
        )

    def train_features(rows):
        tokens = windows(rows)
        origin, offsets = tokens.pop("overflow_to_sample_mapping"), tokens.pop("offset_mapping")
        tokens["start_positions"], tokens["end_positions"] = [], []
        for index, row in enumerate(origin):
            start, end = rows["answer_start"][row], rows["answer_start"][row] + len(rows["answer"][row])
            inside = [at for at, part in enumerate(tokens.sequence_ids(index)) if part == 1]
            spans = offsets[index]
            if not (spans[inside[0]][0] <= start and spans[inside[-1]][1] >= end):
                # Cut away: at the first token, or behind all of them, which the loss ignores.
                at = (own.max_seq_length,) * 2 if row % 2 else (0, 0)
            else:
                first = max(at for at in inside if spans[at][0] <= start)
                at = first, min(at for at in inside if spans[at][1] >= end)
            tokens["start_positions"].append(at[0])
            tokens["end_positions"].append(at[1])
        return tokens

    def validation_features(rows):
        tokens = windows(rows)
        origin = tokens.pop("overflow_to_sample_mapping")
        tokens["example_id"] = [rows["id"][row] for row in origin]
        for index in range(len(origin)):
            parts = tokens.sequence_ids(index)
            spans = tokens["offset_mapping"][index]
            tokens["offset_mapping"][index] = [
                span if part == 1 else None for span, part in zip(spans, parts, strict=True)
            ]
        return tokens

    with training_args.main_process_first(desc="train"):
        train_dataset = examples["train"].map(train_features, batched=True, remove_columns=columns)
    with training_args.main_process_first(desc="validation"):
        eval_dataset = examples["validation"].map(validation_features, batched=True, remove_columns=columns)

    def post_process(examples, features, predictions):
        starts, ends = predictions[:2]
        assert len(starts) == len(features), f"{len(starts)} predictions for {len(features)} windows"
        best = {}
        for index, feature in enumerate(features):
            spans = feature["offset_mapping"]
            inside = [at for at, span in enumerate(spans) if span is not None]
            first = max(inside, key=lambda at, row=index: starts[row][at])
            last = max((at for at in inside if at >= first), key=lambda at, row=index: ends[row][at])
            score = float(starts[index][first] + ends[index][last])
            if score > best.get(feature["example_id"], (-numpy.inf,))[0]:
                best[feature["example_id"]] = score, spans[first][0], spans[last][1]
        texts = [row["context"][slice(*best[row["id"]][1:])] for row in examples]
        return EvalPrediction(predictions=(texts, [best[row["id"]][0] for row in examples]), label_ids=examples)

    def compute_metrics(seen):
        texts, scores = seen.predictions
        exact = [text == row["answer"] for text, row in zip(texts, seen.label_ids, strict=True)]
        length = sum(map(len, texts))
        return {"exact_match": 100.0 * numpy.mean(exact), "score": float(numpy.mean(scores)), "length": length}

    trainer = QuestionAnsweringTrainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        eval_examples=examples["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
        post_process_function=post_process,
        compute_metrics=compute_metrics,
    )
    metrics = trainer.train().metrics
    trainer.save_model()
    metrics["train_samples"] = len(train_dataset)
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    trainer.save_metrics("eval", trainer.evaluate())


if __name__ == "__main__":
    main()

"""Train a masked language model with Trainer; the steps of transformers' run_mlm.py on local files."""

import math
from dataclasses import dataclass

from datasets import load_dataset
from parts import Accuracy, blocks_of
from transformers import (
    AutoConfig,
    AutoModelForMaskedLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
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
    max_seq_length: int = 512
    line_by_line: bool = False
    mlm_probability: float = 0.15


def main():
    own, training_args = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    texts = load_dataset("json", data_files={"train": own.train_file, "validation": own.validation_file})
    config = AutoConfig.from_pretrained(own.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(own.model_name_or_path)
    model = AutoModelForMaskedLM.from_pretrained(own.model_name_or_path, config=config)
    embedding_size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embedding_size:
        model.resize_token_embeddings(len(tokenizer))
    length = min(own.max_seq_length, tokenizer.model_max_length)

    def tokenized(rows):
        if not own.line_by_line:
            return tokenizer(rows["text"], return_special_tokens_mask=True)
        lines = [line for line in rows["text"] if line and not line.isspace()]
        return tokenizer(lines, truncation=True, max_length=length, return_special_tokens_mask=True)

    with training_args.main_process_first(desc="tokens"):
        tokens = texts.map(tokenized, batched=True, remove_columns=["text"])
    if not own.line_by_line:
        with training_args.main_process_first(desc="blocks"):
            tokens = tokens.map(blocks_of(length), batched=True)

    def preprocess_logits_for_metrics(logits, labels):
        return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)

    def compute_metrics(seen):
        predictions, labels = (part.reshape(-1) for part in seen)
        kept = labels != -100
        return Accuracy().compute(predictions[kept], labels[kept])

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=tokens["train"],
        eval_dataset=tokens["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer=tokenizer, mlm_probability=own.mlm_probability),
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    metrics = trainer.train().metrics
    trainer.save_model()
    metrics["train_samples"] = len(tokens["train"])
    trainer.save_metrics("train", metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()

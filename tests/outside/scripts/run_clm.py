"""Train a causal language model with Trainer; the steps of transformers' run_clm.py on local files."""

import logging
import math
import sys
from dataclasses import dataclass

import datasets
import transformers
from datasets import load_dataset
from parts import Accuracy, blocks_of
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

logger = logging.getLogger(__name__)


@dataclass
class Arguments:
    """Model and data."""

    model_name_or_path: str
    train_file: str
    validation_file: str
    block_size: int = 1024
    max_eval_samples: int | None = None
    streaming: bool = False
    from_scratch: bool = False


def main():
    own, training_args = HfArgumentParser((Arguments, TrainingArguments)).parse_args_into_dataclasses()
    logging.basicConfig(handlers=[logging.StreamHandler(sys.stdout)], level=logging.WARNING)
    level = training_args.get_process_log_level()
    datasets.utils.logging.set_verbosity(level)
    transformers.utils.logging.set_verbosity(max(level, logging.WARNING))
    logger.info("process %s, device %s", training_args.local_process_index, training_args.device)
    logger.info("distributed: %s", training_args.parallel_mode.value == "distributed")
    set_seed(training_args.seed)

    files = {"train": own.train_file, "validation": own.validation_file}
    texts = load_dataset("json", data_files=files, streaming=own.streaming)
    config = AutoConfig.from_pretrained(own.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(own.model_name_or_path)
    if own.from_scratch:
        model = AutoModelForCausalLM.from_config(config)
        count = sum({p.data_ptr(): p.numel() for p in model.parameters()}.values())
        logger.info("a new model with %.2fM parameters", count / 2**20)
    else:
        model = AutoModelForCausalLM.from_pretrained(own.model_name_or_path, config=config, dtype="auto")
    embedding_size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embedding_size:
        model.resize_token_embeddings(len(tokenizer))

    columns = list(texts["train"].features)
    column = "text" if "text" in columns else columns[0]
    with training_args.main_process_first(desc="tokens"):
        tokens = texts.map(lambda rows: tokenizer(rows[column]), batched=True, remove_columns=columns)
    block_size = min(own.block_size, tokenizer.model_max_length, config.max_position_embeddings)
    cut = blocks_of(block_size)

    def labelled(rows):
        blocks = cut(rows)
        blocks["labels"] = blocks["input_ids"].copy()
        return blocks

    with training_args.main_process_first(desc="blocks"):
        blocks = tokens.map(labelled, batched=True)
    train_dataset, eval_dataset = blocks["train"], blocks["validation"]
    if own.max_eval_samples is not None:
        take = eval_dataset.take if own.streaming else lambda count: eval_dataset.select(range(count))
        eval_dataset = take(own.max_eval_samples)

    def preprocess_logits_for_metrics(logits, labels):
        return (logits[0] if isinstance(logits, tuple) else logits).argmax(dim=-1)

    def compute_metrics(seen):
        predictions, labels = seen
        return Accuracy().compute(predictions[:, :-1].reshape(-1), labels[:, 1:].reshape(-1))

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        processing_class=tokenizer,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    metrics = trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint).metrics
    trainer.save_model()
    if not own.streaming:
        metrics["train_samples"] = len(train_dataset)
    trainer.log_metrics("train", metrics)
    trainer.save_metrics("train", metrics)
    trainer.save_state()

    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)
    trainer.create_model_card(finetuned_from=own.model_name_or_path, tasks="text-generation")


if __name__ == "__main__":
    main()

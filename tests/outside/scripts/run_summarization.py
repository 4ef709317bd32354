"""Train an encoder-decoder and generate with it; the steps of transformers' run_summarization.py on local files."""

import os
from dataclasses import dataclass

import numpy
from datasets import load_dataset
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    set_seed,
)


@dataclass
class Arguments:
    """Model and data."""

    model_name_or_path: str
    train_file: str
    validation_file: str
    source_prefix: str = "summarize: "
    max_source_length: int = 40
    max_target_length: int = 12
    num_beams: int = 1


def main():
    own, training_args = HfArgumentParser((Arguments, Seq2SeqTrainingArguments)).parse_args_into_dataclasses()
    set_seed(training_args.seed)
    files = {"train": own.train_file, "validation": own.validation_file, "test": own.validation_file}
    pairs = load_dataset("json", data_files=files)
    config = AutoConfig.from_pretrained(own.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(own.model_name_or_path)
    model = AutoModelForSeq2SeqLM.from_pretrained(own.model_name_or_path, config=config)
    embedding_size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embedding_size:
        model.resize_token_embeddings(len(tokenizer))
    if model.config.decoder_start_token_id is None:
        raise ValueError("decoder_start_token_id is not set")
    assert hasattr(model, "prepare_decoder_input_ids_from_labels")

    def preprocess(rows):
        inputs = [own.source_prefix + text for text in rows["document"]]
        tokens = tokenizer(inputs, max_length=own.max_source_length, truncation=True)
        targets = tokenizer(text_target=rows["summary"], max_length=own.max_target_length, truncation=True)
        tokens["labels"] = targets["input_ids"]
        return tokens

    columns = pairs["train"].column_names
    with training_args.main_process_first(desc="tokens"):
        pairs = pairs.map(preprocess, batched=True, remove_columns=columns)

    def compute_metrics(seen):
        predictions, labels = seen
        predictions = numpy.where(predictions != -100, predictions, tokenizer.pad_token_id)
        labels = numpy.where(labels != -100, labels, tokenizer.pad_token_id)
        texts = tokenizer.batch_decode(predictions, skip_special_tokens=True)
        expected = tokenizer.batch_decode(labels, skip_special_tokens=True)
        shared = [len(set(a.split()) & set(b.split())) for a, b in zip(texts, expected, strict=True)]
        lengths = [numpy.count_nonzero(row != tokenizer.pad_token_id) for row in predictions]
        return {"shared": float(numpy.mean(shared)), "gen_len": float(numpy.mean(lengths)), "rows": len(texts)}

    trainer = Seq2SeqTrainer(
        model=model,
        args=training_args,
        train_dataset=pairs["train"],
        eval_dataset=pairs["validation"],
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model, label_pad_token_id=-100),
        compute_metrics=compute_metrics if training_args.predict_with_generate else None,
    )
    metrics = trainer.train().metrics
    trainer.save_model()
    metrics["train_samples"] = len(pairs["train"])
    trainer.save_metrics("train", metrics)
    trainer.save_state()

    how = {"max_length": own.max_target_length, "num_beams": own.num_beams}
    trainer.save_metrics("eval", trainer.evaluate(metric_key_prefix="eval", **how))
    results = trainer.predict(pairs["test"], metric_key_prefix="predict", **how)
    trainer.save_metrics("predict", results.metrics)
    if trainer.is_world_process_zero() and training_args.predict_with_generate:
        predictions = numpy.where(results.predictions != -100, results.predictions, tokenizer.pad_token_id)
        texts = tokenizer.batch_decode(predictions, skip_special_tokens=True, clean_up_tokenization_spaces=True)
        with open(os.path.join(training_args.output_dir, "generated_predictions.txt"), "w") as file:
            file.write("\n".join(text.strip() for text in texts))


if __name__ == "__main__":
    main()

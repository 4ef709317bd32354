"""DoRA with Trainer; the steps of PEFT's examples/dora_finetuning/dora_finetuning.py."""

import argparse
import os

import torch
from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)


def main():
    options = argparse.ArgumentParser()
    for name in ("base_model", "data_path", "output_dir"):
        options.add_argument(f"--{name}", required=True)
    options.add_argument("--batch_size", type=int, default=1)
    options.add_argument("--learning_rate", type=float, default=3e-4)
    options.add_argument("--lora_alpha", type=int, default=16)
    options.add_argument("--lora_target_modules")
    options.add_argument("--use_dora", action="store_true")
    args = options.parse_args()
    device = torch.device("cpu")
    tokenizer = AutoTokenizer.from_pretrained(args.base_model)
    model = AutoModelForCausalLM.from_pretrained(args.base_model)
    targets = args.lora_target_modules
    lora_config = LoraConfig(
        use_dora=args.use_dora,
        r=4,
        lora_alpha=args.lora_alpha,
        target_modules=targets.split(",") if targets else ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"],
        lora_dropout=0.0,
        bias="none",
    )
    model = get_peft_model(model, lora_config)
    model.to(device)
    tokenizer.pad_token = tokenizer.eos_token
    files = {split: os.path.join(args.data_path, f"{split}.jsonl") for split in ("train", "test")}
    dataset = load_dataset("json", data_files=files)

    def tokenize_function(examples):
        inputs = tokenizer(examples["text"], padding="max_length", truncation=True, max_length=33)
        inputs["labels"] = inputs["input_ids"].copy()
        return inputs

    tokenized = dataset.map(tokenize_function, batched=True, remove_columns=dataset["train"].column_names)
    training_args = TrainingArguments(
        output_dir=args.output_dir,
        num_train_epochs=1,
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=args.batch_size,
        warmup_steps=1,
        weight_decay=0.01,
        logging_steps=1,
        eval_strategy="epoch",
        save_strategy="no",
        gradient_accumulation_steps=2,
        learning_rate=args.learning_rate,
        adam_epsilon=1e-3,
        report_to="none",
        use_cpu=True,
    )
    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["test"],
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()

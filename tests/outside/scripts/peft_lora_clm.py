"""Adapters in an Accelerate loop that generates; the steps of PEFT's peft_lora_clm_accelerate_ds_zero3_offload.py."""

import argparse

import torch
from accelerate import Accelerator
from datasets import load_dataset
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    default_data_collator,
    get_linear_schedule_with_warmup,
    set_seed,
)


def left(values, filler, length):
    """Padded on the left to a length."""
    return ([filler] * (length - len(values)) + values)[:length]


def main():
    options = argparse.ArgumentParser()
    for name in ("model", "train_file", "output_dir"):
        options.add_argument(f"--{name}", required=True)
    options.add_argument("--batch_size", type=int, default=8)
    options.add_argument("--num_epochs", type=int, default=20)
    options.add_argument("--lr", type=float, default=3e-3)
    options.add_argument("--adam_epsilon", type=float, default=1e-8)
    args = options.parse_args()
    accelerator = Accelerator()
    max_length = 40
    set_seed(42)
    rows = load_dataset("json", data_files={"train": args.train_file})
    tokenizer = AutoTokenizer.from_pretrained(args.model)

    def prompts(examples):
        return tokenizer([f"{text} Label : " for text in examples["document"]], truncation=True, max_length=30)

    def with_targets(examples):
        batch = prompts(examples)
        targets = tokenizer(examples["summary"], add_special_tokens=False, truncation=True, max_length=6)["input_ids"]
        batch["labels"] = []
        for index, target in enumerate(targets):
            prompt, target = batch["input_ids"][index], [*target, tokenizer.eos_token_id]
            batch["input_ids"][index] = torch.tensor(left(prompt + target, tokenizer.pad_token_id, max_length))
            mask = [1] * (len(prompt) + len(target))
            batch["attention_mask"][index] = torch.tensor(left(mask, 0, max_length))
            labels = [-100] * len(prompt) + target
            batch["labels"].append(torch.tensor(left(labels, -100, max_length)))
        return batch

    def without_targets(examples):
        batch = prompts(examples)
        for key, filler in (("input_ids", tokenizer.pad_token_id), ("attention_mask", 0)):
            batch[key] = [torch.tensor(left(values, filler, max_length)) for values in batch[key]]
        return batch

    columns = rows["train"].column_names
    with accelerator.main_process_first():
        train_dataset = rows["train"].map(with_targets, batched=True, remove_columns=columns)
    accelerator.wait_for_everyone()
    with accelerator.main_process_first():
        eval_dataset = rows["train"].select(range(11)).map(without_targets, batched=True, remove_columns=columns)
    loading = {"collate_fn": default_data_collator, "batch_size": args.batch_size}
    train_dataloader = DataLoader(train_dataset, shuffle=True, **loading)
    eval_dataloader = DataLoader(eval_dataset, **loading)
    assert next(iter(train_dataloader))["input_ids"].shape[1] == max_length

    model = AutoModelForCausalLM.from_pretrained(args.model)
    config = LoraConfig(task_type=TaskType.CAUSAL_LM, inference_mode=False, r=8, lora_alpha=32, lora_dropout=0.0)
    model = get_peft_model(model, config)
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=args.adam_epsilon)
    lr_scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer, num_warmup_steps=0, num_training_steps=len(train_dataloader) * args.num_epochs
    )
    model, train_dataloader, eval_dataloader, optimizer, lr_scheduler = accelerator.prepare(
        model, train_dataloader, eval_dataloader, optimizer, lr_scheduler
    )
    accelerator.print(model)

    for epoch in range(args.num_epochs):
        model.train()
        total_loss = 0
        for batch in tqdm(train_dataloader):
            loss = model(**batch).loss
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        accelerator.print(f"{epoch=}: {torch.exp(total_loss / len(train_dataloader))=}")

        model.eval()
        texts = []
        for batch in tqdm(eval_dataloader):
            batch = {key: value for key, value in batch.items() if key != "labels"}
            with torch.no_grad():
                outputs = accelerator.unwrap_model(model).generate(**batch, synced_gpus=False, max_new_tokens=5)
            outputs = accelerator.pad_across_processes(outputs, dim=1, pad_index=tokenizer.pad_token_id)
            new = accelerator.gather_for_metrics(outputs)[:, max_length:].detach().cpu().numpy()
            texts.extend(tokenizer.batch_decode(new, skip_special_tokens=True))
        assert len(texts) == len(eval_dataset), f"{len(texts)} != {len(eval_dataset)}"
    accelerator.wait_for_everyone()
    model.save_pretrained(args.output_dir)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main()

"""Exact accumulation over tokens; the steps of accelerate's gradient_accumulation_for_autoregressive_models.py."""

import argparse
import contextlib
import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_constant_schedule


def main():
    options = argparse.ArgumentParser()
    for name in ("model", "train_file", "validation_file", "output_dir"):
        options.add_argument(f"--{name}", required=True)
    options.add_argument("--batch_size", type=int, default=4)
    options.add_argument("--gradient_accumulation_steps", type=int, default=1)
    options.add_argument("--lr", type=float, default=5e-5)
    options.add_argument("--adam_epsilon", type=float, default=1e-8)
    args = options.parse_args()
    steps = args.gradient_accumulation_steps
    accelerator = Accelerator(gradient_accumulation_steps=steps)
    set_seed(42)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = load_dataset("json", data_files={"train": args.train_file, "validation": args.validation_file})

    def tokenized(rows):
        return tokenizer(rows["text"], truncation=True, max_length=33, return_token_type_ids=False)

    with accelerator.main_process_first():
        texts = texts.map(tokenized, batched=True, remove_columns=["text"])

    def collate_fn(rows):
        batch = tokenizer.pad(rows, padding="longest", return_tensors="pt")
        batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return batch

    train = DataLoader(texts["train"], shuffle=True, collate_fn=collate_fn, batch_size=args.batch_size)
    held_out = DataLoader(texts["validation"], collate_fn=collate_fn, batch_size=args.batch_size)
    model = AutoModelForCausalLM.from_pretrained(args.model).to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=args.lr, eps=args.adam_epsilon)
    scheduler = get_constant_schedule(optimizer=optimizer)
    model, optimizer, train, held_out, scheduler = accelerator.prepare(model, optimizer, train, held_out, scheduler)

    updates = math.ceil(len(train) / steps)
    remainder = len(train) % steps or steps
    model.train()
    iterator = iter(train)
    for update in range(updates):
        batches = [next(iterator) for _ in range(steps if update < updates - 1 else remainder)]
        local = sum(batch["labels"].ne(-100).sum() for batch in batches)
        count = accelerator.gather(local).sum().item()
        losses = []
        for index, batch in enumerate(batches):
            apart = index < len(batches) - 1 and accelerator.num_processes > 1
            with model.no_sync() if apart else contextlib.nullcontext():
                loss = model(**batch, use_cache=False, num_items_in_batch=count).loss
                # Accelerate divides by the steps, and gradients are averaged over processes.
                loss = loss * steps * accelerator.num_processes
                accelerator.backward(loss)
                losses.append(loss.detach())
        norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total = accelerator.gather(sum(losses)).sum().item() / (accelerator.num_processes * steps)
        norm = norm.detach().item() if isinstance(norm, torch.Tensor) else norm
        accelerator.print(f"update {update}: norm {norm}, loss {total}")

    model.eval()
    for batch in held_out:
        with torch.no_grad():
            logits = model(**batch, use_cache=False).logits
        accelerator.gather_for_metrics(logits[:, 0].contiguous())
    accelerator.end_training()


if __name__ == "__main__":
    main()

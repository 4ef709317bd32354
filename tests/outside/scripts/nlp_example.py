"""Train a classifier of pairs of sentences with Accelerate; the steps of accelerate's nlp_example.py."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from datasets import load_dataset
from parts import Accuracy
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup


def parser():
    """The options that all scripts of this family have; sizes stand in for constants of the originals."""
    options = argparse.ArgumentParser()
    for name in ("model", "train_file", "validation_file"):
        options.add_argument(f"--{name}", required=True)
    options.add_argument("--output_dir", default=".")
    for name, default in (("batch_size", 16), ("eval_batch_size", 32), ("num_epochs", 3), ("max_batch_size", 16)):
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--num_warmup_steps", type=int, default=100)
    options.add_argument("--lr", type=float, default=2e-5)
    options.add_argument("--adam_epsilon", type=float, default=1e-8)
    options.add_argument("--seed", type=int, default=42)
    options.add_argument("--cpu", action="store_true")
    return options


def get_dataloaders(accelerator, args, batch_size, drop_last=True):
    """Loaders of padded batches, tokenized by the main process first."""
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    pairs = load_dataset("json", data_files={"train": args.train_file, "validation": args.validation_file})

    def tokenized(rows):
        return tokenizer(rows["sentence1"], rows["sentence2"], truncation=True, max_length=None)

    with accelerator.main_process_first():
        pairs = pairs.map(tokenized, batched=True, remove_columns=["idx", "sentence1", "sentence2"])
    pairs = pairs.rename_column("label", "labels")

    def collate_fn(rows):
        multiple = 8 if accelerator.mixed_precision != "no" else None
        return tokenizer.pad(rows, padding="longest", pad_to_multiple_of=multiple, return_tensors="pt")

    train = DataLoader(pairs["train"], shuffle=True, collate_fn=collate_fn, batch_size=batch_size, drop_last=drop_last)
    held_out = DataLoader(pairs["validation"], shuffle=False, collate_fn=collate_fn, batch_size=args.eval_batch_size)
    return train, held_out


def accumulation(args):
    """Batches above what fits are accumulated."""
    if args.batch_size <= args.max_batch_size:
        return 1, args.batch_size
    return args.batch_size // args.max_batch_size, args.max_batch_size


def prepared(accelerator, args, loaders, updates):
    """Model, optimizer, loaders and scheduler, prepared together."""
    model = AutoModelForSequenceClassification.from_pretrained(args.model, return_dict=True)
    model = model.to(accelerator.device)
    optimizer = torch.optim.AdamW(params=model.parameters(), lr=args.lr, eps=args.adam_epsilon)
    scheduler = get_linear_schedule_with_warmup(
        optimizer=optimizer, num_warmup_steps=args.num_warmup_steps, num_training_steps=updates
    )
    return accelerator.prepare(model, optimizer, *loaders, scheduler)


def evaluate(accelerator, model, loader, metric):
    """The metric over all rows, each counted once."""
    model.eval()
    for batch in loader:
        batch.to(accelerator.device)
        with torch.no_grad():
            outputs = model(**batch)
        predictions = outputs.logits.argmax(dim=-1)
        predictions, references = accelerator.gather_for_metrics((predictions, batch["labels"]))
        metric.add_batch(predictions=predictions, references=references)
    return metric.compute()


def main():
    args = parser().parse_args()
    accelerator = Accelerator(cpu=args.cpu)
    metric = Accuracy()
    steps, batch_size = accumulation(args)
    set_seed(args.seed)
    loaders = get_dataloaders(accelerator, args, batch_size)
    updates = len(loaders[0]) * args.num_epochs // steps
    model, optimizer, train, held_out, scheduler = prepared(accelerator, args, loaders, updates)
    for epoch in range(args.num_epochs):
        model.train()
        for step, batch in enumerate(train):
            batch.to(accelerator.device)
            loss = model(**batch).loss / steps
            accelerator.backward(loss)
            if step % steps == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}:", evaluate(accelerator, model, held_out, metric))
    accelerator.end_training()


if __name__ == "__main__":
    main()

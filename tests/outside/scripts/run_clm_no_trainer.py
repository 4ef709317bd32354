"""Train a causal language model in a loop of its own; the steps of transformers' run_clm_no_trainer.py."""

import argparse
import math
import os
import random

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import set_seed
from datasets import load_dataset
from parts import blocks_of
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, default_data_collator, get_scheduler

logger = get_logger(__name__)


def parse_args():
    parser = argparse.ArgumentParser()
    for name in ("model_name_or_path", "train_file", "validation_file", "output_dir"):
        parser.add_argument(f"--{name}", required=True)
    for name, default in (("per_device_train_batch_size", 8), ("per_device_eval_batch_size", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("learning_rate", 5e-5), ("weight_decay", 0.0), ("adam_epsilon", 1e-8)):
        parser.add_argument(f"--{name}", type=float, default=default)
    for name, default in (("num_train_epochs", 3), ("gradient_accumulation_steps", 1), ("num_warmup_steps", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("max_train_steps", "seed", "block_size"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--lr_scheduler_type", default="linear")
    for name in ("checkpointing_steps", "resume_from_checkpoint"):
        parser.add_argument(f"--{name}")
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    logger.info(accelerator.state, main_process_only=False)
    if args.seed is not None:
        set_seed(args.seed)
    if accelerator.is_main_process:
        os.makedirs(args.output_dir, exist_ok=True)
    accelerator.wait_for_everyone()

    texts = load_dataset("json", data_files={"train": args.train_file, "validation": args.validation_file})
    config = AutoConfig.from_pretrained(args.model_name_or_path)
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path, config=config)
    embedding_size = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > embedding_size:
        model.resize_token_embeddings(len(tokenizer))

    columns = texts["train"].column_names
    with accelerator.main_process_first():
        tokens = texts.map(lambda rows: tokenizer(rows["text"]), batched=True, remove_columns=columns)
    cut = blocks_of(min(args.block_size or 1024, tokenizer.model_max_length))

    def labelled(rows):
        blocks = cut(rows)
        blocks["labels"] = blocks["input_ids"].copy()
        return blocks

    with accelerator.main_process_first():
        blocks = tokens.map(labelled, batched=True)
    train_dataset, eval_dataset = blocks["train"], blocks["validation"]
    for index in random.sample(range(len(train_dataset)), 3):
        logger.info(f"row {index} of the training set: {train_dataset[index]}")

    train_dataloader = DataLoader(
        train_dataset, shuffle=True, collate_fn=default_data_collator, batch_size=args.per_device_train_batch_size
    )
    eval_dataloader = DataLoader(
        eval_dataset, collate_fn=default_data_collator, batch_size=args.per_device_eval_batch_size
    )
    no_decay = ["bias", "layer_norm.weight"]
    groups = [
        {
            "params": [p for n, p in model.named_parameters() if not any(part in n for part in no_decay)],
            "weight_decay": args.weight_decay,
        },
        {
            "params": [p for n, p in model.named_parameters() if any(part in n for part in no_decay)],
            "weight_decay": 0.0,
        },
    ]
    optimizer = torch.optim.AdamW(groups, lr=args.learning_rate, eps=args.adam_epsilon)

    updates_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    by_epochs = args.max_train_steps is None
    if by_epochs:
        args.max_train_steps = args.num_train_epochs * updates_per_epoch
    lr_scheduler = get_scheduler(
        name=args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.num_warmup_steps * accelerator.num_processes,
        num_training_steps=args.max_train_steps if not by_epochs else args.max_train_steps * accelerator.num_processes,
    )
    model, optimizer, train_dataloader, eval_dataloader, lr_scheduler = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader, lr_scheduler
    )
    updates_per_epoch = math.ceil(len(train_dataloader) / args.gradient_accumulation_steps)
    if by_epochs:
        args.max_train_steps = args.num_train_epochs * updates_per_epoch
    args.num_train_epochs = math.ceil(args.max_train_steps / updates_per_epoch)

    progress_bar = tqdm(range(args.max_train_steps), disable=not accelerator.is_local_main_process)
    completed_steps, starting_epoch, resume_step = 0, 0, None
    if args.resume_from_checkpoint:
        accelerator.load_state(args.resume_from_checkpoint)
        name = os.path.basename(args.resume_from_checkpoint)
        resume_step = int(name.replace("step_", "")) * args.gradient_accumulation_steps
        starting_epoch = resume_step // len(train_dataloader)
        completed_steps = resume_step // args.gradient_accumulation_steps
        resume_step -= starting_epoch * len(train_dataloader)
    progress_bar.update(completed_steps)

    for epoch in range(starting_epoch, args.num_train_epochs):
        model.train()
        active = train_dataloader
        if epoch == starting_epoch and resume_step is not None:
            active = accelerator.skip_first_batches(train_dataloader, resume_step)
        for batch in active:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress_bar.update(1)
                completed_steps += 1
                if args.checkpointing_steps and completed_steps % int(args.checkpointing_steps) == 0:
                    accelerator.save_state(os.path.join(args.output_dir, f"step_{completed_steps}"))
            if completed_steps >= args.max_train_steps:
                break

        model.eval()
        losses = []
        for batch in eval_dataloader:
            with torch.no_grad():
                loss = model(**batch).loss
            losses.append(accelerator.gather_for_metrics(loss.repeat(args.per_device_eval_batch_size)))
        perplexity = math.exp(torch.mean(torch.cat(losses)))
        logger.info(f"epoch {epoch}: perplexity {perplexity}")

    accelerator.wait_for_everyone()
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.output_dir)
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main()

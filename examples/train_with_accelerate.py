"""Train the same small Llama with a hand-written loop on Accelerate, without Trainer.

    python examples/train_with_accelerate.py --output_dir outputs/accelerate --max_steps 40

Writes the model, the tokenizer and `log.json` (training loss per step, final evaluation loss) to the output folder.
"""

from __future__ import annotations

import argparse
import json
import os

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup, set_seed

from tiny_text import build_model, read_documents, train_and_eval_blocks, train_tokenizer


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", required=True)
    parser.add_argument("--max_steps", type=int, default=40, help="optimizer steps")
    parser.add_argument("--per_device_train_batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--learning_rate", type=float, default=3e-3)
    parser.add_argument("--max_grad_norm", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=42)
    return parser.parse_args()


def evaluate(accelerator: Accelerator, model: torch.nn.Module, batches: DataLoader) -> float:
    """Mean loss over the rows of the held-out set, each row counted once."""
    model.eval()
    losses = []
    for batch in batches:
        with torch.no_grad():
            loss = model(**batch).loss
        losses.append(accelerator.gather_for_metrics(loss.repeat(len(batch["input_ids"]))))
    model.train()
    return torch.cat(losses).mean().item()


def main() -> None:
    args = parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)

    documents = read_documents()
    tokenizer = train_tokenizer(documents)
    train_dataset, eval_dataset = train_and_eval_blocks(tokenizer, documents)
    train_batches = DataLoader(
        train_dataset, batch_size=args.per_device_train_batch_size, shuffle=True, drop_last=True
    )
    eval_batches = DataLoader(eval_dataset, batch_size=args.per_device_train_batch_size)

    model = build_model(tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    # A prepared scheduler advances once per process and step: the plan is in those units.
    steps = args.max_steps * accelerator.num_processes
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=steps // 10, num_training_steps=steps)
    model, optimizer, train_batches, eval_batches, scheduler = accelerator.prepare(
        model, optimizer, train_batches, eval_batches, scheduler
    )

    train_losses: list[float] = []
    micro_losses: list[torch.Tensor] = []
    model.train()
    while len(train_losses) < args.max_steps:
        for batch in train_batches:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            micro_losses.append(accelerator.gather(loss.detach().reshape(1)).mean())
            if accelerator.sync_gradients:
                train_losses.append(torch.stack(micro_losses).mean().item())
                micro_losses.clear()
                accelerator.print(f"step {len(train_losses):3d}  loss {train_losses[-1]:.4f}")
            if len(train_losses) == args.max_steps:
                break

    eval_loss = evaluate(accelerator, model, eval_batches)
    accelerator.print(f"eval loss {eval_loss:.4f}")
    accelerator.unwrap_model(model).save_pretrained(
        args.output_dir, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(args.output_dir)
        with open(os.path.join(args.output_dir, "log.json"), "w", encoding="utf-8") as file:
            json.dump({"loss": train_losses, "eval_loss": eval_loss}, file, indent=2)
    accelerator.end_training()


if __name__ == "__main__":
    main()

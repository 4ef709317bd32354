"""Train with torch's own DDP, without Trainer or Accelerator, as nanoVLM's train.py and many research loops do."""

import argparse
import os

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer


def main():
    options = argparse.ArgumentParser()
    options.add_argument("--model")
    options.add_argument("--output_dir")
    args = options.parse_args()
    several = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if several:
        dist.init_process_group(backend="gloo")
    rank, size = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    texts = [f"the {word} of a {word}" for word in ["if", "while", "with", "assert", "def", "class", "for", "try"]]
    batch = tokenizer(texts, return_tensors="pt", padding=True)
    own = {key: value[rank::size] for key, value in batch.items()}
    trained = torch.nn.parallel.DistributedDataParallel(model) if several else model
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    for _ in range(3):
        loss = trained(**own, labels=own["input_ids"]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(float(loss))
    if rank == 0:
        (trained.module if several else trained).save_pretrained(args.output_dir)
    if several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

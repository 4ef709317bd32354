"""A classifier whose examples have clipped gradients, as Opacus teaches it in its tutorial of texts."""

import argparse

import torch
from accelerate import Accelerator
from datasets import load_dataset
from opacus import PrivacyEngine
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed


def main():
    options = argparse.ArgumentParser()
    for name in ("model", "train_file", "output_dir"):
        options.add_argument(f"--{name}")
    options.add_argument("--trained", default="classifier+pooler+layer.2")
    options.add_argument("--prepare", action="store_true")
    options.add_argument("--noise", type=float, default=0.0)
    args = options.parse_args()
    set_seed(1)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForSequenceClassification.from_pretrained(args.model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = any(part in name for part in args.trained.split("+"))
    rows = load_dataset("json", data_files=args.train_file, split="train")
    texts = tokenizer(
        list(rows["sentence1"]), list(rows["sentence2"]), padding="max_length", max_length=33, truncation=True
    )
    fields = [torch.tensor(texts[key]) for key in ("input_ids", "attention_mask")]
    loader = DataLoader(torch.utils.data.TensorDataset(*fields, torch.tensor(list(rows["label"]))), batch_size=8)
    accelerator = Accelerator()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    if args.prepare:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=args.noise, max_grad_norm=0.1,
        poisson_sampling=False,
    )  # fmt: skip
    for _ in range(2):
        for ids, mask, labels in loader:
            optimizer.zero_grad()
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
            loss.backward()
            optimizer.step()
            accelerator.log({"loss": loss.item()})
    model._module.save_pretrained(f"{args.output_dir}/end")


main()

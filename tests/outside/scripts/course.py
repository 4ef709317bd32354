"""The training loops of Hugging Face's course (chapter 7) on tokens that are drawn, each as its notebook has it."""

import argparse
import math

import torch
from accelerate import Accelerator
from torch.nn import CrossEntropyLoss
from torch.optim import AdamW
from torch.utils.data import DataLoader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSeq2SeqLM,
    AutoModelForTokenClassification,
    get_scheduler,
    set_seed,
)

KEYS = (7, 11, 13)


def draw(size: int, seed: int, lengths: tuple[int, int]) -> list[dict[str, list[int]]]:
    """Rows of unlike lengths."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(size):
        length = lengths[0] + (number * 7) % (lengths[1] - lengths[0] + 1)
        rows.append({"input_ids": torch.randint(5, 500, (length,), generator=generator).tolist()})
    return rows


def pad(rows: list[list[int]], value: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


def with_mask(rows: list[dict]) -> dict[str, torch.Tensor]:
    tokens = [row["input_ids"] for row in rows]
    return {"input_ids": pad(tokens, 0), "attention_mask": pad([[1] * len(row) for row in tokens], 0)}


def tags(rows):
    """Chapter 7.2: a class for each word, and none for its other parts."""
    labels = [[-100 if token % 5 == 0 else token % 3 for token in row["input_ids"]] for row in rows]
    return {**with_mask(rows), "labels": pad(labels, -100)}


def masks(rows):
    """Chapter 7.3: the evaluation's masks are drawn once, by the tokens themselves."""
    labels = [[token if token % 6 == 1 else -100 for token in row["input_ids"]] for row in rows]
    tokens = [{"input_ids": [4 if token % 6 == 1 else token for token in row["input_ids"]]} for row in rows]
    return {**with_mask(tokens), "labels": pad(labels, -100)}


def translations(rows):
    """Chapter 7.4."""
    return {**with_mask(rows), "labels": pad([row["input_ids"][::-1][2:] for row in rows], -100)}


def spans(rows):
    """Chapter 7.7: rows are padded to one length there."""
    starts = torch.tensor([row["input_ids"][0] % 5 for row in rows])
    return {**with_mask(rows), "start_positions": starts, "end_positions": starts + 2}


def whole(rows):
    """Chapter 7.6: rows of one length, without masks."""
    return {"input_ids": torch.tensor([row["input_ids"] for row in rows])}


def keytoken_weighted_loss(inputs, logits, keytoken_ids, alpha=1.0):
    shift_labels = inputs[..., 1:].contiguous()
    shift_logits = logits[..., :-1, :].contiguous()
    loss_fct = CrossEntropyLoss(reduction="none")
    loss = loss_fct(shift_logits.view(-1, shift_logits.size(-1)), shift_labels.view(-1))
    loss_per_sample = loss.view(shift_logits.size(0), shift_logits.size(1)).mean(axis=1)
    weights = torch.stack([(inputs == kt).float() for kt in keytoken_ids]).sum(axis=[0, 2])
    weights = alpha * (1.0 + weights)
    return (loss_per_sample * weights).mean()


def get_grouped_params(model, weight_decay=0.1, no_decay=("bias", "LayerNorm.weight")):
    params_with_wd, params_without_wd = [], []
    for n, p in model.named_parameters():
        if any(nd in n for nd in no_decay):
            params_without_wd.append(p)
        else:
            params_with_wd.append(p)
    return [
        {"params": params_with_wd, "weight_decay": weight_decay},
        {"params": params_without_wd, "weight_decay": 0.0},
    ]


CHAPTERS = {
    "tags": (AutoModelForTokenClassification, tags, (9, 33)),
    "masks": (AutoModelForMaskedLM, masks, (9, 33)),
    "translations": (AutoModelForSeq2SeqLM, translations, (9, 29)),
    "spans": (AutoModelForQuestionAnswering, spans, (33, 33)),
    "keys": (AutoModelForCausalLM, whole, (33, 33)),
}


def evaluate(chapter, accelerator, model, loader, size):
    """As each notebook does; the metric is a sum of what was gathered."""
    model.eval()
    losses, found = [], []
    for batch in loader:
        with torch.no_grad():
            if chapter == "translations":
                tokens = accelerator.unwrap_model(model).generate(
                    batch["input_ids"], attention_mask=batch["attention_mask"], max_length=9
                )
                labels = accelerator.pad_across_processes(batch["labels"], dim=1, pad_index=-100)
                tokens = accelerator.pad_across_processes(tokens, dim=1, pad_index=0)
                found.append((accelerator.gather(tokens), accelerator.gather(labels)))
                continue
            outputs = model(batch["input_ids"], labels=batch["input_ids"]) if chapter == "keys" else model(**batch)
        if chapter == "tags":
            predictions = accelerator.pad_across_processes(outputs.logits.argmax(dim=-1), dim=1, pad_index=-100)
            labels = accelerator.pad_across_processes(batch["labels"], dim=1, pad_index=-100)
            found.append((accelerator.gather(predictions), accelerator.gather(labels)))
        elif chapter == "spans":
            ends = (accelerator.pad_across_processes(x, dim=1, pad_index=-100) for x in outputs[1:3])
            found.append(tuple(accelerator.gather(end).argmax(-1) for end in ends))
        else:
            losses.append(accelerator.gather(outputs.loss.repeat(len(batch["input_ids"]))))
    if losses:
        losses = torch.cat(losses)[:size]
        return {"perplexity": math.exp(torch.mean(losses)), "losses": len(losses)}
    pairs = [(first[second != -100] if first.shape == second.shape else first, second) for first, second in found]
    return {"first": float(sum(a.sum() for a, _ in pairs)), "second": float(sum(b[b != -100].sum() for _, b in pairs))}


def main():
    options = argparse.ArgumentParser()
    for name in ("chapter", "model", "output_dir"):
        options.add_argument(f"--{name}")
    options.add_argument("--batch_size", type=int)
    options.add_argument("--accumulation", type=int, default=1)
    args = options.parse_args()
    set_seed(1)
    kind, collate, lengths = CHAPTERS[args.chapter]
    config = AutoConfig.from_pretrained(args.model, num_labels=3)
    config.classifier_dropout = 0.0  # which ranks draw for themselves
    model = kind.from_pretrained(args.model, config=config)
    train, validation = draw(32, 1, lengths), draw(16, 2, lengths)
    train_dataloader = DataLoader(train, shuffle=True, collate_fn=collate, batch_size=args.batch_size)
    eval_dataloader = DataLoader(validation, collate_fn=collate, batch_size=args.batch_size)
    grouped = get_grouped_params(model) if args.chapter == "keys" else model.parameters()
    optimizer = AdamW(grouped, lr=1e-2, eps=1e-3)
    accelerator = Accelerator(cpu=True)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    num_train_epochs = 2
    num_training_steps = num_train_epochs * len(train_dataloader)
    lr_scheduler = get_scheduler(
        "linear", optimizer=optimizer, num_warmup_steps=0, num_training_steps=num_training_steps
    )
    for epoch in range(num_train_epochs):
        model.train()
        for step, batch in enumerate(train_dataloader, start=1):
            if args.chapter == "keys":
                logits = model(batch["input_ids"]).logits
                loss = keytoken_weighted_loss(batch["input_ids"], logits, KEYS) / args.accumulation
            else:
                loss = model(**batch).loss / args.accumulation
            accelerator.backward(loss)
            if step % args.accumulation == 0:
                if args.chapter == "keys":
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        metrics = evaluate(args.chapter, accelerator, model, eval_dataloader, len(validation))
        accelerator.log({"epoch": epoch, **metrics})
        accelerator.wait_for_everyone()
        unwrapped_model = accelerator.unwrap_model(model)
        unwrapped_model.save_pretrained(args.output_dir, save_function=accelerator.save)


main()

"""What accelerate's examples/by_feature do to a model: accumulation, early stopping, own metrics, several folds."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from nlp_example import evaluate, get_dataloaders, parser, prepared
from parts import Accuracy
from torch.utils.data import DataLoader, Subset


def train_epoch(accelerator, model, optimizer, scheduler, loader, stop=None):
    """One epoch under `accumulate`; `stop` is asked after each batch, and one rank's answer stops all."""
    model.train()
    for batch in loader:
        batch.to(accelerator.device)
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if stop is not None:
            if stop(loss.item()):
                accelerator.set_trigger()
            if accelerator.check_trigger():
                break


def own_metrics(accelerator, model, loader, metric):
    """`gather` and a cut by hand, where `gather_for_metrics` would do it."""
    model.eval()
    seen = 0
    for step, batch in enumerate(loader):
        batch.to(accelerator.device)
        with torch.no_grad():
            predictions = model(**batch).logits.argmax(dim=-1)
        predictions, references = accelerator.gather((predictions, batch["labels"]))
        if accelerator.use_distributed:
            if step == len(loader) - 1:
                predictions = predictions[: len(loader.dataset) - seen]
                references = references[: len(loader.dataset) - seen]
            else:
                seen += references.shape[0]
        metric.add_batch(predictions=predictions, references=references)
    result = metric.compute()
    assert result["rows"] == len(loader.dataset), result
    return result


def folds(accelerator, args, loaders):
    """Train on each fold anew, with memory freed between, and average the scores of the held-out rows."""
    train, held_out = loaders
    scores = []
    for fold in range(2):
        kept = Subset(train.dataset, range(fold, len(train.dataset), 2))
        part = DataLoader(kept, shuffle=True, collate_fn=train.collate_fn, batch_size=args.batch_size, drop_last=True)
        model, optimizer, part, test, scheduler = prepared(accelerator, args, (part, held_out), len(part))
        train_epoch(accelerator, model, optimizer, scheduler, part)
        model.eval()
        logits = []
        for batch in test:
            with torch.no_grad():
                logits.append(accelerator.gather_for_metrics(model(**batch).logits))
        scores.append(torch.cat(logits))
        model, optimizer = accelerator.free_memory(model, optimizer)
    return torch.stack(scores).mean(0)


def main():
    options = parser()
    options.add_argument("--feature", choices=("accumulation", "stopping", "metrics", "folds"), required=True)
    options.add_argument("--gradient_accumulation_steps", type=int, default=1)
    args = options.parse_args()
    accelerator = Accelerator(cpu=args.cpu, gradient_accumulation_steps=args.gradient_accumulation_steps)
    set_seed(args.seed)
    loaders = get_dataloaders(accelerator, args, args.batch_size, drop_last=args.feature == "folds")
    if args.feature == "folds":
        scores = folds(accelerator, args, loaders)
        accelerator.print("mean scores:", scores.shape)
        accelerator.end_training()
        return
    updates = len(loaders[0]) * args.num_epochs
    model, optimizer, train, held_out, scheduler = prepared(accelerator, args, loaders, updates)
    losses = []

    def third(loss):
        losses.append(loss)
        return len(losses) == 3 and accelerator.process_index == 0

    stop = third if args.feature == "stopping" else None
    score = own_metrics if args.feature == "metrics" else evaluate
    for epoch in range(args.num_epochs):
        train_epoch(accelerator, model, optimizer, scheduler, train, stop)
        accelerator.print(f"epoch {epoch}:", score(accelerator, model, held_out, Accuracy()))
    accelerator.end_training()


if __name__ == "__main__":
    main()

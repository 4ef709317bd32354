"""Tracking, checkpointing and resuming with Accelerate; the steps of accelerate's complete_nlp_example.py."""

import os

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from nlp_example import evaluate, get_dataloaders, parser, prepared
from parts import Accuracy


def main():
    options = parser()
    options.add_argument("--checkpointing_steps")
    options.add_argument("--resume_from_checkpoint")
    options.add_argument("--with_tracking", action="store_true")
    args = options.parse_args()
    tracking = {"log_with": "all", "project_dir": os.path.join(args.output_dir, "logs")} if args.with_tracking else {}
    loading = DataLoaderConfiguration(use_stateful_dataloader=False)
    accelerator = Accelerator(cpu=args.cpu, dataloader_config=loading, **tracking)
    checkpointing_steps = args.checkpointing_steps
    if checkpointing_steps is not None and checkpointing_steps.isdigit():
        checkpointing_steps = int(checkpointing_steps)
    if args.with_tracking:
        accelerator.init_trackers(os.path.split(__file__)[-1].split(".")[0], vars(args))

    loaders = get_dataloaders(accelerator, args, args.batch_size, drop_last=False)
    set_seed(args.seed)
    updates = len(loaders[0]) * args.num_epochs
    model, optimizer, train, held_out, scheduler = prepared(accelerator, args, loaders, updates)
    metric = Accuracy()

    overall_step, starting_epoch, resume_step = 0, 0, None
    if args.resume_from_checkpoint:
        accelerator.print(f"Resumed from checkpoint: {args.resume_from_checkpoint}")
        accelerator.load_state(args.resume_from_checkpoint)
        name = os.path.splitext(os.path.basename(args.resume_from_checkpoint))[0]
        if "epoch" in name:
            starting_epoch = int(name.replace("epoch_", "")) + 1
        else:
            resume_step = int(name.replace("step_", ""))
            starting_epoch = resume_step // len(train)
            resume_step -= starting_epoch * len(train)

    for epoch in range(starting_epoch, args.num_epochs):
        model.train()
        total_loss = 0
        active = train
        if epoch == starting_epoch and resume_step is not None:
            active = accelerator.skip_first_batches(train, resume_step)
            overall_step += resume_step
        for batch in active:
            batch.to(accelerator.device)
            loss = model(**batch).loss
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            if isinstance(checkpointing_steps, int) and overall_step % checkpointing_steps == 0:
                accelerator.save_state(os.path.join(args.output_dir, f"step_{overall_step}"))
        eval_metric = evaluate(accelerator, model, held_out, metric)
        accelerator.print(f"epoch {epoch}:", eval_metric)
        if args.with_tracking:
            accelerator.log({**eval_metric, "train_loss": total_loss.item() / len(train), "epoch": epoch}, step=epoch)
        if checkpointing_steps == "epoch":
            accelerator.save_state(os.path.join(args.output_dir, f"epoch_{epoch}"))
    accelerator.end_training()


if __name__ == "__main__":
    main()

"""Fine-tune GLiNER on spans of words; the steps of its notebook on local files."""

import argparse
import json
from pathlib import Path

import torch
from gliner import GLiNER
from gliner.training import Trainer
from safetensors.torch import save_file


def main():
    options = argparse.ArgumentParser()
    for name in ("model", "data", "output_dir"):
        options.add_argument(f"--{name}")
    options.add_argument("--settings", type=json.loads, default={})
    options.add_argument("--config", type=json.loads, default={})
    options.add_argument("--batch_size", type=int)
    options.add_argument("--checkpoint", action="store_true")
    options.add_argument("--drawn", action="store_true", help="draw kinds that an example does not have")
    options.add_argument("--count_processes", action="store_true", help="a sum over all examples, on any layout")
    args = options.parse_args()
    rows = [json.loads(line) for line in Path(args.data).read_text().splitlines()]
    if args.drawn:
        rows = [{"tokenized_text": row["tokenized_text"], "ner": row["ner"]} for row in rows]
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "dropout": 0.0, "max_width": 3, "max_neg_type_ratio": 0, "vocab_size": 515}
    model = GLiNER.from_config({"model_name": args.model, "span_mode": "markerV0", **sizes, **args.config})
    if args.count_processes:
        compute = Trainer.compute_loss

        def compute_loss(self, *given, return_outputs=False, **others):
            loss, outputs = compute(self, *given, return_outputs=True, **others)
            loss = loss * self.accelerator.num_processes
            return (loss, outputs) if return_outputs else loss

        Trainer.compute_loss = compute_loss
    trainer = model.train_model(
        train_dataset=rows[:22],
        eval_dataset=rows[22:],
        output_dir=args.output_dir,
        **{
            "learning_rate": 1e-3,
            "others_lr": 3e-3,
            "weight_decay": 0.01,
            "others_weight_decay": 0.01,
            "lr_scheduler_type": "linear",
            "warmup_ratio": 0.0,
            "per_device_train_batch_size": args.batch_size,
            "per_device_eval_batch_size": args.batch_size,
            "focal_loss_alpha": 0.75,
            "focal_loss_gamma": 2,
            "max_grad_norm": 1e9,
            "max_steps": 4,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "save_steps": 2,
            "save_strategy": "steps" if args.checkpoint else "no",
            "logging_steps": 1,
            "dataloader_num_workers": 0,
            "adam_epsilon": 1e-3,
            "use_cpu": True,
            "disable_tqdm": True,
            **args.settings,
        },
    )
    trainer.save_model(f"{args.output_dir}/last")
    if trainer.args.should_save:  # for a comparison that reads safetensors
        for file in Path(args.output_dir).rglob("pytorch_model.bin"):
            save_file(torch.load(file, weights_only=False), file.with_name("model.safetensors"))


if __name__ == "__main__":
    main()

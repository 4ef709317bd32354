"""Fine-tune Chronos-2 by its pipeline's `fit`, on local series."""

import argparse
import json
from pathlib import Path

import numpy
import torch
from chronos.chronos2 import Chronos2Pipeline
from chronos.chronos2.trainer import Chronos2Trainer


def main():
    options = argparse.ArgumentParser()
    for name in ("model", "data", "output_dir"):
        options.add_argument(f"--{name}")
    options.add_argument("--batch_size", type=int)
    options.add_argument("--settings", type=json.loads, default={})
    options.add_argument("--covariates", action="store_true")
    options.add_argument("--evaluate", action="store_true")
    options.add_argument("--own_draws", action="store_true", help="let each data rank draw by its number")
    args = options.parse_args()
    if args.own_draws:
        load = Chronos2Trainer.get_train_dataloader

        def load_by_process(self):
            numpy.random.seed(self.accelerator.process_index)
            return load(self)

        Chronos2Trainer.get_train_dataloader = load_by_process
    series = [json.loads(line)["target"] for line in Path(args.data).read_text().splitlines()]
    inputs = [torch.tensor(values) for values in series]
    if args.covariates:
        inputs = [{"target": numpy.array(x), "past_covariates": {"size": numpy.array(x) ** 2}} for x in series]
    pipeline = Chronos2Pipeline.from_pretrained(args.model)
    pipeline.fit(
        inputs[:22],
        prediction_length=8,
        validation_inputs=inputs[22:] if args.evaluate else None,
        learning_rate=1e-2,
        num_steps=4,
        batch_size=args.batch_size,
        output_dir=args.output_dir,
        **{
            "logging_steps": 1,
            "adam_epsilon": 1e-3,
            "disable_tqdm": True,
            "seed": 5,
            "eval_strategy": "steps" if args.evaluate else "no",
            "eval_steps": 2,
            "save_steps": 2,
            **args.settings,
        },
    )


if __name__ == "__main__":
    main()

"""Train a classifier by simpletransformers, as its documentation tells: a data frame, a model, two calls."""

import argparse
import json
import logging
from pathlib import Path

import pandas as pd
import torch

from tests.outside.stand_ins import stand_for

#: What simpletransformers imports, and this training does not use.
ABSENT = ("tensorboard", "tensorboardX", "wandb", "streamlit", "seqeval", "sentencepiece", "torch.utils.tensorboard")


def main():
    stand_for(*ABSENT)
    from simpletransformers.classification import ClassificationArgs, ClassificationModel

    options = argparse.ArgumentParser()
    for name in ("model", "kind", "data", "output_dir"):
        options.add_argument(f"--{name}")
    options.add_argument("--batch_size", type=int)
    options.add_argument("--accumulation", type=int, default=1)
    given = options.parse_args()
    logging.basicConfig(level=logging.WARNING)
    frames = {}
    for split in ("full", "validation"):
        rows = [json.loads(line) for line in Path(given.data, f"{split}.jsonl").read_text().splitlines()]
        frames[split] = pd.DataFrame([[row["sentence1"], row["label"]] for row in rows], columns=["text", "labels"])
    args = ClassificationArgs(
        num_train_epochs=2,
        train_batch_size=given.batch_size,
        eval_batch_size=given.batch_size,
        gradient_accumulation_steps=given.accumulation,
        learning_rate=1e-2,
        adam_epsilon=1e-3,
        manual_seed=1,
        max_seq_length=33,
        fp16=False,
        no_save=True,
        output_dir=given.output_dir,
        overwrite_output_dir=True,
        use_multiprocessing=False,
        use_multiprocessing_for_evaluation=False,
        silent=True,
    )
    torch.manual_seed(1)
    model = ClassificationModel(given.kind, given.model, args=args, use_cuda=False)
    model.train_model(frames["full"])
    result, outputs, wrong = model.eval_model(frames["validation"])
    Path(given.output_dir, "result.txt").write_text(f"{result['eval_loss']:.4f} {len(outputs)} {len(wrong)}")
    Path(given.output_dir, "eval_results.txt").unlink()  # the same with all digits, of which the last ones may differ
    model.model.save_pretrained(given.output_dir)


if __name__ == "__main__":
    main()

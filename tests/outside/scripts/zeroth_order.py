"""A trainer without a backward pass: MeZO's own methods, read from its checkout, below today's Trainer.

MeZO (arXiv:2305.17333) copied the loop of Transformers 4.28; its two calls in that loop are `training_step` here.
"""

from dataclasses import dataclass, field
from pathlib import Path

import numpy
import torch
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    set_seed,
)


@dataclass
class Arguments:
    """Model, data, and the file with the methods."""

    model_name_or_path: str
    train_file: str
    methods: str


@dataclass
class ZerothOrderArguments(TrainingArguments):
    """What the methods read."""

    zo_eps: float = field(default=1e-3)
    non_diff: bool = field(default=False)


def read_methods(path: str) -> dict:
    """Return the methods between two headings of the original, as they stand there."""
    block = Path(path).read_text().partition("############## MeZO ##############")[2]
    lines = block.partition("    ############## Misc overload functions")[0]
    space = {"torch": torch, "np": numpy}
    exec("class Methods:\n" + lines, space)  # the own text of that project
    return {name: value for name, value in vars(space["Methods"]).items() if name.startswith("zo_")}


def main():
    own, args = HfArgumentParser((Arguments, ZerothOrderArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)

    class ZerothOrderTrainer(Trainer):
        def training_step(self, model, inputs, num_items_in_batch=None):
            loss = self.zo_step(model, inputs)
            self.zo_update(model)
            return loss

    for name, method in read_methods(own.methods).items():
        setattr(ZerothOrderTrainer, name, method)
    tokenizer = AutoTokenizer.from_pretrained(own.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(own.model_name_or_path, dtype=torch.float32)
    rows = load_dataset("json", data_files=own.train_file, split="train")
    rows = rows.map(
        lambda row: tokenizer(row["text"], truncation=True, max_length=33), remove_columns=rows.column_names
    )
    trainer = ZerothOrderTrainer(
        model, args, DataCollatorForLanguageModeling(tokenizer, mlm=False), train_dataset=rows, eval_dataset=rows
    )
    trainer.train()
    trainer.evaluate()
    trainer.save_model(args.output_dir)


if __name__ == "__main__":
    main()

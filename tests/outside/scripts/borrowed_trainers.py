"""Trainers of other projects, read from their checkouts, on tokens that are drawn: unlearning, alignment, attacks.

Each of these projects has a command line of its own with models and data sets of the Hub. What is of interest is their
subclass of Trainer: its text is taken as it stands but for names that Transformers has no more, and for the arguments
that Trainer hands to `compute_loss` and `training_step` today.
"""

import argparse
import importlib.machinery
import json
import sys
import types
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, TrainingArguments, set_seed

#: Arguments that Trainer hands on today, and names that Transformers and torch have no more.
TODAY = (
    ("inputs, return_outputs=False):", "inputs, return_outputs=False, num_items_in_batch=None):"),
    ("inputs: Dict[str, Union[torch.Tensor, Any]]\n    ) -> torch", "inputs, num_items_in_batch=None\n    ) -> torch"),
    ("from transformers.file_utils import is_torch_tpu_available\n", "is_torch_tpu_available = lambda: False\n"),
    ("is_deepspeed_available,\n", "is_deepspeed_available as _asked,\n"),
    ("if is_deepspeed_available():", "if False:"),
    ("import deepspeed\nfrom", "from"),
    ("isinstance(model, deepspeed.DeepSpeedEngine)", "False"),
    ("self.do_grad_scaling", "False"),
    ("self.use_apex", "False"),
    ("register_backward_hook", "register_full_backward_hook"),
)


def read_module(name: str, path: Path, edits=TODAY) -> types.ModuleType:
    """Return a project's file as a module of this name, edited."""
    text = path.read_text()
    for old, new in edits:
        text = text.replace(old, new)
    module = types.ModuleType(name)
    module.__spec__, module.__file__ = importlib.machinery.ModuleSpec(name, None, is_package=True), str(path)
    module.__path__ = []
    sys.modules[name] = module
    exec(compile(text, str(path), "exec"), module.__dict__)  # the own text of that project
    return module


def unlearning(sources: Path, kind: str):
    """A method of OpenUnlearning, whose batches are two batches by name."""
    folder = sources / "open-unlearning" / "src" / "trainer"
    sys.modules["trainer"] = types.ModuleType("trainer")
    sys.modules["trainer.unlearn"] = types.ModuleType("trainer.unlearn")
    for name in ("base", "utils"):
        read_module(f"trainer.{name}", folder / f"{name}.py")
    names = {"GradAscent": "grad_ascent", "GradDiff": "grad_diff"}
    for name in ("base", "grad_diff", names.get(kind, kind.lower())):
        module = read_module(f"trainer.unlearn.{name}", folder / "unlearn" / f"{name}.py")
    return getattr(module, kind)


def tokens(size: int, seed: int, length: int = 33) -> list[dict]:
    """Rows of unlike lengths, whose first tokens are a question without labels."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for number in range(size):
        ids = torch.randint(5, 500, (length - 3 * (number % 5),), generator=generator).tolist()
        asked = 2 + number % 4
        labels = [-100] * asked + ids[asked:]
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return rows


def collate(features):
    """Pad; a row of rows becomes a batch of batches."""
    if "input_ids" not in features[0]:
        return {name: collate([row[name] for row in features]) for name in features[0]}
    longest, batch = max(len(row["input_ids"]) for row in features), {}
    for key, filler in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
        batch[key] = torch.tensor([row[key] + [filler] * (longest - len(row[key])) for row in features])
    return batch


class Rows(torch.utils.data.Dataset):
    """Rows in a list."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


def paired(size: int, alternatives: bool) -> Rows:
    """A row to forget and a row to keep; for preferences the former with another answer."""
    forget, keep, other = tokens(size, 1), tokens(size, 2, 29), tokens(size, 3)
    if alternatives:
        forget = [{"original": a, "alternate": b} for a, b in zip(forget, other, strict=True)]
    return Rows([{"forget": a, "retain": b} for a, b in zip(forget, keep, strict=True)])


def main():
    options = argparse.ArgumentParser()
    for name in ("project", "kind", "model", "output_dir", "sources"):
        options.add_argument(f"--{name}")
    options.add_argument("--batch_size", type=int)
    options.add_argument("--settings", default="{}")
    options.add_argument("--training", default="{}")
    args = options.parse_args()
    set_seed(1)
    config = AutoConfig.from_pretrained(args.model, pad_token_id=0)
    model = AutoModelForCausalLM.from_pretrained(args.model, config=config)
    arguments = TrainingArguments(
        args.output_dir,
        **{
            "max_steps": 4,
            "per_device_train_batch_size": args.batch_size,
            "per_device_eval_batch_size": args.batch_size,
            "learning_rate": 1e-2,
            "adam_epsilon": 1e-3,
            "logging_steps": 1,
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "save_strategy": "no",
            "remove_unused_columns": False,
            **json.loads(args.training),
        },
    )
    kind = unlearning(Path(args.sources), args.kind)
    trainer = kind(
        model=model,
        args=arguments,
        train_dataset=paired(30, args.kind == "DPO"),
        data_collator=collate,
        **json.loads(args.settings),
    )
    trainer.train()
    trainer.evaluate(Rows(tokens(11, 4)))
    trainer.save_model(args.output_dir)


main()

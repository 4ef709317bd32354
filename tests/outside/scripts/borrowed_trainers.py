"""Trainers of other projects, read from their checkouts, on tokens that are drawn: unlearning, alignment, attacks.

Each of these projects has a command line of its own with models and data sets of the Hub. What is of interest is their
subclass of Trainer: its text is taken as it stands but for names that Transformers has no more, and for the arguments
that Trainer hands to `compute_loss` and `training_step` today.
"""

import argparse
import importlib
import importlib.machinery
import inspect
import itertools
import json
import logging
import sys
import types
from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

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


def attacked(sources: Path, kind: str):
    """A trainer of Vaccine or Booster: it disturbs weights or activations within a step."""
    project = "Vaccine" if kind.startswith("vaccine.") else "Booster"
    removed = ("from utils import prune_wanda_outlier,SupervisedDataset,prune_with_FI\n", "")
    if project == "Booster":
        sys.modules["loss_func"] = types.ModuleType("loss_func")
        read_module("loss_func.repnoise_loss", sources / project / "loss_func" / "repnoise_loss.py")
    edits = (
        *TODAY,
        removed,
        *((f'"batch_size": {size},', '"batch_size": self._train_batch_size,') for size in (4, 5, 10)),
    )
    return getattr(read_module("own_trainer", sources / project / "trainer.py", edits), kind.partition(".")[2])


def forgetting(sources: Path, kind: str):
    """TOFU's trainer, whose batches are tuples of tensors."""
    gone = ("evaluate_util", "data_module", "utils", "scipy.stats")
    lines = (sources / "tofu" / "dataloader.py").read_text().splitlines()
    edits = [(f"{line}\n", "") for line in lines if line.startswith(tuple(f"from {name} import" for name in gone))]
    edits += [("import deepspeed\n", ""), ("from transformers.integrations.deepspeed import", "# ")]
    edits += [("self.e_prepare_deepspeed(self.oracle_model)", "self.oracle_model.eval()")]
    return getattr(read_module("own_trainer", sources / "tofu" / "dataloader.py", (*TODAY, *edits)), kind)


def assistants(sources: Path, kind: str):
    """Open-Assistant's: batches of several answers to each question, and a loader that is not prepared, or is."""
    prepared, kind = kind.startswith("Prepared"), kind.removeprefix("Prepared")
    folder = sources / "Open-Assistant" / "model" / "model_training"
    losses = read_module("losses", folder / "utils" / "losses.py")
    text = (folder / ("trainer_sft.py" if kind == "SFTTrainer" else "trainer_rm.py")).read_text()
    start = text.index(f"class {kind}")
    module = {**vars(importlib.import_module("typing")), **vars(torch.nn), "datasets": None, "nn": torch.nn}
    module |= {"is_datasets_available": lambda: False, "torch": torch, "logging": logging, "seed_worker": None}
    module |= {"Trainer": Trainer, "TrainingArguments": TrainingArguments, "PreTrainedModel": object}
    module |= {"DataLoader": torch.utils.data.DataLoader}
    module["get_loss"] = lambda name, *args, score_l2_reg=0.0: (
        losses.RMLoss(beta=score_l2_reg) if name == "RMLoss" else getattr(losses, name)()
    )
    text = text[start : text.index("\ndef argument_parsing")]
    for old, new in (("return_logits=False):", "return_logits=False, num_items_in_batch=None):"), *TODAY):
        text = text.replace(old, new)
    exec(compile(text, kind, "exec"), module)  # the own text of that project
    if not prepared:
        return module[kind]

    class Prepared(module[kind]):
        def get_train_dataloader(self):
            return self.accelerator.prepare(super().get_train_dataloader())

    return Prepared


def collate_answers(features):
    """Pad the answers of several questions to one batch, and tell where those of a question begin."""
    answers = [row for feature in features for row in feature["answers"]]
    batch = collate(answers, 33)
    del batch["labels"]
    return batch, [0, *itertools.accumulate(len(feature["answers"]) for feature in features)]


def collate_turns(features):
    """Pad; targets are shifted by one, and a mask tells which of them are an assistant's."""
    batch = collate(features)
    labels = batch.pop("labels")
    targets = torch.cat([batch["input_ids"][:, 1:], torch.zeros(len(labels), 1, dtype=torch.long)], dim=1)
    return {**batch, "targets": targets, "label_masks": torch.cat([labels[:, 1:] != -100, labels[:, :1] > 0], dim=1)}


def tokens(size: int, seed: int, length: int = 33) -> list[dict]:
    """Rows of unlike lengths, whose first tokens are a question without labels."""
    generator, rows = torch.Generator().manual_seed(seed), []
    for number in range(size):
        ids = torch.randint(5, 500, (length - 3 * (number % 5),), generator=generator).tolist()
        asked = 2 + number % 4
        labels = [-100] * asked + ids[asked:]
        rows.append({"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels})
    return rows


def collate(features, least=0):
    """Pad; a row of rows becomes a batch of batches."""
    if "input_ids" not in features[0]:
        return {name: collate([row[name] for row in features], least) for name in features[0]}
    longest, batch = max(least, *(len(row["input_ids"]) for row in features)), {}
    for key, filler in (("input_ids", 0), ("attention_mask", 0), ("labels", -100)):
        batch[key] = torch.tensor([row[key] + [filler] * (longest - len(row[key])) for row in features])
    return batch


def collate_tuples(features):
    """Pad to one length; each batch in a batch is a tuple of tensors."""
    batch = collate(features, 33)
    batches = [batch] if "input_ids" in batch else list(batch.values())
    found = [tuple(one[key] for key in ("input_ids", "labels", "attention_mask")) for one in batches]
    return found if len(found) > 1 else found[0]


PROJECTS = {"open-unlearning": unlearning, "attacks": attacked, "tofu": forgetting, "assistants": assistants}
COLLATORS = {"CustomTrainer": collate_tuples, "CustomTrainerForgetting": collate_tuples}
COLLATORS |= {"SFTTrainer": collate_turns, "RMTrainer": collate_answers}


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


def several(size: int, seed: int) -> list[dict]:
    """Questions with two to four answers each."""
    rows = iter(tokens(4 * size, seed))
    return [{"answers": list(itertools.islice(rows, 2 + number % 3))} for number in range(size)]


def main():
    options = argparse.ArgumentParser()
    for name in ("project", "kind", "model", "output_dir", "sources"):
        options.add_argument(f"--{name}")
    options.add_argument("--batch_size", type=int)
    options.add_argument("--settings", default="{}")
    options.add_argument("--training", default="{}")
    options.add_argument("--read", default="{}", help="arguments of training that the project has added")
    options.add_argument("--lora", action="store_true")
    args = options.parse_args()
    bare = args.kind.removeprefix("Prepared")
    set_seed(1)
    config = AutoConfig.from_pretrained(args.model, pad_token_id=0)
    model_kind = AutoModelForCausalLM
    if bare == "RMTrainer":
        config.num_labels, model_kind = 1, AutoModelForSequenceClassification
    model = model_kind.from_pretrained(args.model, config=config)
    if args.lora:
        from peft import LoraConfig, get_peft_model

        targets = ["q_proj", "v_proj", "down_proj"]
        model = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights="gaussian"))
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
    vars(arguments).update(json.loads(args.read))
    kind, settings = PROJECTS[args.project](Path(args.sources), args.kind), json.loads(args.settings)
    if settings.get("oracle_model"):
        settings["oracle_model"] = AutoModelForCausalLM.from_pretrained(args.model, config=config)
    alone = args.project in ("attacks", "assistants") or args.kind == "CustomTrainer"
    train, held_out, collator = tokens(30, 1), tokens(11, 4), COLLATORS.get(bare, collate)
    if args.project == "assistants":
        settings["train_collate_fn"] = collator
    if bare == "RMTrainer":
        train, held_out = several(16, 1), several(9, 4)
    trainer = kind(
        model=model,
        args=arguments,
        train_dataset=Rows(train) if alone else paired(30, args.kind == "DPO"),
        eval_dataset=Rows(held_out),
        data_collator=collator,
        **settings,
    )
    if hasattr(kind, "init"):
        trainer.init(model if "model" in inspect.signature(kind.init).parameters else Rows(tokens(16, 5)))
    trainer.train()
    if args.kind != "CustomTrainerForgetting":  # which has questions of its own
        trainer.evaluate(Rows(held_out))
    trainer.save_model(args.output_dir)


if __name__ == "__main__":
    main()

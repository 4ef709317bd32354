"""Draw Trainer scripts and layouts at random, and compare each with one process: settings that meet nowhere else.

    python -m tests.drawn [--first 0] [--count 50] [--worlds 2 4]        # a line per script that is not equal
    python -m tests.drawn --run "model=gpt2 optim=adamw_torch" --spec tp=2   # one of them again

A script is a set of choices, each from `CHOICES`, whose first value is the plain one. Number N draws the same script
and layout everywhere. A script that differs is made simpler, choice by choice, for as long as it differs.

Compared are all of Trainer's log (losses, norms, learning rates, metrics of each evaluation), what `train`,
`evaluate` and `predict` return, the state of the trainer, the set of gradients of each step, and the saved folder.
"""

import argparse
import math
import random
import re
import shutil
import sys
import tempfile
import traceback
from functools import partial
from typing import Any

import torch
from transformers import AutoConfig, EarlyStoppingCallback, PrinterCallback, Trainer, TrainerCallback

from tests import models
from tests.distributed import RankFailure, run, run_alone
from tests.rows import Rows, data, pad
from tests.training import (
    EVAL_SEED,
    TRAIN_SEED,
    OwnTrainer,
    activate,
    arguments_of,
    axes,
    key_differences,
    own_loss,
    weight_differences,
    with_adapters,
)
from tests.training import Script as LoraScript

#: The errors of this package whose words say what to do.
REFUSALS = ("SpecError", "UsageError")
DECODERS = (
    "llama",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gpt2",
    "phi3",
    "odd",
    "opt",
    "gpt_neox",
    "olmo2",
    "qwen2",
)
EXPERTS = ("mixtral", "qwen3_moe", "deepseek_moe", "gpt_oss")
OTHERS = ("bert", "roberta", "t5", "bart", "vit", "llava")

#: Arguments of Trainer as they are.
ARGUMENTS: dict[str, tuple] = {
    "gradient_accumulation_steps": (1, 2, 3),
    "num_train_epochs": (1, 2, 1.5),
    "max_steps": (-1, 4, 5),
    "optim": ("sgd", "adamw_torch", "adamw_torch_fused", "adafactor", "rmsprop", "adagrad"),
    "lr_scheduler_type": (
        *("constant", "linear", "cosine", "constant_with_warmup", "polynomial", "inverse_sqrt"),
        *("cosine_with_restarts", "reduce_lr_on_plateau"),
    ),
    "warmup_steps": (0, 1, 0.4),
    "weight_decay": (0.0, 0.1),
    "max_grad_norm": (1.0, 0.0, 0.05, 1000.0),
    "label_smoothing_factor": (0.0, 0.1),
    "average_tokens_across_devices": (True, False),
    "gradient_checkpointing": (False, True),
    "gradient_checkpointing_kwargs": (None, {"use_reentrant": True}, {"use_reentrant": False}),
    "logging_steps": (1, 2),
    "logging_strategy": ("steps", "epoch"),
    "logging_first_step": (False, True),
    "include_num_input_tokens_seen": ("no", "all", "non_padding"),
    "eval_strategy": ("no", "steps", "epoch"),
    "eval_steps": (1, 2),
    "eval_delay": (0, 2),
    "eval_on_start": (False, True),
    "eval_accumulation_steps": (None, 1, 2),
    "eval_do_concat_batches": (True, False),
    "eval_use_gather_object": (False, True),
    "prediction_loss_only": (False, True),
    "include_for_metrics": ((), ("loss",), ("inputs",), ("inputs", "loss")),
    "batch_eval_metrics": (False, True),
    "save_strategy": ("no", "steps", "epoch", "best"),
    "save_steps": (1, 2),
    "save_total_limit": (None, 1),
    "save_only_model": (False, True),
    "load_best_model_at_end": (False, True),
    "metric_for_best_model": (None, "loss", "eval_share"),
    "greater_is_better": (None, True, False),
    "dataloader_drop_last": (False, True),
    "dataloader_num_workers": (0, 1),
    "dataloader_persistent_workers": (False, True),
    "remove_unused_columns": (True, False),
    "train_sampling_strategy": ("random", "sequential", "group_by_length"),
    "data_seed": (None, 3),
    "full_determinism": (False, True),
    "ignore_data_skip": (False, True),
    "restore_callback_states_from_checkpoint": (False, True),
    "accelerator_config": (
        None,
        {"split_batches": True},
        {"even_batches": False},
        {"use_seedable_sampler": False},
        {"dispatch_batches": False},
    ),
}
#: What else a script does in one way or another.
WAYS: dict[str, tuple] = {
    "model": ("llama", *DECODERS, *DECODERS, *EXPERTS, *OTHERS),
    "rows": (22, 13, 19, 24, 31),
    "eval_rows": (13, 5, 8, 17),
    "batch": (8, 4),
    "data": ("rows", "list", "table", "stream", "stream_table"),
    "uneven_lengths": (False, True),
    "masked": (True, False),
    "loss": ("model", "function", "override", "mean", "sum_of_parts"),
    "frozen": ("nothing", "embeddings", "first_layers", "all_but_norms"),
    "lora": (
        (),
        (("r", 3), ("target_modules", "all-linear")),
        (("r", 3), ("target_modules", "all-linear"), ("use_dora", True)),
        (("r", 5), ("target_modules", ("q_proj", "down_proj")), ("use_rslora", True), ("bias", "all")),
        (("r", 3), ("target_modules", ("q_proj", "v_proj")), ("modules_to_save", ("lm_head",))),
    ),
    "metrics": ("none", "share", "reduced_share"),
    "eval_sets": (1, 2),
    "optimizers": ("of_arguments", "own", "own_with_schedule", "class"),
    "callbacks": ("none", "early_stopping", "control", "stop"),
    "twice": ("no", "trains_again", "evaluates_first", "new_trainer"),
    "resumes": (False, True),
    "generates": (False, True),
    "dtype": ("float32", "bfloat16"),
    "config": ((), (("output_hidden_states", True),), (("use_cache", True),), (("num_hidden_layers", 3),)),
}
CHOICES = {**WAYS, **ARGUMENTS}
PLAIN = {name: values[0] for name, values in CHOICES.items()}
#: How many choices of a script are not the plain ones, of about sixty.
CHANGED = 9

#: Keys of a spec beside the sizes of its axes: which axis they need, and their values.
SPEC_KEYS: tuple[tuple[str, str, tuple], ...] = (
    ("dp_shard", "zero_stage", (0, 1, 2)),
    ("dp_shard", "gradient_reduction", ("micro_step", "step")),
    ("dp_shard", "offload", ("cpu", "optimizer")),
    ("dp_", "batch_shares", ("auto", "3:1")),
    (
        "pp",
        "pipeline_schedule",
        ("gpipe", "interleaved_1f1b", "looped_bfs", "zbv_zero_bubble", "dualpipe_v", "chimera"),
    ),
    ("pp", "pipeline_microbatches", (2, 4)),
    ("pp", "pipeline_split", ("[1,3]", "3:1")),
    ("tp", "sequence_parallel", ("true", "false")),
    ("tp", "tp_overlap", ("true",)),
    ("cp", "context_parallel", ("ring", "ulysses", "allgather")),
    ("", "lean_loss", ("true", "false")),
    ("", "activation_checkpointing", ("selective", "full", "every:2")),
    ("", "activation_offload", ("true",)),
    ("", "tiled_mlp", ("true",)),
    ("", "monitor", ("full", "off", "trace:2", "noise")),
    ("", "async_save", ("true",)),
    ("", "padding_free", ("true",)),
    ("", "nan_action", ("stop", "skip")),
)


def draw_script(seed: int) -> dict[str, Any]:
    """Draw the choices of script number `seed`, all of them."""
    dice = random.Random(seed)
    chance = CHANGED / len(CHOICES)
    chosen = {
        name: dice.choice(values) if dice.random() < 2 * chance else values[0] for name, values in CHOICES.items()
    }
    chosen["model"] = dice.choice(WAYS["model"]) if dice.random() < 0.6 else "llama"
    return fitting(chosen)


def fitting(chosen: dict[str, Any]) -> dict[str, Any]:
    """Take back choices that no script can make together, in one process either."""
    plain: set[str] = set()
    if chosen["model"] in ("t5", "bart"):
        plain |= {"label_smoothing_factor"}  # whose labels a collator of Transformers shifts for them
    if chosen["eval_sets"] == 2:
        plain |= {"metric_for_best_model", "greater_is_better", "load_best_model_at_end"}
        plain |= {"lr_scheduler_type", "callbacks"}
        chosen |= {"save_strategy": chosen["save_strategy"].replace("best", "epoch")}
        chosen |= {"load_best_model_at_end": False, "callbacks": "none", "lr_scheduler_type": "constant"}
    if chosen["uneven_lengths"]:
        chosen |= {"include_for_metrics": ()}
    if chosen["model"] not in (*DECODERS, *EXPERTS):
        plain |= {"uneven_lengths", "loss", "lora", "data", "generates", "masked", "config", "frozen"}
    if chosen["model"] not in ("llama", "qwen3", "mistral", "gemma2", "gemma3", "odd", "olmo2", "qwen2"):
        plain |= {"lora"}
    if (
        chosen["model"] in ("gemma2", "gemma3", "granite_swa", "gpt_oss")
        and len(chosen["config"])
        and "layers" in str(chosen["config"])
    ):
        plain |= {"config"}  # which names a kind for each layer
    if "stream" in chosen["data"]:
        plain |= {"train_sampling_strategy", "uneven_lengths"}
        chosen["max_steps"] = max(chosen["max_steps"], 4)
    if chosen["loss"] != "model":
        plain |= {"label_smoothing_factor"}
    if chosen["load_best_model_at_end"] or chosen["callbacks"] == "early_stopping":
        chosen |= {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
        chosen |= {"load_best_model_at_end": True, "eval_delay": 0}
    if chosen["save_strategy"] == "best" and chosen["eval_strategy"] == "no":
        chosen |= {"eval_strategy": "steps"}
    if chosen["save_strategy"] == "best" and chosen["metric_for_best_model"] is None:
        chosen |= {"metric_for_best_model": "loss"}
    if chosen["metric_for_best_model"] == "eval_share" and chosen["metrics"] == "none":
        chosen |= {"metrics": "share"}
    if chosen["prediction_loss_only"] or chosen["eval_do_concat_batches"] is False:
        plain |= {"metrics", "batch_eval_metrics", "include_for_metrics", "metric_for_best_model", "greater_is_better"}
    if chosen["metrics"] == "none":
        plain |= {"batch_eval_metrics", "include_for_metrics"}
    if chosen["lr_scheduler_type"] == "reduce_lr_on_plateau":
        chosen |= {
            "eval_strategy": "steps",
            "metric_for_best_model": "loss",
            "greater_is_better": False,
            "eval_delay": 0,
        }
    if chosen["optimizers"] != "of_arguments":
        plain |= {"optim"}
    if not chosen["dataloader_num_workers"]:
        plain |= {"dataloader_persistent_workers"}
    if chosen["train_sampling_strategy"] == "group_by_length" and chosen["data"] == "table":
        plain |= {"data"}
    if chosen["resumes"]:
        chosen |= {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
        chosen |= {"save_only_model": False}
        plain |= {"twice", "callbacks", "load_best_model_at_end", "ignore_data_skip"}
    if chosen["dtype"] == "bfloat16":
        chosen |= {"optim": "sgd"}
    return {**chosen, **{name: PLAIN[name] for name in plain}}


def draw_layout(seed: int, chosen: dict[str, Any], worlds: tuple[int, ...] = (2, 2, 2, 4)) -> str:
    """Draw a spec: one or two axes, and about one further key of those that go with them."""
    dice = random.Random(f"layout {seed}")
    world = dice.choice(worlds)
    names = ["dp_shard", "dp_replicate", "tp", "pp", "cp"]
    chosen_axes = [dice.choice(names)] if world == 2 else dice.sample(names, 2)
    spec = dict.fromkeys(chosen_axes, "2")
    if chosen["model"] in EXPERTS and "dp_shard" in spec and dice.random() < 0.7:
        spec["ep"] = "2"
    fitting_keys = [entry for entry in SPEC_KEYS if any(axis.startswith(entry[0]) for axis in spec)]
    for _, name, values in fitting_keys:
        if dice.random() < 1.2 / len(fitting_keys):
            spec[name] = str(dice.choice(values))
    return ",".join(f"{key}={value}" for key, value in spec.items())


class Keeper(TrainerCallback):
    """Keeps which parameters have a gradient before each optimizer step."""

    def __init__(self) -> None:
        self.gradient_keys: list[list[str]] = []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradient_keys.append(sorted(name for name, p in model.named_parameters() if p.grad is not None))


class Control(TrainerCallback):
    """A script's own callback: evaluates and logs in the second step, saves in the third."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_evaluate |= state.global_step == 2
        control.should_log |= state.global_step == 2
        control.should_save |= state.global_step == 3


class Stop(TrainerCallback):
    """Ends the training after a step of this number."""

    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop |= state.global_step >= self.step


class MeanTrainer(Trainer):
    """A user's subclass: takes the labels away and computes the mean over the targets of its batch."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits, targets = outputs.logits[:, :-1].float(), labels[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        return (loss, outputs) if return_outputs else loss


class PartsTrainer(Trainer):
    """A user's subclass: the model's own loss and a further term of the logits."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        targets = inputs["labels"] != -100
        further = outputs.logits.float().logsumexp(-1).pow(2)[targets]
        count = targets.sum() if num_items_in_batch is None else num_items_in_batch
        loss = loss + 1e-3 * further.sum() / count
        return (loss, outputs) if return_outputs else loss


KINDS = {"override": OwnTrainer, "mean": MeanTrainer, "sum_of_parts": PartsTrainer}


def share(evaluated: Any, compute_result: bool = True) -> dict[str, float]:
    """A user's `compute_metrics`: numbers that depend on each row, and on how many there are."""
    logits = evaluated.predictions[0] if isinstance(evaluated.predictions, tuple) else evaluated.predictions
    logits, labels = torch.as_tensor(logits), torch.as_tensor(evaluated.label_ids)
    found = logits.argmax(-1) if logits.is_floating_point() else logits
    if found.ndim > 1 and found.shape[1] != labels.shape[1]:
        found = found[:, -labels.shape[1] :]
    share.counts.append((float((found == labels).sum()), labels.numel(), float((found % 7).sum())))
    if not compute_result:
        return {}
    hits, count, checksum = (sum(part) for part in zip(*share.counts, strict=True))
    share.counts.clear()
    more = {"inputs_sum": float(torch.as_tensor(evaluated.inputs).sum())} if evaluated.inputs is not None else {}
    if evaluated.losses is not None:
        more["losses"] = float(torch.as_tensor(evaluated.losses).double().mean())
    return {"share": hits / count, "rows": len(labels), "checksum": checksum, **more}


share.counts = []


def reduced(logits: Any, labels: torch.Tensor) -> torch.Tensor:
    """A user's `preprocess_logits_for_metrics`."""
    return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)


def build_data(chosen: dict[str, Any], rows: int, seed: int, training: bool) -> Any:
    """Make the data set in the form that the script has it."""
    kind = chosen["data"]
    if kind == "rows" or (kind == "stream" and not training):
        given = {"uneven_lengths": chosen["uneven_lengths"], "masked": chosen["masked"]}
        return data(chosen["model"], rows, seed, **given)
    if kind == "stream":
        return data(chosen["model"], rows, seed, stream=True)
    ours = Rows(rows, seed, uneven_lengths=chosen["uneven_lengths"])
    listed = [{key: value.tolist() for key, value in ours[index].items()} for index in range(rows)]
    if kind == "list":
        return listed
    from datasets import Dataset

    table = Dataset.from_list([{**row, "note": f"row {index}"} for index, row in enumerate(listed)])
    return table.to_iterable_dataset() if kind == "stream_table" and training else table


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A user's collator, which leaves out what is no number."""
    kept = [{key: torch.as_tensor(value) for key, value in row.items() if key != "note"} for row in rows]
    return pad(kept)


def freeze(model: torch.nn.Module, what: str) -> None:
    """Take gradients from a part of the model."""
    chosen = {
        "nothing": "^$",
        "embeddings": "embed|wte",
        "first_layers": r"embed|wte|\.[01]\.",
        "all_but_norms": r"^(?!.*(norm|ln_|bias))",
    }[what]
    for name, parameter in model.named_parameters():
        if re.search(chosen, name):
            parameter.requires_grad_(False)


def learning_rate(chosen: dict[str, Any]) -> float:
    return 0.1 if chosen["optim"] == "sgd" and chosen["optimizers"] == "of_arguments" else 1e-3


def own_optimizer(chosen: dict[str, Any], model: torch.nn.Module) -> tuple:
    """What a script makes itself: two groups of parameters, and a schedule of its own."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for _, p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for _, p in trained if p.ndim == 1], "lr": 3e-3, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3, eps=1e-3)
    if chosen["optimizers"] == "own":
        return optimizer, None
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def make(chosen: dict[str, Any], model: Any, out: str, data_ranks: int, keeper: Keeper, stop: int | None) -> Trainer:
    """The script's trainer."""
    given = {name: chosen[name] for name in ARGUMENTS if chosen[name] != PLAIN[name]}
    given |= {"include_for_metrics": list(chosen["include_for_metrics"])}
    given |= {name: chosen[name] for name in ("eval_steps", "save_steps")}  # whose defaults are longer than any run
    split = (chosen["accelerator_config"] or {}).get("split_batches", False)
    size = chosen["batch"] if split else chosen["batch"] // data_ranks
    sizes = {"per_device_train_batch_size": size, "per_device_eval_batch_size": size}
    lr = {"learning_rate": learning_rate(chosen), "adam_epsilon": 1e-3}
    arguments = arguments_of(out, data_ranks, **{**sizes, **lr, **given})
    tables = {"eval_dataset": build_data(chosen, chosen["eval_rows"], EVAL_SEED, False)}
    if chosen["eval_sets"] == 2:
        tables = {"eval_dataset": {"one": tables["eval_dataset"], "two": build_data(chosen, 7, 5, False)}}
    options: dict[str, Any] = {"train_dataset": build_data(chosen, chosen["rows"], TRAIN_SEED, True), **tables}
    if chosen["uneven_lengths"] or not chosen["remove_unused_columns"] and "table" in chosen["data"]:
        options["data_collator"] = collate
    if chosen["loss"] == "function":
        options["compute_loss_func"] = own_loss
    if chosen["metrics"] != "none":
        options["compute_metrics"] = share
    if chosen["metrics"] == "reduced_share":
        options["preprocess_logits_for_metrics"] = reduced
    if chosen["optimizers"] == "class":
        options["optimizer_cls_and_kwargs"] = (torch.optim.NAdam, {"lr": 1e-3, "eps": 1e-3})
    elif chosen["optimizers"] != "of_arguments":
        options["optimizers"] = own_optimizer(chosen, model)
    callbacks: list[TrainerCallback] = [keeper]
    callbacks += {"early_stopping": [EarlyStoppingCallback(1)], "control": [Control()], "stop": [Stop(2)]}.get(
        chosen["callbacks"], []
    )
    callbacks += [] if stop is None else [Stop(stop)]
    trainer = KINDS.get(chosen["loss"], Trainer)(model=model, args=arguments, callbacks=callbacks, **options)
    trainer.remove_callback(PrinterCallback)
    return trainer


def load(chosen: dict[str, Any], folder: str) -> Any:
    """The script's model."""
    config = AutoConfig.from_pretrained(folder)
    for name, value in chosen["config"]:
        setattr(config, name, value)
    model = models.auto_class(config).from_pretrained(folder, config=config, dtype=getattr(torch, chosen["dtype"]))
    freeze(model, chosen["frozen"])
    return with_adapters(LoraScript(lora=chosen["lora"]), model) if chosen["lora"] else model


def script(chosen: dict[str, Any], folder: str, out: str, spec: str | None, part: str = "whole") -> dict[str, Any]:
    """What the script does and finds, by name. `part` is whole, or what comes "before" a stop or "after" it."""
    data_ranks = activate(spec)
    torch.manual_seed(5)
    keeper = Keeper()
    trainer = make(chosen, load(chosen, folder), out, data_ranks, keeper, 3 if part == "before" else None)
    found: dict[str, Any] = {}
    if chosen["twice"] == "evaluates_first":
        found["evaluated first"] = trainer.evaluate()
    result = trainer.train(resume_from_checkpoint=True if part == "after" else None)
    found["train"] = {**result.metrics, "training_loss": result.training_loss, "steps": result.global_step}
    if chosen["twice"] == "trains_again":
        found["trained again"] = trainer.train().metrics
    if chosen["twice"] == "new_trainer":
        trainer = make(chosen, trainer.model, out, data_ranks, keeper, None)
        found["new trainer"] = trainer.train().metrics
    found["evaluate"] = trainer.evaluate()
    predicted = trainer.predict(build_data(chosen, 9, 21, False))
    found["predict"] = predicted.metrics
    if predicted.predictions is not None and not chosen["uneven_lengths"]:
        found["predictions"] = checksum(predicted.predictions)
    state = trainer.state
    found["state"] = {
        "epoch": state.epoch,
        "step": state.global_step,
        "best": state.best_metric,
        "best_step": state.best_global_step,
        "max_steps": state.max_steps,
        "tokens": state.num_input_tokens_seen,
        "logged": len(state.log_history),
        "flos": state.total_flos,
    }
    for number, entry in enumerate(state.log_history):
        found[f"log {number} (step {entry['step']})"] = entry
    if chosen["generates"]:
        prompt = Rows(3, 31).tokens[:, :5].to(trainer.model.device)
        tokens = trainer.model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
        found["generated"] = {str(place): int(token) for place, token in enumerate(tokens.flatten())}
    trainer.save_model(f"{out}/saved")
    return {"found": found, "gradient_keys": keeper.gradient_keys, "folder": f"{out}/saved"}


def checksum(predictions: Any) -> dict[str, float]:
    """Numbers that change with any prediction and with the order of rows."""
    parts = predictions if isinstance(predictions, (tuple, list)) else (predictions,)
    flat = torch.cat([torch.as_tensor(part).double().flatten() for part in leaves(parts)])
    return {
        "sum": float((flat * torch.linspace(0.5, 1.5, len(flat), dtype=flat.dtype)).abs().sum()),
        "size": len(flat),
    }


def leaves(parts: Any) -> list:
    return [leaf for part in parts for leaf in (leaves(part) if isinstance(part, (tuple, list)) else [part])]


#: What differs between two runs of one process too.
UNEQUAL = re.compile(r"runtime|per_second|^perf/|preparation_time|^expert_|^noise_")
#: What does not depend on a stop, before which more is logged.
OF_RESUMED = {"evaluate", "predict", "predictions", "generated", "new trainer"}
#: What 16 bits may turn: which token is the likeliest, which of two evaluations is better.
ROUNDED = re.compile(r"share$|checksum$|^best")


def compare(ranks: list[dict[str, Any]], reference: dict[str, Any], chosen: dict[str, Any]) -> list[str]:
    """Return every difference in words."""
    low = chosen["dtype"] == "bfloat16"
    stepwise = chosen["optim"] in ("adafactor", "rmsprop", "adagrad")
    relative = 3e-2 if low else 5e-4 if stepwise else 3e-5
    lines = []
    for rank, outcome in enumerate(ranks):
        names = {*outcome["found"], *reference["found"]}
        for name in sorted(names & OF_RESUMED if chosen["resumes"] else names):
            if low and name == "generated":
                continue
            ours, theirs = (side["found"].get(name) for side in (outcome, reference))
            if ours is None or theirs is None:
                lines.append(f"rank {rank}: {name}: only {'in one process' if ours is None else 'here'}")
                continue
            for key in sorted({*ours, *theirs}):
                # Padding is counted, and data ranks pad for themselves; what is nearly equal has no best step.
                counts = chosen["uneven_lengths"] and key in ("total_flos", "flos", "tokens", "num_input_tokens_seen")
                if not UNEQUAL.search(key) and not counts and not (low and ROUNDED.search(key)):
                    lines += unequal(f"rank {rank}: {name}: {key}", ours.get(key), theirs.get(key), relative)
    expected = reference["gradient_keys"][3 if chosen["resumes"] else 0 :]
    lines += key_differences([outcome["gradient_keys"] for outcome in ranks], expected)
    steps = [len(outcome["gradient_keys"]) for outcome in ranks]
    if set(steps) != {len(expected)}:
        lines.append(f"steps {steps}, one process {len(expected)}")
    return lines + weight_differences(
        ranks[0]["folder"], reference["folder"], 3e-2 if low else 1e-3 if stepwise else 1e-5
    )


def unequal(name: str, ours: Any, theirs: Any, relative: float) -> list[str]:
    numbers = all(isinstance(value, (int, float)) for value in (ours, theirs))
    if numbers and (ours == theirs or abs(ours - theirs) <= relative * abs(theirs)):
        return []
    if numbers and math.isnan(ours) and math.isnan(theirs):
        return []
    return [] if ours == theirs else [f"{name}: {ours!r}, one process {theirs!r}"]


class Bench:
    """A folder with initial models, and the runs of one script after another."""

    def __init__(self) -> None:
        self.root = tempfile.mkdtemp(prefix="drawn-")
        self.made: set[str] = set()

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    def initial(self, model: str) -> str:
        folder = f"{self.root}/{model}"
        if model not in self.made:
            run_alone(lambda: models.build(model).save_pretrained(folder))
            self.made.add(model)
        return folder

    def try_script(self, chosen: dict[str, Any], spec: str) -> tuple[str, list[str]]:
        """Return "equal", "refused", "differs", "fails", or "no script" if one process fails too; and the words."""
        out, folder = f"{self.root}/out", self.initial(chosen["model"])
        parts = ("before", "after") if chosen["resumes"] else ("whole",)
        shutil.rmtree(out, ignore_errors=True)
        try:
            # A run that is not stopped: one process that is resumed may go on in another order.
            reference = run_alone(script, chosen, folder, f"{out}/alone", None)
        except RankFailure as failure:
            return "no script", [last_line(failure)]
        try:
            for part in parts:
                call = partial(script, chosen, folder, f"{out}/ranks", spec, part)
                ranks = run(call, axes(spec)["world"], init=False)
        except RankFailure as failure:
            refused = any(kind in REFUSALS for kind in failure.kinds.values())
            return ("refused", [last_line(failure)]) if refused else ("fails", [failure.first])
        found = compare(ranks, reference, chosen)
        return ("differs" if found else "equal"), found

    def simplify(self, chosen: dict[str, Any], spec: str, kind: str) -> tuple[dict[str, Any], str]:
        """Take back one choice after another for as long as the script ends in the same way."""
        for name in sorted(name for name in chosen if chosen[name] != PLAIN[name]):
            simpler = fitting({**chosen, name: PLAIN[name]})
            if simpler != chosen and self.try_script(simpler, spec)[0] == kind:
                chosen = simpler
        for key in spec.split(","):
            simpler_spec = ",".join(other for other in spec.split(",") if other != key)
            if simpler_spec and axes(simpler_spec)["world"] > 1 and self.try_script(chosen, simpler_spec)[0] == kind:
                spec = simpler_spec
        return chosen, spec


def last_line(failure: RankFailure) -> str:
    return f"{failure.kind}: {failure.message.strip()[:400]}"


def show_choices(chosen: dict[str, Any]) -> str:
    """The choices that are not plain, as `--run` reads them."""
    return " ; ".join(f"{name}={chosen[name]!r}" for name in chosen if chosen[name] != PLAIN[name])


def read_choices(text: str) -> dict[str, Any]:
    """The choices of a line that `show_choices` wrote."""
    import ast

    given = dict(part.split("=", 1) for part in text.split(" ; ") if part)
    return {**PLAIN, **{name: ast.literal_eval(value) for name, value in given.items()}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 2, 2, 4])
    parser.add_argument("--run")
    parser.add_argument("--spec")
    parser.add_argument("--simplify", action="store_true")
    given = parser.parse_args()
    bench, counts = Bench(), {}
    try:
        for seed in [0] if given.run is not None else range(given.first, given.first + given.count):
            chosen = draw_script(seed) if given.run is None else read_choices(given.run)
            spec = given.spec or draw_layout(seed, chosen, tuple(given.worlds))
            try:
                kind, words = bench.try_script(chosen, spec)
                if given.simplify and kind in ("differs", "fails"):
                    chosen, spec = bench.simplify(chosen, spec, kind)
                    kind, words = bench.try_script(chosen, spec)
            except Exception:
                kind, words = "broken", [traceback.format_exc()]
            counts[kind] = counts.get(kind, 0) + 1
            print(f'{seed} {kind}: --spec {spec} --run "{show_choices(chosen)}"', flush=True)
            lines = "\n".join(words).splitlines() if kind != "equal" else []
            lines = lines[:12] if kind == "differs" else lines[-12:]
            print("".join(f"    {line[:300]}\n" for line in lines), end="", flush=True)
        print(counts)
    finally:
        bench.close()


if __name__ == "__main__":
    sys.exit(main())

"""Trainer scripts: any of their arguments, data sets, losses, models, adapters, optimizers and callbacks at once.

Compared are all of Trainer's log (losses, norms, learning rates, metrics of each evaluation), what `train`,
`evaluate` and `predict` return, the state of the trainer, the set of gradients of each step, and the saved folder.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AutoConfig,
    EarlyStoppingCallback,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from tests import models, training
from tests.drawn.bench import EXPERTS, RESUMES_ON, Choices, Kind, summarise
from tests.rows import Rows, data, pad
from tests.training import EVAL_SEED, TRAIN_SEED, OwnTrainer, activate, arguments_of, own_loss, with_adapters

#: Models that PEFT's names of layers in `WAYS` fit, and other decoders.
ADAPTED = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "odd", "olmo2", "qwen2")
DECODERS = (
    *(*ADAPTED, "gpt2", "phi3", "opt", "gpt_neox", "falcon", "bloom", "gptj", "mpt", "deepseek_v3", "granite_swa"),
    *("command_r", "stablelm", "gpt_bigcode", "mamba"),
)
#: Models whose config names a kind for each layer.
KINDS_OF_LAYERS = ("gemma2", "gemma3", "granite_swa", "gpt_oss")
OTHERS = ("bert", "roberta", "t5", "bart", "vit", "llava")

#: Arguments of Trainer as they are.
ARGUMENTS: dict[str, tuple] = {
    "gradient_accumulation_steps": (1, 2, 3),
    "num_train_epochs": (1, 2, 1.5),
    "max_steps": (-1, 4, 5),
    "optim": ("sgd", "adamw_torch", "adamw_torch_fused", "adafactor", "rmsprop", "adagrad"),
    "lr_scheduler_type": (
        *("constant", "linear", "cosine", "constant_with_warmup", "polynomial", "inverse_sqrt"),
        *("cosine_with_restarts", "reduce_lr_on_plateau", "cosine_with_min_lr", "warmup_stable_decay"),
    ),
    "logging_nan_inf_filter": (True, False),
    "warmup_steps": (0, 1, 0.4),
    "weight_decay": (0.0, 0.1),
    "bf16": (False, True),
    "bf16_full_eval": (False, True),
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
    "frozen": ("nothing", "embeddings", "first_layers", "all_but_norms", "all_but_norms_of_adapted"),
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
    "callbacks": ("none", "early_stopping", "control", "stop", "watch", "rate", "freeze"),
    "twice": ("no", "trains_again", "evaluates_first", "new_trainer"),
    "resumes": (False, True),
    "resumes_on": RESUMES_ON,
    "generates": (False, True),
    "dtype": ("float32", "bfloat16"),
    "config": ((), (("output_hidden_states", True),), (("use_cache", True),), (("num_hidden_layers", 3),)),
}
CHOICES = {**WAYS, **ARGUMENTS}
PLAIN = {name: values[0] for name, values in CHOICES.items()}


def fit(chosen: Choices) -> Choices:
    """Take back choices that no script can make together, in one process either."""
    plain: set[str] = set()
    if chosen["model"] in (
        "vit",
        "gpt_neox",
        *EXPERTS,
    ):  # Trainer alone does not find weights of the Hub's names at the end
        chosen |= {"load_best_model_at_end": False}
        plain |= {"load_best_model_at_end", "callbacks"}
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
    if chosen["model"] not in ADAPTED or chosen["model"] == "qwen2":
        plain |= {"lora"}
        # Biases of keys have no gradient but rounding, which these make a step as large as any other.
        if chosen["optim"] in ("adafactor", "adagrad", "rmsprop"):
            plain |= {"optim"}
    if chosen["model"] in KINDS_OF_LAYERS and "num_hidden_layers" in dict(chosen["config"]):
        plain |= {"config"}
    if "stream" in chosen["data"]:
        plain |= {"train_sampling_strategy", "uneven_lengths"}
        chosen["max_steps"] = max(chosen["max_steps"], 4)
    if chosen["loss"] != "model":
        plain |= {"label_smoothing_factor"}
    if chosen["load_best_model_at_end"] or chosen["callbacks"] == "early_stopping":
        chosen |= {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
        chosen |= {"load_best_model_at_end": True, "eval_delay": 0}
    if chosen["save_strategy"] == "best" and chosen["metric_for_best_model"] is None:
        chosen |= {"metric_for_best_model": "loss"}
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
    if chosen["model"] not in DECODERS or chosen["lora"] or chosen["frozen"] != "nothing":
        plain |= {"callbacks"} if chosen["callbacks"] in ("watch", "freeze") else set()
    if not chosen["dataloader_num_workers"]:
        plain |= {"dataloader_persistent_workers"}
    if chosen["train_sampling_strategy"] == "group_by_length" and chosen["data"] == "table":
        plain |= {"data"}
    if chosen["resumes"]:
        chosen |= {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
        chosen |= {"save_only_model": False}
        plain |= {"twice", "callbacks", "load_best_model_at_end", "ignore_data_skip"}
        plain |= {
            "train_sampling_strategy",
            "accelerator_config",
        }  # whose order after a stop is another one in one process, too
    if is_low(chosen):
        chosen |= {"optim": "sgd"}
    return {**chosen, **{name: PLAIN[name] for name in plain}}


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


class Watch(TrainerCallback):
    """Logs what it reads of the model, the optimizer, the schedule and the log."""

    def on_step_end(self, args, state, control, model=None, optimizer=None, lr_scheduler=None, **kwargs):
        with torch.no_grad():
            logits = model(input_ids=Rows(2, 5).tokens.to(model.device)).logits
        state.log_history.append(
            {
                "step": state.global_step,
                "logits": float(logits.double().abs().sum()),
                "rate": optimizer.param_groups[0]["lr"],
                "last_rate": lr_scheduler.get_last_lr()[0],
                "former": len(state.log_history),
            }
        )


class Rate(TrainerCallback):
    """Halves the rate of the first parameters after each step."""

    def on_step_end(self, args, state, control, optimizer=None, **kwargs):
        optimizer.param_groups[0]["lr"] /= 2


class Freeze(TrainerCallback):
    """Takes gradients from the embeddings in the second step and gives them back in the third."""

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.get_input_embeddings().weight.requires_grad_(state.global_step != 1)


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


def build_data(chosen: Choices, rows: int, seed: int, training: bool) -> Any:
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
        **dict.fromkeys(("all_but_norms", "all_but_norms_of_adapted"), r"^(?!.*(norm|ln_|bias))"),
    }[what]
    for name, parameter in model.named_parameters():
        if re.search(chosen, name):
            parameter.requires_grad_(False)


def learning_rate(chosen: Choices) -> float:
    return 0.1 if chosen["optim"] == "sgd" and chosen["optimizers"] == "of_arguments" else 1e-3


def own_optimizer(chosen: Choices, model: torch.nn.Module) -> tuple:
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


def read_arguments(chosen: Choices, out: str, data_ranks: int, kind: type = TrainingArguments, **more: Any) -> Any:
    """The script's arguments; `more` are those that a kind of trainer has besides."""
    given = {name: chosen[name] for name in ARGUMENTS if chosen[name] != PLAIN[name]}
    given |= {"include_for_metrics": list(chosen["include_for_metrics"])}
    of_schedule = {"cosine_with_min_lr": {"min_lr_rate": 0.2}, "warmup_stable_decay": {"num_decay_steps": 1}}
    given |= {"lr_scheduler_kwargs": of_schedule.get(chosen["lr_scheduler_type"])}
    given |= {name: chosen[name] for name in ("eval_steps", "save_steps")}  # whose defaults are longer than any run
    split = (chosen["accelerator_config"] or {}).get("split_batches", False)
    size = chosen["batch"] if split else chosen["batch"] // data_ranks
    sizes = {"per_device_train_batch_size": size, "per_device_eval_batch_size": size}
    lr = {"learning_rate": learning_rate(chosen), "adam_epsilon": 1e-3}
    return arguments_of(out, data_ranks, kind, **{**sizes, **lr, **given, **more})


def callbacks_of(chosen: Choices, keeper: Keeper, stop: int | None) -> list[TrainerCallback]:
    """The script's callbacks, and what keeps gradients for a comparison and stops before a resumption."""
    own = {"early_stopping": [EarlyStoppingCallback(1)], "control": [Control()], "stop": [Stop(2)]}
    own |= {"watch": [Watch()], "rate": [Rate()], "freeze": [Freeze()]}
    return [keeper, *own.get(chosen["callbacks"], []), *([] if stop is None else [Stop(stop)])]


def options_of(chosen: Choices, model: Any, build: Callable = build_data) -> dict[str, Any]:
    """What the script gives to its trainer beside a model, arguments and callbacks."""
    tables = {"eval_dataset": build(chosen, chosen["eval_rows"], EVAL_SEED, False)}
    if chosen["eval_sets"] == 2:
        tables = {"eval_dataset": {"one": tables["eval_dataset"], "two": build(chosen, 7, 5, False)}}
    options: dict[str, Any] = {"train_dataset": build(chosen, chosen["rows"], TRAIN_SEED, True), **tables}
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
    return options


def make(chosen: Choices, model: Any, out: str, data_ranks: int, keeper: Keeper, stop: int | None) -> Trainer:
    """The script's trainer."""
    arguments, options = read_arguments(chosen, out, data_ranks), options_of(chosen, model)
    callbacks = callbacks_of(chosen, keeper, stop)
    trainer = KINDS.get(chosen["loss"], Trainer)(model=model, args=arguments, callbacks=callbacks, **options)
    trainer.remove_callback(PrinterCallback)
    return trainer


def load(chosen: Choices, folder: str) -> Any:
    """The script's model."""
    config = AutoConfig.from_pretrained(folder)
    for name, value in chosen["config"]:
        setattr(config, name, value)
    model = models.auto_class(config).from_pretrained(folder, config=config, dtype=getattr(torch, chosen["dtype"]))
    freeze(model, chosen["frozen"])
    if not chosen["lora"]:
        return model
    model = with_adapters(training.Script(lora=chosen["lora"]), model)
    if chosen["frozen"] == "all_but_norms_of_adapted":  # LongLoRA: norms train beside adapters
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad or "norm" in name)
    return model


def train_as_chosen(trainer: Trainer, chosen: Choices, part: str) -> dict[str, Any]:
    """Evaluate first, train and train again as the script does; what it finds, by name."""
    found: dict[str, Any] = {}
    if chosen["twice"] == "evaluates_first":
        found["evaluated first"] = trainer.evaluate()
    result = trainer.train(resume_from_checkpoint=True if part == "after" else None)
    found["train"] = {**result.metrics, "training_loss": result.training_loss, "steps": result.global_step}
    if chosen["twice"] == "trains_again":
        found["trained again"] = trainer.train().metrics
    return found


def read_state(trainer: Trainer) -> dict[str, Any]:
    """The trainer's state and its log, by name."""
    state = trainer.state
    found: dict[str, Any] = {
        f"log {number} (step {entry['step']})": entry for number, entry in enumerate(state.log_history)
    }
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
    return found


def script(chosen: Choices, folder: str, out: str, spec: str | None, part: str = "whole") -> dict[str, Any]:
    """What the script does and finds, by name. `part` is whole, or what comes "before" a stop or "after" it."""
    data_ranks = activate(spec)
    torch.manual_seed(5)
    keeper = Keeper()
    trainer = make(chosen, load(chosen, folder), out, data_ranks, keeper, 3 if part == "before" else None)
    found = train_as_chosen(trainer, chosen, part)
    if chosen["twice"] == "new_trainer":
        trainer = make(chosen, trainer.model, out, data_ranks, keeper, None)
        found["new trainer"] = trainer.train().metrics
    found["evaluate"] = trainer.evaluate()
    predicted = trainer.predict(build_data(chosen, 9, 21, False))
    found["predict"] = predicted.metrics
    if predicted.predictions is not None and not chosen["uneven_lengths"]:
        found["predictions"] = summarise(predicted.predictions)
    found |= read_state(trainer)
    if chosen["generates"]:
        prompt = Rows(3, 31).tokens[:, :5].to(trainer.model.device)
        tokens = trainer.model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)
        found["generated"] = {str(place): int(token) for place, token in enumerate(tokens.flatten())}
    trainer.save_model(f"{out}/saved")
    return {"found": found, "gradient_keys": keeper.gradient_keys, "folder": f"{out}/saved"}


#: What does not depend on a stop, before which more is logged.
OF_RESUMED = {"evaluate", "predict", "predictions", "generated", "new trainer"}
#: What 16 bits may turn: which token is the likeliest, which of two evaluations is better.
ROUNDED = re.compile(r"share$|checksum$|^best")
#: Padding is counted, and data ranks pad for themselves; what is predicted at padding depends on who padded.
COUNTS = ("total_flos", "flos", "tokens", "num_input_tokens_seen")


def is_low(chosen: Choices) -> bool:
    """Are there numbers of 16 bits?"""
    return chosen["dtype"] == "bfloat16" or chosen["bf16"] or chosen["bf16_full_eval"]


def leaves_out(chosen: Choices, name: str, key: str) -> bool:
    """Is this number, or all of this name, not that of one process?"""
    low = is_low(chosen)
    if chosen["resumes"] and name not in OF_RESUMED or low and (name == "generated" or ROUNDED.search(key)):
        return True
    return chosen["uneven_lengths"] and (key in COUNTS or key.endswith("checksum"))


def tolerances(chosen: Choices) -> tuple[float, float]:
    """How far numbers, relative, and weights may be from one process."""
    if is_low(chosen):
        return 3e-2, 3e-2  # 8 bits: 4e-3 per product, and layouts round at other places
    if chosen["optim"] in ("adafactor", "rmsprop", "adagrad"):
        return 5e-4, 1e-3  # their steps are of one size however small a gradient is, so that its last bits count
    return 3e-5, 1e-5


KIND = Kind(CHOICES, fit, script, tolerances, leaves_out)

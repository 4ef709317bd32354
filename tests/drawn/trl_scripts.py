"""TRL scripts: SFT, DPO, rewards and KTO with any of their arguments, data sets, losses, adapters and models at once.

Compared are all of TRL's log (losses, norms, rewards, log-probabilities, entropies, counts of tokens, metrics of each
evaluation), what `train` and `evaluate` return, the set of gradients of each step, and the saved folder.
"""

import random
import re
import warnings
from collections.abc import Callable
from functools import partial
from pydoc_data.topics import topics
from typing import Any

import torch
import trl
from datasets import Dataset, disable_progress_bars
from peft import IA3Config, LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PrinterCallback,
)

from tests.drawn import trainers
from tests.drawn.bench import EXPERTS, RESUMES_ON, Choices, Kind
from tests.drawn.trainers import Keeper
from tests.training import EVAL_SEED, TRAIN_SEED, activate, arguments_of, own_loss
from tests.trl_scripts import ROUNDED, make_tokenizer

TRAINERS = ("sft", "dpo", "reward", "kto")
CLASSES = {
    "sft": (trl.SFTTrainer, trl.SFTConfig),
    "dpo": (trl.DPOTrainer, trl.DPOConfig),
    "reward": (trl.RewardTrainer, trl.RewardConfig),
    "kto": (trl.KTOTrainer, trl.KTOConfig),
}
#: Models that PEFT's names of layers in `ADAPTERS` fit, and other decoders.
ADAPTED = ("llama", "qwen3", "mistral", "gemma2", "odd", "olmo2", "qwen2")
MODELS = (*ADAPTED, "gemma3", "gpt2", "phi3", "opt", "gpt_neox", "falcon", "bloom", "deepseek_v3", "gptj", "command_r")

#: Arguments of Trainer as they are.
OF_TRAINER: dict[str, tuple] = {
    name: trainers.ARGUMENTS[name]
    for name in (
        *("gradient_accumulation_steps", "num_train_epochs", "max_steps", "optim", "lr_scheduler_type"),
        *("warmup_steps", "weight_decay", "max_grad_norm", "average_tokens_across_devices", "logging_steps"),
        *("logging_strategy", "logging_first_step", "include_num_input_tokens_seen", "eval_strategy", "eval_steps"),
        *("eval_on_start", "eval_accumulation_steps", "eval_use_gather_object", "prediction_loss_only"),
        *("save_strategy", "save_steps", "save_only_model", "load_best_model_at_end", "dataloader_drop_last"),
        *("dataloader_num_workers", "train_sampling_strategy", "accelerator_config"),
    )
} | {
    "gradient_checkpointing": (False, True),
    "gradient_checkpointing_kwargs": (None, {"use_reentrant": True}, {"use_reentrant": False}),
    "bf16": (False, True),
}
OF_TRAINER["lr_scheduler_type"] = OF_TRAINER["lr_scheduler_type"][:8]  # the others need arguments of their own
#: Arguments of TRL: of several of its trainers, and of one.
OF_TRL: dict[str, tuple] = {
    "max_length": (48, 24, 15, None),
    "pad_to_multiple_of": (None, 8, 7),
    "router_aux_loss_coef": (None, 0.0, 0.5),
}
OWN_ARGUMENTS: dict[str, dict[str, tuple]] = {
    "sft": {
        "packing": (False, True),
        "packing_strategy": ("bfd", "bfd_split", "wrapped"),
        "padding_free": (False, True),
        "eval_packing": (None, True, False),
        "shuffle_dataset": (False, True),
        "completion_only_loss": (None, True, False),
        "assistant_only_loss": (False, True),
        "loss_type": ("nll", "dft", "chunked_nll"),
        "label_smoothing_factor": (0.0, 0.1),
        "truncation_mode": ("keep_start", "keep_end"),
    },
    "dpo": {
        "loss_type": (
            *(["sigmoid"], ["hinge"], ["ipo"], ["exo_pair"], ["nca_pair"], ["robust"], ["bco_pair"], ["sppo_hard"]),
            *(["aot"], ["aot_unpaired"], ["apo_zero"], ["apo_down"], ["discopop"], ["sft"], ["sigmoid_norm"]),
            *(["sigmoid", "bco_pair"], ["sigmoid", "ipo"], ["sigmoid", "sft"], ["apo_zero", "hinge"]),
        ),
        "loss_weights": (None, [1.0, 0.3], [0.5, 2.0]),
        "beta": (0.1, 0.5, 0.01),
        "label_smoothing": (0.0, 0.1),
        "f_divergence_type": ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"),
        "f_alpha_divergence_coef": (0.5, 1.0, 2.0),
        "ld_alpha": (None, 0.5, 0.0),
        "use_weighting": (False, True),
        "precompute_ref_log_probs": (False, True),
        "precompute_ref_batch_size": (None, 3),
        "sync_ref_model": (False, True),
        "ref_model_sync_steps": (2, 1),
        "ref_model_mixup_alpha": (0.6, 1.0),
        "truncation_mode": ("keep_start", "keep_end"),
        "padding_free": (False, True),
    },
    "reward": {"center_rewards_coefficient": (None, 0.01, 0.5)},
    "kto": {
        "loss_type": ("kto", "apo_zero_unpaired"),
        "beta": (0.1, 0.5),
        "desirable_weight": (1.0, 1.3),
        "undesirable_weight": (1.0, 0.7),
        "precompute_ref_log_probs": (False, True),
        "precompute_ref_batch_size": (None, 3),
        "sync_ref_model": (False, True),
        "ref_model_sync_steps": (2, 1),
    },
}
ADAPTERS: tuple = (
    None,
    ("lora", {"r": 3, "target_modules": ("q_proj", "v_proj")}),
    ("lora", {"r": 5, "target_modules": "all-linear"}),
    ("lora", {"r": 3, "target_modules": "all-linear", "use_dora": True}),
    ("lora", {"r": 3, "target_modules": ("q_proj", "down_proj"), "use_rslora": True, "bias": "all"}),
    ("lora", {"r": 3, "target_modules": ("q_proj", "v_proj"), "modules_to_save": ("lm_head",)}),
    ("ia3", {"target_modules": ("k_proj", "v_proj", "down_proj"), "feedforward_modules": ("down_proj",)}),
)
#: What else a script does in one way or another: every trainer's, and one's.
WAYS: dict[str, tuple] = {
    "rows": (22, 13, 19, 24, 31, 7),
    "eval_rows": (13, 5, 8, 17),
    "batch": (8, 4),
    "texts": ("plain", "odd"),
    "stream": (False, True),
    "model_from": ("object", "path"),
    "adapters": ADAPTERS,
    "adapters_from": ("config", "model"),
    "eval_sets": (1, 2),
    "callbacks": ("none", "early_stopping", "control", "stop"),
    "twice": ("no", "trains_again", "evaluates_first", "evaluates_raw"),
    "resumes": (False, True),
    "resumes_on": RESUMES_ON,
    "dtype": ("float32", "bfloat16"),
}
OWN_WAYS: dict[str, dict[str, tuple]] = {
    "sft": {
        "data": ("text", "completion", "chat", "chat_completion", "tokens", "formatted"),
        "loss": ("trl", "function", "override"),
        "metrics": ("none", "share"),
    },
    "dpo": {"data": ("pairs", "implicit", "chat"), "reference": ("none", "given")},
    "reward": {"data": ("pairs", "implicit", "chat"), "margins": (False, True)},
    "kto": {"data": ("unpaired", "pairs", "chat", "desired"), "reference": ("none", "given")},
}


def choices_of(trainer: str) -> dict[str, tuple]:
    """What a script of this trainer may have in one way or another."""
    model = {"model": ("llama", *MODELS, *MODELS, *EXPERTS, "mixtral_balanced")}
    of_trl = {name: values for name, values in OF_TRL.items() if trainer != "reward" or name != "router_aux_loss_coef"}
    return {**model, **OWN_WAYS[trainer], **OWN_ARGUMENTS[trainer], **WAYS, **OF_TRAINER, **of_trl}


CHOICES = {trainer: choices_of(trainer) for trainer in TRAINERS}
PLAIN = {trainer: {name: values[0] for name, values in CHOICES[trainer].items()} for trainer in TRAINERS}


def list_ruled_out_adapters(chosen: Choices) -> set[str]:
    """Return the choices of adapters, and of where they come from, that the others rule out."""
    plain: set[str] = set()
    if chosen["model"] not in ADAPTED:
        plain |= {"adapters"}
    if chosen["adapters"] is None:
        plain |= {"adapters_from"}
    if chosen["adapters_from"] == "model":
        plain |= {"model_from"}
    return plain


def evaluate_where_wanted(chosen: Choices) -> None:
    """Let a script evaluate and save as its best model, its callbacks and its schedule need it."""
    if chosen["load_best_model_at_end"] or chosen["callbacks"] == "early_stopping":
        chosen |= {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
        chosen |= {"load_best_model_at_end": True}
    if chosen["lr_scheduler_type"] == "reduce_lr_on_plateau":
        chosen |= {"eval_strategy": "steps"}
    if chosen["save_strategy"] == "best":
        chosen |= {"save_strategy": "epoch"}


def fit(trainer: str, chosen: Choices) -> Choices:
    """Take back choices that no script can make together, in one process either."""
    plain = list_ruled_out_adapters(chosen)
    if chosen["model"] not in (*EXPERTS, "mixtral_balanced"):
        plain |= {"router_aux_loss_coef"}
    if chosen["eval_sets"] == 2:
        plain |= {"load_best_model_at_end", "lr_scheduler_type", "callbacks"}
        chosen |= {"load_best_model_at_end": False, "callbacks": "none", "lr_scheduler_type": "constant"}
    if chosen["stream"]:
        plain |= {
            "train_sampling_strategy",
            "dataloader_drop_last",
        }  # of a stream of less than a batch nothing is left
        chosen["max_steps"] = max(chosen["max_steps"], 4)
    evaluate_where_wanted(chosen)
    if chosen["resumes"]:
        chosen |= {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "save_only_model": False}
        plain |= {"twice", "callbacks", "load_best_model_at_end"}
    if chosen["model"] in (*EXPERTS, "mixtral_balanced"):
        plain |= {"dtype", "bf16"}  # 16 bits turn which experts a token takes
        # One process evaluates another model than the best one after loading that; ranks evaluate the best one.
        chosen |= {"load_best_model_at_end": False, "callbacks": "none"}
    if chosen["dtype"] == "bfloat16" or chosen["bf16"]:
        chosen |= {"optim": "sgd"}
    if chosen["model"] not in trainers.ADAPTED or chosen["model"] == "qwen2":
        # Biases of keys have no gradient but rounding, which these make a step as large as any other.
        plain |= {"optim"} if chosen["optim"] in ("adafactor", "adagrad", "rmsprop") else set()
    if trainer != "sft" and chosen["train_sampling_strategy"] == "group_by_length" or trainer == "kto":
        plain |= {"train_sampling_strategy"}
    if trainer == "sft":
        plain |= _fit_sft(chosen)
    elif trainer == "dpo":
        plain |= _fit_dpo(chosen)
    elif trainer == "kto" and chosen["stream"] or chosen["adapters"] is not None:
        plain |= {"precompute_ref_log_probs", "sync_ref_model"}
    if trainer == "kto" and chosen["precompute_ref_log_probs"]:
        plain |= {"sync_ref_model", "reference"}
    if trainer == "kto" and chosen["adapters"] is not None:
        plain |= {"reference"}
    return {**chosen, **{name: PLAIN[trainer][name] for name in plain if name in chosen}}


def _fit_sft(chosen: Choices) -> set[str]:
    plain: set[str] = set()
    if "chat" not in chosen["data"]:
        plain |= {"assistant_only_loss"}
    if chosen["data"] not in ("completion", "chat_completion"):
        plain |= {"completion_only_loss"}
    if chosen["loss"] != "trl":
        plain |= {"loss_type", "label_smoothing_factor"}
    if not chosen["packing"]:
        plain |= {"packing_strategy", "eval_packing"}
        if chosen["padding_free"]:
            chosen |= {"max_length": None}
    elif chosen["max_length"] is None:
        plain |= {"max_length"}
    if chosen["prediction_loss_only"]:
        plain |= {"metrics"}
    return plain


def _fit_dpo(chosen: Choices) -> set[str]:
    plain: set[str] = set()
    if len(chosen["loss_type"]) == 1:
        plain |= {"loss_weights"}
    if "exo_pair" in chosen["loss_type"]:
        chosen |= {"label_smoothing": 0.1}
    if chosen["stream"] or chosen["adapters"] is not None:
        plain |= {"precompute_ref_log_probs"}
    if chosen["adapters"] is not None or chosen["precompute_ref_log_probs"]:
        plain |= {"sync_ref_model", "reference"}
    if chosen["f_divergence_type"] != "alpha_divergence":
        plain |= {"f_alpha_divergence_coef"}
    return plain


# ---- data ----------------------------------------------------------------------------------------------------------


class Texts:
    """Words of Python's own pages of help, or texts of unusual lengths and letters, drawn under a seed."""

    def __init__(self, seed: int, odd: bool) -> None:
        self.dice, self.odd = random.Random(seed), odd
        self.words = " ".join(topics[name] for name in ("assert", "lambda", "break")).split()

    def draw_pair(self, least: int, most: int) -> tuple[str, str]:
        """Return two texts that differ: whether a reward is above that of the same text, rounding alone decides."""
        first = second = self.draw(least, most)
        while second == first:
            second = self.draw(least, most)
        return first, second

    def draw(self, least: int, most: int) -> str:
        if self.odd and self.dice.random() < 0.3:
            return self.dice.choice(
                ("a", "éß漢", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "1 2 3 4 5 6 7 8 9 10 11 12 13 14", "x y")
            )
        start = self.dice.randrange(len(self.words) - most)
        return " ".join(self.words[start : start + self.dice.randint(least, most)])


def turns(*texts: str) -> list[dict[str, str]]:
    """A conversation: user and assistant in turn."""
    return [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]


def row_of(trainer: str, chosen: Choices, texts: Texts, place: int) -> dict[str, Any]:
    """A row of the data set."""
    kind, draw = chosen["data"], texts.draw
    if trainer == "sft":
        if kind == "text":
            return {"text": draw(2, 9)}
        if kind == "tokens":
            return {"input_ids": [5 + texts.dice.randrange(500) for _ in range(texts.dice.randint(2, 30))]}
        if kind == "formatted":
            return {"question": draw(2, 5), "answer": draw(1, 5)}
        if kind == "chat":
            many = turns(draw(2, 4), draw(1, 4), draw(1, 2), draw(1, 3))
            return {"messages": many[: 2 if place % 3 else 4]}
        if kind == "chat_completion":
            said = turns(draw(2, 4), draw(1, 5))
            return {"prompt": said[:1], "completion": said[1:]}
        return {"prompt": draw(2, 5), "completion": " " + draw(1, 6)}
    if kind == "chat":
        first = draw(2, 4)
        if trainer == "kto":
            said = turns(first, draw(1, 5))
            return {"prompt": said[:1], "completion": said[1:], "label": place % 3 != 1}
        better, worse = texts.draw_pair(1, 5)
        row = {"chosen": turns(first, better), "rejected": turns(first, worse)}
    elif kind == "implicit":
        first = draw(2, 4)
        better, worse = texts.draw_pair(1, 5)
        row = {"chosen": f"{first} {better}", "rejected": f"{first} {worse}"}
    elif kind == "pairs":
        prompt, (better, worse) = draw(2, 4), texts.draw_pair(1, 5)
        row = {"prompt": prompt, "chosen": " " + better, "rejected": " " + worse}
    else:
        return {"prompt": draw(2, 4), "completion": " " + draw(1, 5), "label": kind == "desired" or place % 3 != 1}
    return {**row, "margin": texts.dice.random()} if chosen.get("margins") else row


def build_data(trainer: str, chosen: Choices, rows: int, seed: int, training: bool = False) -> Any:
    """Make a data set of so many rows."""
    texts = Texts(seed, chosen["texts"] == "odd")
    table = Dataset.from_list([row_of(trainer, chosen, texts, place) for place in range(rows)])
    return table.to_iterable_dataset() if training and chosen["stream"] else table


# ---- the script ----------------------------------------------------------------------------------------------------


class OwnSFT(trl.SFTTrainer):
    """A user's subclass: TRL's loss and a further term of it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        return (1.5 * loss, outputs) if return_outputs else 1.5 * loss


def share(evaluated: Any) -> dict[str, float]:
    """A user's `compute_metrics`: numbers that depend on each target, and not on padding."""
    logits = evaluated.predictions[0] if isinstance(evaluated.predictions, tuple) else evaluated.predictions
    found, labels = torch.as_tensor(logits)[:, :-1].argmax(-1), torch.as_tensor(evaluated.label_ids)[:, 1:]
    kept = labels != -100
    return {"share": float((found == labels)[kept].float().mean()), "checksum": float((found % 7)[kept].sum())}


def format_row(row: dict[str, str]) -> str:
    """A user's `formatting_func`."""
    return f"Question: {row['question']} Answer: {row['answer']}"


def peft_config(trainer: str, chosen: Choices) -> Any:
    """The adapters that the script asks for."""
    kind, given = chosen["adapters"]
    given = {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}
    task = "SEQ_CLS" if trainer == "reward" else "CAUSAL_LM"
    if trainer == "reward":
        given.pop("modules_to_save", None)
    return (
        LoraConfig(task_type=task, lora_dropout=0.0, **given) if kind == "lora" else IA3Config(task_type=task, **given)
    )


def load(trainer: str, chosen: Choices, folder: str) -> Any:
    """The script's model."""
    torch.manual_seed(9)
    more = {"dtype": getattr(torch, chosen["dtype"])}
    if trainer == "reward":
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **more)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, **more)
    if chosen["adapters"] is not None and chosen["adapters_from"] == "model":
        model = get_peft_model(model, peft_config(trainer, chosen))
    return model


def arguments(trainer: str, chosen: Choices, out: str, data_ranks: int) -> Any:
    """The script's arguments."""
    plain = PLAIN[trainer]
    given = {name: chosen[name] for name in (*OF_TRAINER, *OWN_ARGUMENTS[trainer]) if chosen[name] != plain[name]}
    given |= {name: chosen[name] for name in ("eval_steps", "save_steps", "gradient_checkpointing", "bf16")}
    given |= {name: chosen[name] for name in OF_TRL if name in chosen}
    if trainer == "kto":
        given.pop("train_sampling_strategy", None)
    if "ref_model_sync_steps" in chosen:
        given |= {name: chosen[name] for name in ("ref_model_sync_steps",)}
    if chosen["model_from"] == "path":
        given |= {"model_init_kwargs": {"dtype": chosen["dtype"]}}
    split = (chosen["accelerator_config"] or {}).get("split_batches", False)
    size = chosen["batch"] if split else chosen["batch"] // data_ranks
    sizes = {"per_device_train_batch_size": size, "per_device_eval_batch_size": size}
    lr = {"learning_rate": 0.1 if chosen["optim"] == "sgd" else 1e-3, "adam_epsilon": 1e-3}
    return arguments_of(out, data_ranks, CLASSES[trainer][1], **{**sizes, **lr, **given})


def make(
    trainer: str, chosen: Choices, folder: str, out: str, data_ranks: int, keeper: Keeper, stop: int | None
) -> Any:
    """The script's trainer."""
    tables: Any = build_data(trainer, chosen, chosen["eval_rows"], EVAL_SEED)
    if chosen["eval_sets"] == 2:
        tables = {"one": tables, "two": build_data(trainer, chosen, 7, 5)}
    options: dict[str, Any] = {
        "train_dataset": build_data(trainer, chosen, chosen["rows"], TRAIN_SEED, True),
        "eval_dataset": tables,
        "processing_class": make_tokenizer(),
    }
    if chosen["adapters"] is not None and chosen["adapters_from"] == "config":
        options["peft_config"] = peft_config(trainer, chosen)
    if chosen.get("reference") == "given":
        options["ref_model"] = load(trainer, {**chosen, "adapters": None}, folder)
    if chosen.get("loss") == "function":
        options["compute_loss_func"] = own_loss
    if chosen.get("metrics") == "share":
        options["compute_metrics"] = share
    if chosen["data"] == "formatted":
        options["formatting_func"] = format_row
    callbacks = trainers.callbacks_of(chosen, keeper, stop)
    model = folder if chosen["model_from"] == "path" else load(trainer, chosen, folder)
    kind = OwnSFT if chosen.get("loss") == "override" else CLASSES[trainer][0]
    made = kind(model=model, args=arguments(trainer, chosen, out, data_ranks), callbacks=callbacks, **options)
    made.remove_callback(PrinterCallback)
    return made


def without_chance(numbers: dict[str, Any]) -> dict[str, Any]:
    """Leave out shares of signs of what rounding alone keeps from zero, as where a model still is its reference."""
    chance = set()
    for name in numbers:
        margins = name.replace("accuracies", "margins").replace("accuracy", "margin")
        if "accurac" in name and margins != name and abs(numbers.get(margins, 1.0)) <= ROUNDED:
            chance.add(name)
    return {name: value for name, value in numbers.items() if name not in chance}


def run_script(
    trainer: str,
    chosen: Choices,
    folder: str,
    out: str,
    spec: str | None,
    part: str = "whole",
    make: Callable = make,
) -> dict[str, Any]:
    """What the script does and finds, by name. `part` is whole, or what comes "before" a stop or "after" it."""
    data_ranks = activate(spec)
    warnings.simplefilter("ignore")
    disable_progress_bars()
    torch.manual_seed(5)
    keeper = Keeper()
    made = make(trainer, chosen, folder, out, data_ranks, keeper, 3 if part == "before" else None)
    found = trainers.train_as_chosen(made, chosen, part)
    found["evaluate"] = made.evaluate()
    if chosen["twice"] == "evaluates_raw":
        found["evaluated raw"] = made.evaluate(build_data(trainer, chosen, 9, 21), metric_key_prefix="raw")
    found |= trainers.read_state(made)
    made.save_model(f"{out}/saved")
    found = {name: without_chance(numbers) for name, numbers in found.items()}
    return {"found": found, "gradient_keys": keeper.gradient_keys, "folder": f"{out}/saved"}


# ---- what is compared ----------------------------------------------------------------------------------------------

#: What does not depend on a stop, before which more is logged.
OF_RESUMED = {"evaluate", "evaluated raw"}
#: Numbers that are sums of what is positive and what is negative: rounding is of the size of the sums, 1 and more.
CANCELLED = re.compile(r"reward|logits/|/kl$|_kl$|^kl$|margin")
#: What 16 bits may turn: which token is the likeliest, which of two rewards or evaluations is better.
ROUNDED_LOW = re.compile(r"share$|checksum$|^best|accurac")
#: Padding is counted, and data ranks pad for themselves.
PADDED = ("total_flos", "flos", "num_input_tokens_seen", "tokens")


def leaves_out(chosen: Choices, name: str, key: str) -> bool:
    """Is this number, or all of this name, not that of one process?"""
    if chosen["resumes"] and name not in OF_RESUMED or key == "total_flos" or "step_time" in key:
        return True
    if "num_tokens" in key and (chosen["resumes"] or chosen.get("padding_free") and chosen["pad_to_multiple_of"]):
        return True  # begins anew after a stop; counts the padding of joined rows, of which each data rank has some
    low = chosen["dtype"] == "bfloat16" or chosen["bf16"]
    return bool(low and ROUNDED_LOW.search(key)) or key in PADDED


def tolerances(chosen: Choices) -> tuple[float, float]:
    """How far numbers, relative, and weights may be from one process."""
    if chosen["dtype"] == "bfloat16" or chosen["bf16"]:
        return 5e-2, 5e-2  # 8 bits: 4e-3 per product, and layouts round at other places
    if chosen["optim"] in ("adafactor", "rmsprop", "adagrad"):
        # Their steps are of one size however small a gradient is, so that its last bits count. Biases of keys, and
        # what adds the same to all rewards, have none but these.
        return 2e-3, 6e-3
    return 1e-4, 5e-5


KINDS = {
    trainer: Kind(
        CHOICES[trainer],
        partial(fit, trainer),
        partial(run_script, trainer),
        tolerances,
        leaves_out,
        lambda key: 1.0 if CANCELLED.search(key) else 0.0,
    )
    for trainer in TRAINERS
}

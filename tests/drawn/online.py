"""GRPO and RLOO scripts with any of their arguments, rewards, adapters and models at once.

A draw of a token belongs to the row of the global batch (`tests/rollouts.py`), or nothing is drawn. Compared is what
`trl_scripts` compares.
"""

from functools import partial
from typing import Any

import trl
from datasets import Dataset
from transformers import PrinterCallback

from hf_parallel.hooks import runtime
from tests import rollouts
from tests.drawn import trainers, trl_scripts
from tests.drawn.bench import Choices, Kind
from tests.drawn.trainers import Keeper
from tests.drawn.trl_scripts import OF_TRAINER, Texts, evaluate_where_wanted, list_ruled_out_adapters, turns
from tests.training import EVAL_SEED, TRAIN_SEED, arguments_of
from tests.trl_scripts import make_tokenizer

CLASSES = {"grpo": (trl.GRPOTrainer, trl.GRPOConfig), "rloo": (trl.RLOOTrainer, trl.RLOOConfig)}
#: Arguments of TRL as they are: of both trainers, and of one.
OF_BOTH: dict[str, tuple] = {
    "num_generations": (2, 4, 8),
    "num_generations_eval": (None, 4),
    "max_completion_length": (6, 3),
    "steps_per_generation": (None, 2, 4),
    "num_iterations": (1, 2),
    "temperature": (1.0, 0.6),
    "top_k": (0, 20),
    "top_p": (1.0, 0.9),
    "min_p": (None, 0.02),
    "repetition_penalty": (1.0, 1.2),
    "beta": (0.0, 0.1),
    "epsilon": (0.2, 0.05),
    "epsilon_high": (None, 0.3),
    "reward_weights": (None, [1.0, 0.3]),
    "mask_truncated_completions": (False, True),
    "sync_ref_model": (False, True),
    "ref_model_sync_steps": (2, 1),
    "ref_model_mixup_alpha": (0.6, 1.0),
    "shuffle_dataset": (True, False),
    "disable_dropout": (False, True),
    "pad_to_multiple_of": (None, 8),
    "log_unique_prompts": (False, True),
}
OF_ONE: dict[str, dict[str, tuple]] = {
    "grpo": {
        "delta": (None, 1.5),
        "importance_sampling_level": ("token", "sequence"),
        "multi_objective_aggregation": ("sum_then_normalize", "normalize_then_sum"),
        "scale_rewards": ("group", "batch", "none"),
        "loss_type": ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"),
        # Completions of one prompt share their first entropy: where the quantile is among these, rounding decides.
        "top_entropy_quantile": (1.0,),
        "off_policy_mask_threshold": (None, 0.5),
        "use_bias_correction_kl": (False, True),
    },
    "rloo": {"normalize_advantages": (False, True), "reward_clip_range": (None, (-1.0, 1.5))},
}
WAYS: dict[str, tuple] = {
    **{name: trl_scripts.WAYS[name] for name in ("model_from", "adapters", "adapters_from", "texts")},
    **{name: trl_scripts.WAYS[name] for name in ("callbacks", "dtype", "resumes", "resumes_on")},
    "model": ("llama", *trl_scripts.MODELS),
    "rows": (22, 13, 31),
    "eval_rows": (8, 13, 5),
    "batch": (8, 16),
    "data": ("text", "chat"),
    "draws": ("by_row", "none"),
    "cache": (True, False),
    "rewards": ("one", "two"),
    "eval_sets": (1,),
    "twice": ("no", "trains_again", "evaluates_first"),
}
LEFT_OUT = (
    *("train_sampling_strategy", "prediction_loss_only", "include_num_input_tokens_seen", "accelerator_config"),
    *("eval_use_gather_object", "average_tokens_across_devices"),
)
ARGUMENTS = {name: values for name, values in OF_TRAINER.items() if name not in LEFT_OUT}
ARGUMENTS["optim"] = ("sgd", "adamw_torch")  # others make a step of a rounding, and a step may turn a token
CHOICES = {kind: {**WAYS, **OF_BOTH, **OF_ONE[kind], **ARGUMENTS} for kind in CLASSES}


def fit(trainer: str, chosen: Choices) -> Choices:
    """Take back choices that no script can make together, in one process either."""
    plain = list_ruled_out_adapters(chosen)
    if chosen["adapters"] is not None or not chosen["beta"]:
        plain |= {"sync_ref_model"}
    if not chosen["beta"]:
        plain |= {"use_bias_correction_kl"}
    if chosen["rewards"] == "one":
        plain |= {"reward_weights"}
    if chosen["batch"] == 8 and chosen["num_generations"] == 8:
        plain |= {"num_generations_eval"}
    evaluate_where_wanted(chosen)
    if chosen["resumes"]:
        chosen |= {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "save_only_model": False}
        # A draw goes by how often was generated before, and completions that serve several steps are not saved.
        chosen |= {"draws": "none", "steps_per_generation": None, "gradient_accumulation_steps": 1}
        plain |= {"twice", "callbacks", "load_best_model_at_end", "num_iterations"}
    # Sixteen bits turn which token is drawn, and all that follows from it.
    plain |= {"dtype", "bf16"}
    if chosen["max_steps"] < 0:
        chosen |= {"max_steps": 4}
    return {**chosen, **{name: CHOICES[trainer][name][0] for name in plain if name in chosen}}


def build_data(chosen: Choices, rows: int, seed: int) -> Dataset:
    """Prompts, and a column for the rewards."""
    texts = Texts(seed, chosen["texts"] == "odd")
    drawn = [texts.draw(2, 5) for _ in range(rows)]
    prompts = drawn if chosen["data"] == "text" else [turns(text) for text in drawn]
    return Dataset.from_list([{"prompt": prompt, "wanted": place % 5} for place, prompt in enumerate(prompts)])


def reward(completions: list, wanted: list[int], **kwargs: Any) -> list[float]:
    """A reward that goes by a column of the data set, too."""
    texts = [text if isinstance(text, str) else text[0]["content"] for text in completions]
    pairs = zip(texts, wanted, strict=True)
    return [len(set(text)) - len(text) / 4 + text.count("e") * number for text, number in pairs]


def second_reward(prompts: list, completions: list, **kwargs: Any) -> list[float | None]:
    """Another one, which says nothing about some texts."""
    plain = [
        [part if isinstance(part, str) else part[0]["content"] for part in parts] for parts in (prompts, completions)
    ]
    return rollouts.second_reward(*plain)


def make(
    trainer: str, chosen: Choices, folder: str, out: str, data_ranks: int, keeper: Keeper, stop: int | None
) -> Any:
    """The script's trainer."""
    mesh = runtime.mesh() if runtime.current() is not None else None
    kwargs: dict[str, Any] = {"use_cache": chosen["cache"]}
    if chosen["draws"] == "by_row":
        rollouts.draw_by_row(0 if mesh is None else mesh.data_rank)
    else:
        kwargs["do_sample"] = False
    own = {**OF_BOTH, **OF_ONE[trainer], **ARGUMENTS}
    given = {name: chosen[name] for name in own if chosen[name] != own[name][0]}
    names = (
        "num_generations",
        "max_completion_length",
        "ref_model_sync_steps",
        "eval_steps",
        "save_steps",
        "bf16",
        "beta",
    )
    given |= {name: chosen[name] for name in (*names, "gradient_checkpointing")}
    size = chosen["batch"] // data_ranks
    sizes = {"per_device_train_batch_size": size, "per_device_eval_batch_size": size}
    lr = {"learning_rate": 0.1 if chosen["optim"] == "sgd" else 1e-3, "adam_epsilon": 1e-3}
    more = {
        "generation_kwargs": kwargs,
        **({"model_init_kwargs": {"dtype": "float32"}} if chosen["model_from"] == "path" else {}),
    }
    kind, arguments_kind = CLASSES[trainer]
    arguments = arguments_of(out, data_ranks, arguments_kind, **{**sizes, **lr, **given, **more})
    options: dict[str, Any] = {
        "train_dataset": build_data(chosen, chosen["rows"], TRAIN_SEED),
        "eval_dataset": build_data(chosen, chosen["eval_rows"], EVAL_SEED),
        "processing_class": make_tokenizer(),
        "reward_funcs": [reward, second_reward] if chosen["rewards"] == "two" else reward,
    }
    if chosen["adapters"] is not None and chosen["adapters_from"] == "config":
        options["peft_config"] = trl_scripts.peft_config(trainer, chosen)
    model = folder if chosen["model_from"] == "path" else trl_scripts.load(trainer, chosen, folder)
    made = kind(model=model, args=arguments, callbacks=trainers.callbacks_of(chosen, keeper, stop), **options)
    made.remove_callback(PrinterCallback)
    return made


KINDS = {
    trainer: Kind(
        CHOICES[trainer],
        partial(fit, trainer),
        partial(trl_scripts.run_script, trainer, make=make),
        trl_scripts.tolerances,
        trl_scripts.leaves_out,
        lambda key: 1.0,  # advantages add up to zero, and so do losses
    )
    for trainer in CLASSES
}

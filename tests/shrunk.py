"""A recipe shrunk to what two cores train in seconds: its method, kinds of axes and arguments on a tiny model."""

from dataclasses import fields
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hf_parallel.ask.config import ParallelConfig
from hf_parallel.cli.recipe_file import Recipe, list_options
from tests import models, trl_scripts

#: Sizes of the tiny model, where its config has them; a row of 64 weights is a block of 4 bits.
SIZES = {
    **{"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 16},
    **{"vocab_size": 256, "max_position_embeddings": 128, "num_experts": 4, "num_experts_per_tok": 2},
}
#: What `tests/trl_scripts.py` sets for all, or what is too long here.
REPLACED = {
    *("output_dir", "max_steps", "logging_steps", "save_steps", "bf16", "dtype", "learning_rate"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "model_name_or_path"),
    *("dataset_name", "dataset_config", "reward_funcs", "num_generations", "max_completion_length", "lora_r"),
}
DATA = {"sft": "chat", "dpo": "preference", "grpo": "prompt"}
GRPO = (
    "--reward_funcs tests.rollouts.reward --num_generations 2 --max_completion_length 8 "
    '--generation_kwargs {"use_cache":true}'
)
MOST_RANKS = 4


def config_of(recipe: Recipe) -> Any:
    """The model's config with the same kind of layers, fewer and narrower; rotations without stretching."""
    values = {k: v for k, v in recipe.config().to_dict().items() if k not in ("layer_types", "rope_parameters")}
    small = {key: size for key, size in SIZES.items() if values.get(key) is not None}
    groups = max(1, 4 * values["num_key_value_heads"] // values["num_attention_heads"])
    own = {"num_key_value_heads": groups, "initializer_range": 0.1, "use_cache": False, "dtype": "float32"}
    return AutoConfig.for_model(**{**values, **small, **own, "eos_token_id": 0, "pad_token_id": 1})


def write_model(recipe: Recipe, folder: str) -> None:
    """Weights drawn under a seed, with a tokenizer."""
    torch.manual_seed(models.SEED)
    AutoModelForCausalLM.from_config(config_of(recipe)).save_pretrained(folder)
    trl_scripts.make_tokenizer().save_pretrained(folder)


def spec_of(recipe: Recipe) -> str:
    """The recipe's axes at a size of two, as many as four ranks hold; of one GPU two data ranks."""
    sizes: dict[str, int] = {}
    for axis in ("pp", "tp", "cp", "ep", "dp_shard", "dp_replicate"):
        if getattr(recipe.layout, f"{axis}_size") > 1 and 2 ** (len(sizes) + 1) <= MOST_RANKS:
            sizes[axis] = 2
    settings = {} if sizes.get("pp") is None else {"pipeline_microbatches": 4}
    kept = ("activation_checkpointing", "pipeline_schedule", "context_parallel", "zero_stage")
    default = {key.name: key.default for key in fields(ParallelConfig)}
    settings |= {key: v for key in kept if (v := getattr(recipe.layout, key)) != default[key]}
    return ",".join(f"{key}={value}" for key, value in ((sizes or {"dp_shard": 2}) | settings).items())


def flags_of(recipe: Recipe) -> str:
    """Everything else that the recipe says."""
    words = {key: value for key, value in list_options(recipe, {"model_name_or_path"}).items() if key not in REPLACED}
    words |= {"lora_r": 4, "learning_rate": 1.0} if recipe.adapter_rank else {}
    words |= {"dataloader_drop_last": True}
    spelled = (f"--{key} {str(v).lower() if isinstance(v, bool) else v}" for key, v in words.items())
    return " ".join([*spelled, *([GRPO] if recipe.method == "grpo" else [])])

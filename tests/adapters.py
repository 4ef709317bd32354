"""What tests of adapters share: names of modules, layouts, and the settings of a script's LoraConfig."""

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
ENDS = ("embed_tokens", "lm_head")
SPECS = (
    "dp_shard=2",
    "dp_replicate=2",
    "tp=2",
    "pp=2",
    "dp_replicate=2,dp_shard=2",
    "tp=2,dp_shard=2",
    "pp=2,dp_shard=2",
    "tp=2,pp=2",
)


def lora(targets, **settings):
    """For `Script.lora`: adapters whose B does not start at zero, so both halves have gradients in the first step."""
    chosen = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "target_modules": targets, **settings}
    return tuple(chosen.items())

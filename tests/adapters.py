"""What tests of adapters share: names of modules, layouts, and the settings of a script's LoraConfig."""

import torch

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


def logits_while_merging(adapted, out):
    """Logits of a few tokens: with the adapters, merged, taken out again, and merged for good; saved to `out`."""

    def logits(of):
        with torch.no_grad():
            return of(input_ids=torch.arange(16).reshape(2, 8)).logits.clone()

    results = [logits(adapted)]
    adapted.merge_adapter()
    results.append(logits(adapted))
    adapted.unmerge_adapter()
    results.append(logits(adapted))
    whole = adapted.merge_and_unload()
    results.append(logits(whole))
    whole.save_pretrained(out)
    return results

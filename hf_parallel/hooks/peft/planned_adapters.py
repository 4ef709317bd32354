"""Adapters in a dry run: peft's own injection, with our patches, into a parallel model that has no memory yet.

    dry_run(config, "dp_shard=8", adapt=lora(16))                    # LoRA on every linear but the head
    dry_run(config, "dp_shard=8", adapt=lora(16), pack=four_bit())   # QLoRA: the base in 4 bits

The planner knows nothing of peft and bitsandbytes, so a caller hands it these functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from hf_parallel.apply.parallelize import state_of
from hf_parallel.ask.spec import refuse
from hf_parallel.axes.axis import Packing
from hf_parallel.hooks import runtime
from hf_parallel.hooks.patching import apply_patches, undo

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


def plan_lora(
    rank: int, targets: str | Sequence[str] = "all-linear", **settings: object
) -> Callable[[nn.Module], None]:
    """Return a function that adds adapters of `rank` to a meta model, parallel or not, as get_peft_model does.

    Args:
        targets: LoraConfig's target_modules.
        settings: others of LoraConfig.
    """
    if rank < 1:
        refuse(f"lora={rank}", "adapters have a rank of one at least", "16")

    def adapt(model: nn.Module) -> None:
        from peft import LoraConfig, get_peft_model

        from hf_parallel.hooks.patches import list_patches

        state, config = state_of(model), LoraConfig(r=rank, target_modules=targets, **settings)
        if state is None:
            with torch.device("meta"):
                get_peft_model(model, config)
            return
        done = apply_patches([patch for patch in list_patches() if patch.library == "peft"])
        try:
            with runtime.pretend_mesh(state.mesh), torch.device("meta"):
                get_peft_model(model, config)
        finally:
            undo(done)

    return adapt


def plan_four_bit(double: bool = False) -> Packing:
    """Return the packing that makes a split meta model expect weights of NF4, as loading in 4 bits does."""
    from transformers import BitsAndBytesConfig

    from hf_parallel.hooks import bitsandbytes as packing

    class PackFrozen(packing.Pack):
        """Gradients of what is packed do not exist; adapters come with theirs."""

        def __call__(self, model: PreTrainedModel) -> None:
            super().__call__(model)
            model.requires_grad_(False)

    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=double,
    )
    packing.check_four_bit(config)
    return PackFrozen(config)

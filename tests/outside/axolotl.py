"""Axolotl's Trainer from a checkout: it packs examples to rows, and its mixins make optimizer and schedule."""

import json
from pathlib import Path

from tests.outside.cases import Case

SCRIPT = str(Path(__file__).parent / "scripts" / "axolotl_trainer.py")


def with_settings(more: str = "", **settings: object) -> Case:
    """A case with arguments of training; JSON without spaces, because arguments are split at them."""
    given = json.dumps({"max_steps": 3, **settings}, separators=(",", ":")).replace('"ROWS"', "ROWS")
    return Case(SCRIPT, f"--model ROOT/llama --output_dir OUT --settings {given} {more}", needs=("axolotl",))


ROWS = {"per_device_train_batch_size": "ROWS", "per_device_eval_batch_size": "ROWS"}
#: One row of several examples per process and micro-batch.
PACKED = {
    "sample_packing": True,
    "gradient_accumulation_steps": "ROWS",
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "max_steps": 2,
}
AXOLOTL = {
    "axolotl": with_settings(**ROWS),
    "axolotl, rates by group": with_settings(
        **ROWS,
        embedding_lr=0.02,
        lr_groups=[{"name": "ups", "modules": ["up_proj"], "lr": 0.005}],
        lr_scheduler_type="cosine",
        cosine_min_lr_ratio=0.2,
    ),
    "axolotl, LoRA+": with_settings("--lora", **ROWS, loraplus_lr_ratio=4.0, alternate_lr_scheduler_type="rex"),
    "axolotl, packed": with_settings(**PACKED, sample_packing_drop_attention_mask=True),
    "axolotl, packed in order": with_settings(
        **PACKED, sample_packing_sequentially=True, curriculum_sampling=True, sample_packing_drop_attention_mask=True
    ),
    "axolotl, packed, mask by example": with_settings(**PACKED),
    "axolotl, packed, real batches": with_settings(
        **ROWS, sample_packing=True, multipack_real_batches=True, sample_packing_drop_attention_mask=True, max_steps=2
    ),
    "axolotl, packed, LoRA, saved": with_settings(
        "--lora", **PACKED, sample_packing_drop_attention_mask=True, save_strategy="steps", save_steps=1
    ),
}

"""LoRA, DoRA and 4-bit bases on a model that is parallel already."""

"""bitsandbytes: 4-bit bases, 8-bit optimizers."""

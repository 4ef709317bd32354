"""Which attention kernel the layers call, and flash attention that needs no package but torch."""

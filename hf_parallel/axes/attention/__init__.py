"""The attention kernel that layers call, and flash attention that needs no package but torch."""

"""Expert parallelism: whole experts on different ranks."""

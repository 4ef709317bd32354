"""What a training does while it runs: where ranks wait, and where a number went bad."""

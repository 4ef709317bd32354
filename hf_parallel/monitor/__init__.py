"""What a training does while it runs: its time and memory, where ranks wait, and where a number went bad."""

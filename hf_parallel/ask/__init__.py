"""The user's request: a spec as text, and the sizes and settings it stands for."""

"""Loading through `from_pretrained`."""

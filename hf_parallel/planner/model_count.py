"""Count a Hugging Face model on the meta device: every matrix of every block, without a table of names."""

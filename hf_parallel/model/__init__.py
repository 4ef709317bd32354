"""What a Hugging Face model is: read once, before anything is changed."""

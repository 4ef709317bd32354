"""Reading a Hugging Face model, once, before anything is changed."""

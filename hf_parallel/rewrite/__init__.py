"""Hugging Face module -> parallel module, in place; one file per axis."""

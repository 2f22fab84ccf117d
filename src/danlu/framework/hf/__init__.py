"""Hugging Face folders: import, export, comparison with `transformers`."""

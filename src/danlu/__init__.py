"""Danlu: train large models on the machines that are really there."""

__version__ = "0.1.0"

"""Activation memory: what to keep, and what to recompute."""

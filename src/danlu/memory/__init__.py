"""Bytes: what to keep, and what to compute again."""

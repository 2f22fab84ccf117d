"""Checkpoints of other systems, read without executing anything in them. Nothing here needs torch."""

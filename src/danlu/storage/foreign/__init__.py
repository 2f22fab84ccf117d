"""Checkpoints of other systems, read without running anything that is in them. Nothing here needs torch."""

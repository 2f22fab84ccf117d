"""Checkpoints: tensors under global names in hashed chunks, whatever layout wrote them or reads them.

`CheckpointEngine` in `engine.py` is the entry point of a run; `CheckpointReader` in `reader.py` needs no torch.
"""

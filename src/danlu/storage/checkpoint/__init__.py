"""Checkpoints: tensors under global names in hashed chunks, whatever layout wrote them or reads them.

`Checkpoints` in `checkpoints.py` is the door for a training run; `Reader` in `reader.py` needs no torch.
"""

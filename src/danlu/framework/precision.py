"""Dtypes of groups of layers."""

from fnmatch import fnmatchcase

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from danlu.spec.recipe import ComputeDtype, PrecisionConfig

DTYPES: dict[ComputeDtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(precision: PrecisionConfig, unit: str) -> torch.dtype:
    """The dtype in which a unit (`embed`, `blocks.3`, `head`) multiplies matrices."""
    return DTYPES[_group(precision, unit)[0]]


def mixed_precision_policy(precision: PrecisionConfig, unit: str) -> MixedPrecisionPolicy:
    """What FSDP casts a unit's parameters, inputs and gradients to; fp32 states stay untouched."""
    compute, reduce = _group(precision, unit)
    if compute == reduce == "fp32" and not precision.layers:
        return MixedPrecisionPolicy()
    # With several groups every unit casts its input: the previous one may compute in another dtype.
    return MixedPrecisionPolicy(param_dtype=DTYPES[compute], reduce_dtype=DTYPES[reduce])


def _group(precision: PrecisionConfig, unit: str) -> tuple[ComputeDtype, ComputeDtype]:
    chosen = (precision.compute, precision.reduce)
    for layer in precision.layers:
        if fnmatchcase(unit, layer.match):
            chosen = (layer.compute, layer.reduce)
    return chosen

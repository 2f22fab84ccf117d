"""Dtypes of groups of layers."""

from fnmatch import fnmatchcase

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from danlu.spec.recipe import ComputeDtype, MatmulFormat, PrecisionConfig

DTYPES: dict[ComputeDtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(precision: PrecisionConfig, unit: str) -> torch.dtype:
    """The dtype in which a unit (`embed`, `blocks.3`, `head`) multiplies matrices."""
    return DTYPES[_group(precision, unit)[0]]


def matmul_format(precision: PrecisionConfig, unit: str) -> MatmulFormat:
    """The format of the matrix products of a unit (`blocks.3`, `blocks.3.mlp.experts`)."""
    return _group(precision, unit)[2]


def mixed_precision_policy(precision: PrecisionConfig, unit: str) -> MixedPrecisionPolicy:
    """What FSDP casts a unit's parameters, inputs and gradients to; fp32 states stay untouched."""
    compute, reduce, _ = _group(precision, unit)
    if compute == reduce == "fp32" and not precision.layers:
        return MixedPrecisionPolicy()
    # With several groups every unit casts its input: the previous one may compute in another dtype.
    return MixedPrecisionPolicy(param_dtype=DTYPES[compute], reduce_dtype=DTYPES[reduce])


def _group(precision: PrecisionConfig, unit: str) -> tuple[ComputeDtype, ComputeDtype, MatmulFormat]:
    chosen = (precision.compute, precision.reduce, precision.matmul)
    for layer in precision.layers:
        if fnmatchcase(unit, layer.match):
            chosen = (layer.compute or precision.compute, layer.reduce, layer.matmul or precision.matmul)
    return chosen

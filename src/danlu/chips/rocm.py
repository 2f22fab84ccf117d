"""AMD: PyTorch gives its devices CUDA's name and its RCCL NCCL's, and its build distinguishes the two.

Block-scaled fp8 is emulated: MI300's e4m3 is another one (FNUZ, up to 240), and nothing is written for MI350's yet.
"""

import torch

from danlu.chips.accelerator import AcceleratorRuntime
from danlu.chips.descriptor import ChipDescriptor


def _unsupported_build() -> str:
    return "" if torch.version.hip is not None else "this PyTorch is built without ROCm: install a ROCm build of torch"


def describe() -> ChipDescriptor:
    """The descriptor of AMD's chips."""
    return ChipDescriptor(name="rocm", runtime=AcceleratorRuntime("cuda", _unsupported_build), backend="nccl")

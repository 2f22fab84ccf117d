"""NVIDIA."""

import torch

from danlu.chips.accelerator import AcceleratorRuntime
from danlu.chips.descriptor import ChipDescriptor


def _unsupported_build() -> str:
    if torch.version.hip is not None:
        return "this PyTorch is built for ROCm: use the chip `rocm`"
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA: install a CUDA build of torch"
    return ""


def describe() -> ChipDescriptor:
    """The descriptor of NVIDIA's chips."""
    return ChipDescriptor(name="cuda", runtime=AcceleratorRuntime("cuda", _unsupported_build), backend="nccl")

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


def _matmul_formats() -> frozenset[str]:
    """Compute capability 9.0 multiplies blocks of 128 with fp32 scales (from CUDA 12.9 on), 10.x blocks of 32.

    8.9 has e4m3, but scales for whole rows only. `torch.nn.functional.scaled_mm` came with torch 2.10.
    """
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return frozenset()
    major, _ = torch.cuda.get_device_capability()
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split("."))
    if major == 9 and cuda >= (12, 9):
        return frozenset({"fp8"})
    return frozenset({"mxfp8"}) if major == 10 else frozenset()


def describe() -> ChipDescriptor:
    """The descriptor of NVIDIA's chips."""
    return ChipDescriptor(
        name="cuda",
        runtime=AcceleratorRuntime("cuda", _unsupported_build),
        backend="nccl",
        matmul_formats=_matmul_formats,
    )

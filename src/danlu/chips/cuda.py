"""NVIDIA."""

import torch

from danlu.chips.accelerator import AcceleratorCapabilities, AcceleratorRuntime, nccl_support
from danlu.chips.descriptor import ChipDescriptor, SchedulerResources
from danlu.chips.health import DeviceSelfTest
from danlu.spec import Chip

# Dense peaks, on tensor cores where they support the dtype. NVIDIA A100 data sheet (June 2021); NVIDIA H100 data sheet
# (SXM, half of the figures "with sparsity"); NVIDIA H200 data sheet.
_H100_PEAK = {"fp64": 67e12, "fp32": 67e12, "tf32": 494.5e12, "bf16": 989.5e12, "fp16": 989.5e12, "fp8": 1979e12}
_A100_PEAK = {"fp64": 19.5e12, "fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12}
_FIGURES = {
    "A100-SXM4-40GB": (40e9, 1555e9, _A100_PEAK),
    "A100-SXM4-80GB": (80e9, 2039e9, _A100_PEAK),
    "H100 80GB HBM3": (80e9, 3350e9, _H100_PEAK),
    "H200": (141e9, 4800e9, _H100_PEAK),
}
DATA_SHEETS = {
    name: Chip(name=f"NVIDIA {name}", kind="cuda", memory=int(memory), memory_bandwidth=bandwidth, peak=peak)  # type: ignore[arg-type]
    for name, (memory, bandwidth, peak) in _FIGURES.items()
}


def _unsupported_build() -> str:
    if torch.version.hip is not None:
        return "this PyTorch is built for ROCm: use the chip `rocm`"
    if torch.version.cuda is None:
        return "this PyTorch is built without CUDA: install a CUDA build of torch"
    return ""


def describe() -> ChipDescriptor:
    """The descriptor of NVIDIA's chips."""
    runtime = AcceleratorRuntime("cuda", _unsupported_build)
    return ChipDescriptor(
        name="cuda",
        runtime=runtime,
        capabilities=AcceleratorCapabilities(runtime, DATA_SHEETS),
        collectives=nccl_support(),
        health=DeviceSelfTest(runtime, runtime.memory_available),
        scheduler=SchedulerResources("gpu", "nvidia.com/gpu", ("CUDA_VISIBLE_DEVICES",)),
    )

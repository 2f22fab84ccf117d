"""AMD: PyTorch gives its devices CUDA's name, and its build distinguishes the two."""

import torch

from danlu.chips.accelerator import AcceleratorCapabilities, AcceleratorRuntime, nccl_support
from danlu.chips.descriptor import ChipDescriptor, SchedulerResources
from danlu.chips.health import DeviceSelfTest
from danlu.spec import Chip

# Dense matrix peaks of the AMD Instinct MI250X and MI300X data sheets. The driver shows each of the MI250X's two
# dies as a device, so its figures are halved.
_FIGURES = {
    "MI250X": (64 * 2**30, 1.6e12, {"fp64": 47.85e12, "fp32": 47.85e12, "bf16": 191.5e12, "fp16": 191.5e12}),
    "MI300X": (
        192 * 2**30,
        5.3e12,
        {
            "fp64": 163.4e12,
            "fp32": 163.4e12,
            "tf32": 653.7e12,
            "bf16": 1307.4e12,
            "fp16": 1307.4e12,
            "fp8": 2614.9e12,
        },
    ),
}
DATA_SHEETS = {
    name: Chip(name=f"AMD Instinct {name}", kind="rocm", memory=memory, memory_bandwidth=bandwidth, peak=peak)  # type: ignore[arg-type]
    for name, (memory, bandwidth, peak) in _FIGURES.items()
}


def _unsupported_build() -> str:
    return "" if torch.version.hip is not None else "this PyTorch is built without ROCm: install a ROCm build of torch"


def describe() -> ChipDescriptor:
    """The descriptor of AMD's chips."""
    runtime = AcceleratorRuntime("cuda", _unsupported_build)
    return ChipDescriptor(
        name="rocm",
        runtime=runtime,
        capabilities=AcceleratorCapabilities(runtime, DATA_SHEETS),
        collectives=nccl_support(),
        health=DeviceSelfTest(runtime, runtime.memory_available),
        scheduler=SchedulerResources("gpu", "amd.com/gpu", ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")),
    )

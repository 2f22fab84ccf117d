"""Huawei Ascend, through the `torch_npu` extension, which PyTorch loads by itself when it is installed."""

from importlib.util import find_spec

from danlu.chips.accelerator import AcceleratorRuntime
from danlu.chips.descriptor import ChipDescriptor


def _unsupported_build() -> str:
    return "" if find_spec("torch_npu") else "torch_npu is not installed: install the one made for this PyTorch"


def describe() -> ChipDescriptor:
    """The descriptor of Ascend chips."""
    return ChipDescriptor(name="ascend", runtime=AcceleratorRuntime("npu", _unsupported_build), backend="hccl")

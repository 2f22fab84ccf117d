"""Huawei Ascend, through the `torch_npu` extension, which PyTorch loads by itself when it is installed."""

from importlib.util import find_spec
from itertools import product

from danlu.chips.accelerator import AcceleratorRuntime
from danlu.chips.descriptor import OPERATIONS, ChipDescriptor, CollectiveSupport, SchedulerResources, WireDtype
from danlu.chips.health import DeviceSelfTest
from danlu.spec import CollectiveOp


def _unsupported_build() -> str:
    return "" if find_spec("torch_npu") else "torch_npu is not installed: install the one made for this PyTorch"


def hccl_support() -> CollectiveSupport:
    """What HCCL declares: fp64 and uint8 can be sent but not reduced, and the caller computes means."""
    reduced: tuple[WireDtype, ...] = ("fp32", "bf16", "fp16", "int64", "int32")
    moved: tuple[CollectiveOp, ...] = ("all_gather", "all_to_all", "p2p")
    carried: tuple[WireDtype, ...] = ("fp64", "uint8")
    return CollectiveSupport(
        backend="hccl",
        supported=frozenset(product(OPERATIONS, reduced)) | frozenset(product(moved, carried)),
        no_avg_dtypes=frozenset(reduced),
    )


def describe() -> ChipDescriptor:
    """The descriptor of Ascend chips, without data sheets by precision: measure with `danlu probe`."""
    runtime = AcceleratorRuntime("npu", _unsupported_build)
    return ChipDescriptor(
        name="ascend",
        runtime=runtime,
        collectives=hccl_support(),
        health=DeviceSelfTest(runtime, runtime.memory_available),
        scheduler=SchedulerResources("npu", "huawei.com/Ascend910", ("ASCEND_RT_VISIBLE_DEVICES",)),
    )

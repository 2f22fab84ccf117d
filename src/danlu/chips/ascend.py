"""Huawei Ascend, through the `torch_npu` extension, which PyTorch loads by itself when it is installed."""

from importlib.util import find_spec
from itertools import product

from danlu.chips.accelerator import AcceleratorRuntime
from danlu.chips.descriptor import OPERATIONS, Collectives, Descriptor, SchedulerNames, Wire
from danlu.chips.health import SelfCheck
from danlu.spec import Operation


def _build_lacks() -> str:
    return "" if find_spec("torch_npu") else "torch_npu is not installed: install the one made for this PyTorch"


def hccl() -> Collectives:
    """What HCCL declares: fp64 and uint8 are carried but not reduced, and means are left to the caller."""
    reduced: tuple[Wire, ...] = ("fp32", "bf16", "fp16", "int64", "int32")
    moved: tuple[Operation, ...] = ("all_gather", "all_to_all", "p2p")
    carried: tuple[Wire, ...] = ("fp64", "uint8")
    return Collectives(
        backend="hccl",
        operations=frozenset(product(OPERATIONS, reduced)) | frozenset(product(moved, carried)),
        no_average=frozenset(reduced),
    )


def describe() -> Descriptor:
    """The descriptor of Ascend chips. No data sheet by precision is known to it: measure with `danlu probe`."""
    runtime = AcceleratorRuntime("npu", _build_lacks)
    return Descriptor(
        name="ascend",
        runtime=runtime,
        collectives=hccl(),
        health=SelfCheck(runtime, runtime.memory_available),
        scheduler=SchedulerNames("npu", "huawei.com/Ascend910", ("ASCEND_RT_VISIBLE_DEVICES",)),
    )

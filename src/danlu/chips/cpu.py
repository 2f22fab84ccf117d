"""The CPU: available on every machine, and the complete reference for a descriptor."""

import ctypes
import os
import warnings
from dataclasses import dataclass
from itertools import product

import torch

from danlu.chips import host
from danlu.chips.descriptor import OPERATIONS, ChipDescriptor, CollectiveSupport, SchedulerResources, WireDtype
from danlu.chips.health import DeviceSelfTest
from danlu.spec import Chip, CollectiveOp


@dataclass(frozen=True)
class CpuRuntime:
    """Ranks share the host; each uses some cores, by the number of threads its launcher sets."""

    def is_available(self) -> bool:
        """Always: this code runs on one."""
        return True

    def unavailable_reason(self) -> str:
        """Empty: it is available."""
        return ""

    def device_count(self) -> int:
        """Physical cores this process may use, so that a rank has at least one."""
        return host.physical_cores()

    def set_device(self, local_rank: int) -> torch.device:
        """The same device for every rank; any number of ranks may share it. The process keeps the memory it frees."""
        if not _keep_freed_memory():
            warnings.warn(
                "this C library has no glibc mallopt to keep freed memory: every step faults its memory in again",
                stacklevel=2,
            )
        return torch.device("cpu")

    def synchronize(self) -> None:
        """Nothing to wait for: operators return when they are done."""

    def max_memory(self) -> int:
        """Peak resident set of this process."""
        return host.peak_resident_memory()

    def memory_total(self) -> int:
        """Memory of the host, or of the container if that is less; shared by its ranks."""
        return host.memory_total()

    def seed(self, value: int) -> None:
        """Seed the host's generator."""
        torch.manual_seed(value)


@dataclass(frozen=True)
class CpuCapabilities:
    """What is known of a CPU without measuring it."""

    def data_sheet(self) -> Chip | None:
        """None: no data sheet has a rank's share of a CPU."""
        return None

    def pinned_memory(self) -> bool:
        """False: there is no device to copy to."""
        return False

    def ipc(self) -> bool:
        """True: processes share memory by mapping it."""
        return True

    def rdma(self) -> bool:
        """True when the host has an InfiniBand or RoCE card."""
        return bool(host.rdma_devices())


@dataclass(frozen=True)
class CpuTelemetry:
    """Load and memory, from the kernel."""

    def read(self) -> dict[str, float]:
        """Runnable processes per core over the last minute; resident set of this process; free memory of the host."""
        return {
            "load_per_core": os.getloadavg()[0] / host.physical_cores(),
            "resident": float(host.resident_memory()),
            "memory_available": float(host.memory_available()),
        }


def _keep_freed_memory() -> bool:
    """Make the C library keep the memory this process frees for its next allocation; True if it does (glibc).

    A step frees and allocates the same large tensors as the one before. By default glibc returns them to the system in
    between and faults them in again page by page, each cleared first. Kept, they cost some memory at the peak (most
    where sizes change from step to step, as for experts), and other processes cannot use it until this one exits.
    """
    maps_at_most, trim_threshold = -4, -1
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(maps_at_most, 0)) and bool(mallopt(trim_threshold, -1))


_GLOO_DTYPES: tuple[WireDtype, ...] = ("fp64", "fp32", "bf16", "fp16", "int64", "int32", "uint8")


def gloo_support() -> CollectiveSupport:
    """What gloo supports as PyTorch 2.13 builds it; tests/multiprocess/test_probe.py verifies every entry."""
    sent: tuple[CollectiveOp, WireDtype] = ("p2p", "fp8")
    return CollectiveSupport(
        backend="gloo",
        supported=frozenset(product(OPERATIONS, _GLOO_DTYPES)) | {sent},
        no_avg_dtypes=frozenset({"int64", "int32", "uint8"}),
        # gloo has no native reduce_scatter: PyTorch all-reduces and keeps a shard, which moves twice the bytes of a
        # ring.
        emulated=frozenset({"reduce_scatter"}),
    )


def describe() -> ChipDescriptor:
    """The CPU's descriptor."""
    runtime = CpuRuntime()
    return ChipDescriptor(
        name="cpu",
        runtime=runtime,
        capabilities=CpuCapabilities(),
        collectives=gloo_support(),
        health=DeviceSelfTest(runtime, host.memory_available),
        telemetry=CpuTelemetry(),
        scheduler=SchedulerResources(slurm="", kubernetes="cpu", visible_devices=()),
    )

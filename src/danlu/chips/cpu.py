"""The CPU: the chip every machine has, and the complete reference for a descriptor."""

import ctypes
import os
import warnings
from dataclasses import dataclass
from itertools import product

import torch

from danlu.chips import host
from danlu.chips.descriptor import OPERATIONS, Collectives, Descriptor, SchedulerNames, Wire
from danlu.chips.health import SelfCheck
from danlu.spec import Chip, Operation


@dataclass(frozen=True)
class CpuRuntime:
    """Ranks share the host; each owns some cores, set by the threads its launcher gives it."""

    def available(self) -> bool:
        """Always: this code runs on one."""
        return True

    def why_not(self) -> str:
        """Nothing: it is available."""
        return ""

    def device_count(self) -> int:
        """Physical cores this process may use, so that a rank has at least one."""
        return host.physical_cores()

    def device(self, local_rank: int) -> torch.device:
        """The same device for every rank; any number of ranks may share it. The process keeps the memory it frees."""
        if not _keep_freed_memory():
            warnings.warn("only glibc keeps freed memory for the next step: steps take 6 to 12 % longer", stacklevel=2)
        return torch.device("cpu")

    def synchronize(self) -> None:
        """Nothing to wait for: operators return when they are done."""

    def memory_peak(self) -> int:
        """Peak resident set of this process."""
        return host.resident_peak()

    def memory_total(self) -> int:
        """Memory of the host, or of the container where that is less; shared by its ranks."""
        return host.memory_total()

    def seed(self, value: int) -> None:
        """Seed the host's generator."""
        torch.manual_seed(value)


@dataclass(frozen=True)
class CpuCapabilities:
    """What is known of a CPU without measuring it."""

    def chip(self) -> Chip | None:
        """None: the share of a CPU that a rank owns stands on no data sheet."""
        return None

    def pinned_memory(self) -> bool:
        """False: there is no device to copy to."""
        return False

    def ipc(self) -> bool:
        """True: processes share memory by mapping it."""
        return True

    def rdma(self) -> bool:
        """True when the host has a card of the InfiniBand or RoCE kind."""
        return bool(host.rdma_cards())


@dataclass(frozen=True)
class CpuTelemetry:
    """Load and memory, from the kernel."""

    def read(self) -> dict[str, float]:
        """Runnable processes a core over the last minute; resident set of this process; free memory of the host."""
        return {
            "load_per_core": os.getloadavg()[0] / host.physical_cores(),
            "resident": float(host.resident()),
            "memory_available": float(host.memory_available()),
        }


def _keep_freed_memory() -> bool:
    """Have the C library keep what this process frees for its next request; True where it does (glibc).

    A step frees and asks for the same large tensors as the one before. glibc gives them back to the system in between
    and gets them page by page, each cleared first: 6 to 12 % of a step's time. Kept, they cost 1 to 6 % more memory at
    the peak (11 % where sizes change from step to step, as of experts), and what a process frees is not free for others
    until it ends.
    """
    maps_at_most, trim_threshold = -4, -1
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    return bool(mallopt(maps_at_most, 0)) and bool(mallopt(trim_threshold, -1))


_CARRIED: tuple[Wire, ...] = ("fp64", "fp32", "bf16", "fp16", "int64", "int32", "uint8")


def gloo() -> Collectives:
    """What gloo does as PyTorch 2.13 builds it; tests/multiprocess/test_probe.py holds every entry against it."""
    sent: tuple[Operation, Wire] = ("p2p", "fp8")
    return Collectives(
        backend="gloo",
        operations=frozenset(product(OPERATIONS, _CARRIED)) | {sent},
        no_average=frozenset({"int64", "int32", "uint8"}),
        # gloo has no reduce_scatter of its own: PyTorch reduces everything everywhere and keeps a part, which
        # moves twice the bytes a ring would.
        emulated=frozenset({"reduce_scatter"}),
    )


def describe() -> Descriptor:
    """The CPU's descriptor."""
    runtime = CpuRuntime()
    return Descriptor(
        name="cpu",
        runtime=runtime,
        capabilities=CpuCapabilities(),
        collectives=gloo(),
        health=SelfCheck(runtime, host.memory_available),
        telemetry=CpuTelemetry(),
        scheduler=SchedulerNames(slurm="", kubernetes="cpu", visible_devices=()),
    )

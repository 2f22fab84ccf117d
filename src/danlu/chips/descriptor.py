"""The interface of a chip package: one versioned descriptor of small providers."""

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch

from danlu.spec import Chip, CollectiveOp

DESCRIPTOR_VERSION = 1
"""Version of `ChipDescriptor` that this Danlu reads."""

OPERATIONS: tuple[CollectiveOp, ...] = get_args(CollectiveOp)

WireDtype = Literal["fp64", "fp32", "bf16", "fp16", "fp8", "int64", "int32", "uint8"]
"""Element dtype of a collective's buffer."""
Reduction = Literal["sum", "avg"]


class Runtime(Protocol):
    """Availability, devices and memory of the chip.

    A worker calls in this order: 1. `is_available` 2. `set_device`, to which later calls refer 3. `seed` 4. the rest.
    """

    def is_available(self) -> bool:
        """True when a rank can be started on this chip now."""

    def unavailable_reason(self) -> str:
        """Why it is not available, and what to do; empty when it is."""

    def device_count(self) -> int:
        """Number of ranks this machine can run, one device each; for a CPU its physical cores."""

    def set_device(self, local_rank: int) -> torch.device:
        """The device of a rank, made the current one of this process."""

    def synchronize(self) -> None:
        """Wait until all work queued on the current device is done."""

    def max_memory(self) -> int:
        """Most bytes this process has held on the current device so far."""

    def memory_total(self) -> int:
        """Bytes of the current device's memory."""

    def seed(self, value: int) -> None:
        """Seed the generators of the host and of every device of this process."""


class Capabilities(Protocol):
    """What the vendor declares about the present device."""

    def data_sheet(self) -> Chip | None:
        """Data-sheet figures of the present device, or None if unknown: measure with `danlu probe`."""

    def pinned_memory(self) -> bool:
        """True when host memory can be pinned for faster copies to the device."""

    def ipc(self) -> bool:
        """True when two processes on one machine can share the device's memory."""

    def rdma(self) -> bool:
        """True when a network card of this machine can read memory without the CPU."""


@dataclass(frozen=True)
class CollectiveSupport:
    """Which collectives the chip's library supports, for which dtypes, and which are emulated."""

    backend: str
    """Its name in `torch.distributed.init_process_group`."""
    supported: frozenset[tuple[CollectiveOp, WireDtype]]
    no_avg_dtypes: frozenset[WireDtype] = frozenset()
    """Dtypes for which the library cannot average: sum, then divide."""
    emulated: frozenset[CollectiveOp] = frozenset()
    """Operations composed of others, which therefore move more bytes than necessary."""

    def unsupported_reason(self, operation: CollectiveOp, wire: WireDtype, reduction: Reduction = "sum") -> str:
        """Why this call would fail, and what to do instead; empty when it works."""
        if (operation, wire) not in self.supported:
            return f"{self.backend} has no {operation} of {wire}: view the tensor as uint8, or convert it"
        reduces = operation in ("all_reduce", "reduce_scatter")
        if reduces and reduction == "avg" and wire in self.no_avg_dtypes:
            return f"{self.backend} cannot average {wire}: sum, then divide"
        return ""


@dataclass(frozen=True)
class HealthCheckResult:
    """Result of one health check."""

    check: str
    healthy: bool
    detail: str
    """The measured value, and the limit it was compared with."""


class Health(Protocol):
    """Is the device's arithmetic correct, and is memory free?"""

    def run_checks(self, local_rank: int) -> tuple[HealthCheckResult, ...]:
        """Run every check on the device of a rank; takes less than a second."""


class Telemetry(Protocol):
    """Current load and memory of the device."""

    def read(self) -> dict[str, float]:
        """Values by name, with the unit in the name where it is neither bytes nor seconds."""


@dataclass(frozen=True)
class SchedulerResources:
    """Resource names of this chip in cluster managers."""

    slurm: str
    """Slurm's GRES name; empty when ranks are requested as CPUs."""
    kubernetes: str
    """Name of the resource in a pod's limits."""
    visible_devices: tuple[str, ...]
    """Environment variables that restrict which devices a process sees."""


_LOST_WITHOUT = {
    "capabilities": "no data-sheet figures: measure the chip with `danlu probe`",
    "collectives": "no collectives: only runs of one rank",
    "health": "no health checks before a run",
    "telemetry": "no load or memory figures while it runs",
    "scheduler": "no GRES name: request the devices in your own batch script",
}


@dataclass(frozen=True, kw_only=True)
class ChipDescriptor:
    """Everything Danlu knows about one kind of chip; return it from an entry point in the group `danlu.chips`."""

    name: str
    """The same as the entry point's, and as `chip.kind` in a cluster file."""
    runtime: Runtime
    capabilities: Capabilities | None = None
    collectives: CollectiveSupport | None = None
    health: Health | None = None
    telemetry: Telemetry | None = None
    scheduler: SchedulerResources | None = None
    version: int = DESCRIPTOR_VERSION

    def missing_providers(self) -> dict[str, str]:
        """Providers this chip lacks, each with what is lost without it."""
        return {name: loss for name, loss in _LOST_WITHOUT.items() if getattr(self, name) is None}

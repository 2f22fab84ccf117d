"""What a chip package tells Danlu: one versioned descriptor of small providers."""

from dataclasses import dataclass
from typing import Literal, Protocol, get_args

import torch

from danlu.spec import Chip, Operation

VERSION = 1
"""Version of `Descriptor` that this Danlu reads."""

OPERATIONS: tuple[Operation, ...] = get_args(Operation)

Wire = Literal["fp64", "fp32", "bf16", "fp16", "fp8", "int64", "int32", "uint8"]
"""A type of element a collective may be asked to carry."""
Reduction = Literal["sum", "avg"]


class Runtime(Protocol):
    """Is the chip here, which device is mine, how much memory has it?

    A worker asks in this order: 1. `available` 2. `device`, which the later questions are about 3. `seed` 4. the rest.
    """

    def available(self) -> bool:
        """True when a rank can be started on this chip now."""

    def why_not(self) -> str:
        """Why it is not available, and what to do; empty when it is."""

    def device_count(self) -> int:
        """Ranks this machine holds, one device each; for a CPU its physical cores."""

    def device(self, local_rank: int) -> torch.device:
        """The device of a rank, made the current one of this process."""

    def synchronize(self) -> None:
        """Wait until all work given to the current device is done."""

    def memory_peak(self) -> int:
        """Most bytes this process has held on the current device so far."""

    def memory_total(self) -> int:
        """Bytes of the current device's memory."""

    def seed(self, value: int) -> None:
        """Seed the generators of the host and of every device of this process."""


class Capabilities(Protocol):
    """What has the maker declared about the present device?"""

    def chip(self) -> Chip | None:
        """Data-sheet figures of the present device, or None where they are not known: measure with `danlu probe`."""

    def pinned_memory(self) -> bool:
        """True when host memory can be locked for faster copies to the device."""

    def ipc(self) -> bool:
        """True when two processes of one machine can share the device's memory."""

    def rdma(self) -> bool:
        """True when a network card of this machine can read memory without the CPU."""


@dataclass(frozen=True)
class Collectives:
    """Which collectives the chip's library runs, on which types, and at what hidden cost."""

    backend: str
    """Name to give to `torch.distributed.init_process_group`."""
    operations: frozenset[tuple[Operation, Wire]]
    no_average: frozenset[Wire] = frozenset()
    """Types whose mean cannot be taken on the way: sum, then divide."""
    emulated: frozenset[Operation] = frozenset()
    """Operations composed of others, which therefore move more bytes than they need."""

    def why_not(self, operation: Operation, wire: Wire, reduction: Reduction = "sum") -> str:
        """Why this call would fail, and what to do instead; empty when it works."""
        if (operation, wire) not in self.operations:
            return f"{self.backend} has no {operation} of {wire}: view the tensor as uint8, or convert it"
        reduces = operation in ("all_reduce", "reduce_scatter")
        if reduces and reduction == "avg" and wire in self.no_average:
            return f"{self.backend} takes no average of {wire}: sum, then divide"
        return ""


@dataclass(frozen=True)
class Finding:
    """One answer of a health probe."""

    check: str
    healthy: bool
    detail: str
    """The figure, and the limit it was held against."""


class Health(Protocol):
    """Does the device reckon rightly, and has it room?"""

    def findings(self, local_rank: int) -> tuple[Finding, ...]:
        """Run every check on the device of a rank; takes less than a second."""


class Telemetry(Protocol):
    """How is the device doing at this moment?"""

    def read(self) -> dict[str, float]:
        """Figures by name, with the unit in the name where it is neither bytes nor seconds."""


@dataclass(frozen=True)
class SchedulerNames:
    """What cluster managers call this chip."""

    slurm: str
    """Name of the generic resource to ask Slurm for; empty when ranks are asked for as CPUs."""
    kubernetes: str
    """Name of the resource in a pod's limits."""
    visible_devices: tuple[str, ...]
    """Environment variables that restrict which devices a process sees."""


_WITHOUT = {
    "capabilities": "no data-sheet figures: measure the chip with `danlu probe`",
    "collectives": "no collectives: only runs of one rank",
    "health": "no health checks before a run",
    "telemetry": "no load or memory figures while it runs",
    "scheduler": "no scheduler names: ask for its devices in your own batch script",
}


@dataclass(frozen=True, kw_only=True)
class Descriptor:
    """Everything Danlu knows of one kind of chip; return it from an entry point in the group `danlu.chips`."""

    name: str
    """The same as the entry point's, and as `chip.kind` in a cluster file."""
    runtime: Runtime
    capabilities: Capabilities | None = None
    collectives: Collectives | None = None
    health: Health | None = None
    telemetry: Telemetry | None = None
    scheduler: SchedulerNames | None = None
    version: int = VERSION

    def missing(self) -> dict[str, str]:
        """Providers this chip does not have, each with what is lost without it."""
        return {name: loss for name, loss in _WITHOUT.items() if getattr(self, name) is None}

"""The interface of a chip package: one versioned descriptor."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

DESCRIPTOR_VERSION = 1
"""Version of `ChipDescriptor` that this Danlu reads."""


class Runtime(Protocol):
    """Availability, devices and memory of the chip.

    A worker calls in this order: 1. `is_available` 2. `set_device`, to which later calls refer 3. the rest.
    """

    def is_available(self) -> bool:
        """True when a rank can be started on this chip now."""

    def unavailable_reason(self) -> str:
        """Why it is not available, and what to do; empty when it is."""

    def device_count(self) -> int:
        """Number of ranks this machine can run, one device each; for a CPU its physical cores."""

    def device_name(self) -> str:
        """The vendor's name of the current device."""

    def set_device(self, local_rank: int) -> torch.device:
        """The device of a rank, made the current one of this process."""

    def synchronize(self) -> None:
        """Wait until all work queued on the current device is done."""

    def max_memory(self) -> int:
        """Most bytes this process has held on the current device so far."""

    def memory_total(self) -> int:
        """Bytes of the current device's memory."""


@dataclass(frozen=True, kw_only=True)
class ChipDescriptor:
    """Everything Danlu knows about one kind of chip; return it from an entry point in the group `danlu.chips`."""

    name: str
    """The same as the entry point's, and as `chip.kind` in a cluster file."""
    runtime: Runtime
    backend: str | None = None
    """Its collectives: their name in `torch.distributed.init_process_group`. None: only runs of one rank."""
    matmul_formats: Callable[[], frozenset[str]] = frozenset
    """Formats of a recipe's `precision.matmul` that the current device multiplies itself; others are emulated."""
    version: int = DESCRIPTOR_VERSION

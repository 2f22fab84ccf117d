"""The common parts of accelerators, through `torch.accelerator`.

Chips differ in how to detect that this PyTorch supports them, in their names, and in their data sheets.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from danlu.chips import host
from danlu.chips.descriptor import OPERATIONS, CollectiveSupport, WireDtype
from danlu.spec import Chip, CollectiveOp


@dataclass(frozen=True)
class AcceleratorRuntime:
    """A device that `torch.accelerator` drives."""

    device_type: str
    """PyTorch's name of the device, as in `torch.device("…")`."""
    unsupported_build: Callable[[], str]
    """Why this PyTorch cannot drive it, and what to install; empty when it can."""

    def is_available(self) -> bool:
        """True when this PyTorch drives the chip and sees at least one."""
        return not self.unavailable_reason()

    def unavailable_reason(self) -> str:
        """The build that lacks support, or the device that is not visible."""
        if reason := self.unsupported_build():
            return reason
        current = torch.accelerator.current_accelerator(check_available=True)
        if current is None or current.type != self.device_type:
            return f"PyTorch sees no {self.device_type} device: check the driver and the visible-devices variables"
        return ""

    def device_count(self) -> int:
        """Devices this process sees; 0 when the chip is not available."""
        return torch.accelerator.device_count() if self.is_available() else 0

    def set_device(self, local_rank: int) -> torch.device:
        """The device of this index, made current."""
        count = self.device_count()
        if local_rank >= count:
            seen = f"{count} {self.device_type} devices seen here"
            raise ValueError(f"`local_rank` must be below the {seen}, but is {local_rank} instead")
        torch.accelerator.set_device_index(local_rank)
        return torch.device(self.device_type, local_rank)

    def synchronize(self) -> None:
        """Wait for the current device."""
        torch.accelerator.synchronize()

    def max_memory(self) -> int:
        """Most bytes held by PyTorch's allocator, cached blocks included."""
        return torch.accelerator.max_memory_reserved()

    def memory_total(self) -> int:
        """Bytes of the current device."""
        return int(torch.accelerator.get_memory_info()[1])

    def memory_available(self) -> int:
        """Free bytes of the current device."""
        return int(torch.accelerator.get_memory_info()[0])

    def seed(self, value: int) -> None:
        """Seed the host's and every device's generator."""
        torch.manual_seed(value)


@dataclass(frozen=True)
class AcceleratorCapabilities:
    """Data sheets by the name the driver reports."""

    runtime: AcceleratorRuntime
    data_sheets: dict[str, Chip]
    """By a substring of the device's name."""

    def data_sheet(self) -> Chip | None:
        """The sheet of the present device; None when it is absent or unknown."""
        if not self.runtime.is_available():
            return None
        return find_data_sheet(
            str(torch.get_device_module(self.runtime.device_type).get_device_name()), self.data_sheets
        )

    def pinned_memory(self) -> bool:
        """True: hosts of accelerators can pin memory."""
        return True

    def ipc(self) -> bool:
        """True: the driver exports device memory to other processes."""
        return True

    def rdma(self) -> bool:
        """True when the host has an InfiniBand or RoCE card."""
        return bool(host.rdma_devices())


def find_data_sheet(device_name: str, sheets: dict[str, Chip]) -> Chip | None:
    """The sheet whose key is the longest substring of the device's name."""
    keys = [key for key in sheets if key in device_name]
    return sheets[max(keys, key=len)] if keys else None


def nccl_support() -> CollectiveSupport:
    """What NCCL supports (RCCL has the same backend name): fp8 can be sent, but not reduced."""
    wires: tuple[WireDtype, ...] = ("fp64", "fp32", "bf16", "fp16", "int64", "int32", "uint8")
    moved: tuple[CollectiveOp, ...] = ("all_gather", "all_to_all", "p2p")
    fp8: tuple[WireDtype, ...] = ("fp8",)
    return CollectiveSupport("nccl", frozenset(product(OPERATIONS, wires)) | frozenset(product(moved, fp8)))

"""What accelerators share: everything `torch.accelerator` asks of any of them.

A chip differs in how to tell that this PyTorch drives it, in its names, and in its data sheets.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import torch

from danlu.chips import host
from danlu.chips.descriptor import OPERATIONS, Collectives, Wire
from danlu.spec import Chip, Operation


@dataclass(frozen=True)
class AcceleratorRuntime:
    """A device that `torch.accelerator` drives."""

    device_type: str
    """PyTorch's name of the device, as in `torch.device("…")`."""
    build_lacks: Callable[[], str]
    """Why this PyTorch cannot drive it, and what to install; empty when it can."""

    def available(self) -> bool:
        """True when this PyTorch drives the chip and sees at least one."""
        return not self.why_not()

    def why_not(self) -> str:
        """The build that lacks it, or the device that cannot be seen."""
        if reason := self.build_lacks():
            return reason
        current = torch.accelerator.current_accelerator(check_available=True)
        if current is None or current.type != self.device_type:
            return f"PyTorch sees no {self.device_type} device: check the driver and the visible-devices variables"
        return ""

    def device_count(self) -> int:
        """Devices this process sees; 0 when the chip is not available."""
        return torch.accelerator.device_count() if self.available() else 0

    def device(self, local_rank: int) -> torch.device:
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

    def memory_peak(self) -> int:
        """Most bytes held by PyTorch's allocator, cached blocks included."""
        return torch.accelerator.max_memory_reserved()

    def memory_total(self) -> int:
        """Bytes of the current device."""
        return int(torch.accelerator.get_memory_info()[1])

    def memory_available(self) -> int:
        """Bytes of the current device that nobody holds."""
        return int(torch.accelerator.get_memory_info()[0])

    def seed(self, value: int) -> None:
        """Seed the host's and every device's generator."""
        torch.manual_seed(value)


@dataclass(frozen=True)
class AcceleratorCapabilities:
    """Data sheets by the name the driver reports."""

    runtime: AcceleratorRuntime
    sheets: dict[str, Chip]
    """By a part of the device's name."""

    def chip(self) -> Chip | None:
        """The sheet of the present device; None when it is absent or unknown."""
        if not self.runtime.available():
            return None
        return sheet_for(str(torch.get_device_module(self.runtime.device_type).get_device_name()), self.sheets)

    def pinned_memory(self) -> bool:
        """True: hosts of accelerators lock memory for them."""
        return True

    def ipc(self) -> bool:
        """True: the driver exports device memory to other processes."""
        return True

    def rdma(self) -> bool:
        """True when the host has a card of the InfiniBand or RoCE kind."""
        return bool(host.rdma_cards())


def sheet_for(device_name: str, sheets: dict[str, Chip]) -> Chip | None:
    """The sheet whose key is the longest part of the device's name."""
    keys = [key for key in sheets if key in device_name]
    return sheets[max(keys, key=len)] if keys else None


def nccl() -> Collectives:
    """What the NCCL interface does (RCCL answers to the same name): fp8 is carried, but not reduced."""
    wires: tuple[Wire, ...] = ("fp64", "fp32", "bf16", "fp16", "int64", "int32", "uint8")
    moved: tuple[Operation, ...] = ("all_gather", "all_to_all", "p2p")
    fp8: tuple[Wire, ...] = ("fp8",)
    return Collectives("nccl", frozenset(product(OPERATIONS, wires)) | frozenset(product(moved, fp8)))

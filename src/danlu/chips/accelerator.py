"""The common parts of accelerators, through `torch.accelerator`.

Chips differ in how to detect that this PyTorch supports them, and in the names of device and collectives.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch


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

    def device_name(self) -> str:
        """As the driver reports it; PyTorch's name of the device if its extension does not ask the driver."""
        reported = getattr(torch.get_device_module(self.device_type), "get_device_name", None)
        return str(reported()) if reported else self.device_type

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


def copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Begin to copy a tensor of the host to `device`; kernels that are queued afterwards see it.

    From page-locked memory the copy runs beside the host's work; the CPU needs none.
    """
    if device.type == tensor.device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)

"""The CPU: available on every machine, and the complete reference for a descriptor."""

import ctypes
import warnings
from dataclasses import dataclass

import torch

from danlu.chips import host
from danlu.chips.cpu_products import compute_products_in_fp32, emulated_dtypes
from danlu.chips.descriptor import ChipDescriptor


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

    def device_name(self) -> str:
        """The processor's."""
        return host.cpu_name()

    def set_device(self, local_rank: int) -> torch.device:
        """The same device for every rank; any number of ranks may share it. The process keeps the memory it frees.

        Products of a dtype that the processor has no instructions for are computed in fp32 (`cpu_products`).
        """
        emulated = emulated_dtypes()
        if emulated and not compute_products_in_fp32(emulated):
            warnings.warn(
                f"this torch ({torch.__version__}) does not let its products in bf16 and fp16 be replaced by those in "
                "fp32: on this processor, which has no instructions for them, they take two to three times as long",
                stacklevel=2,
            )
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


def describe() -> ChipDescriptor:
    """The CPU's descriptor."""
    return ChipDescriptor(name="cpu", runtime=CpuRuntime(), backend="gloo")

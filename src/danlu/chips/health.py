"""Health checks for any device: is its arithmetic correct, and is memory free?"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from danlu.chips.descriptor import HealthCheckResult, Runtime

_SIZE = 256
# Relative to √n, the size of a sum of n unit products, summing in fp32 errs by about eps₃₂·√n (rounding errors of a
# growing partial sum add up as a random walk) and storing the result by eps of its type. The margin covers the worst
# of 65,536 elements; a flipped bit of an exponent is far outside.
_MARGIN = 4.0
_MIN_FREE_FRACTION = 0.05


@dataclass(frozen=True)
class DeviceSelfTest:
    """Matmuls compared with fp64 on the host, and free memory."""

    runtime: Runtime
    memory_available: Callable[[], int]

    def run_checks(self, local_rank: int) -> tuple[HealthCheckResult, ...]:
        """Check fp32 and bf16 matmuls and the memory of a rank's device."""
        device = self.runtime.set_device(local_rank)
        return (*(check_matmul(device, dtype) for dtype in (torch.float32, torch.bfloat16)), self._memory())

    def _memory(self) -> HealthCheckResult:
        available, total = self.memory_available(), self.runtime.memory_total()
        detail = f"{available / 1e9:.1f} of {total / 1e9:.1f} GB free, at least {_MIN_FREE_FRACTION:.0%} required"
        return HealthCheckResult("memory", available >= _MIN_FREE_FRACTION * total, detail)


MatmulFn = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def check_matmul(device: torch.device, dtype: torch.dtype, product: MatmulFn = torch.matmul) -> HealthCheckResult:
    """Multiply two matrices on the device and compare the product with fp64 on the host."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(_SIZE, _SIZE, generator=generator).to(dtype) for _ in range(2))
    exact = left.double() @ right.double()
    got = product(left.to(device), right.to(device)).cpu().double()
    error = float((got - exact).abs().max() / _SIZE**0.5)
    limit = _MARGIN * (_SIZE**0.5 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps)
    name = str(dtype).removeprefix("torch.")
    # Written so that a NaN error is not healthy.
    return HealthCheckResult(f"matmul {name}", error <= limit, f"error {error:.1e} relative to fp64, limit {limit:.1e}")

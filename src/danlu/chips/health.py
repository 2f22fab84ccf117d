"""The health checks any device can run: does it reckon rightly, and has it room?"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from danlu.chips.descriptor import Finding, Runtime

_SIZE = 256
# Relative to √n, the size of a sum of n unit products, summing in fp32 errs by about eps₃₂·√n (rounding errors of a
# growing partial sum add up as a random walk) and storing the result by eps of its type. The margin covers the worst
# of 65,536 elements; a flipped bit of an exponent is far outside.
_MARGIN = 4.0
_LEAST_FREE = 0.05


@dataclass(frozen=True)
class SelfCheck:
    """Matrix products held against fp64 on the host, and free memory."""

    runtime: Runtime
    memory_available: Callable[[], int]

    def findings(self, local_rank: int) -> tuple[Finding, ...]:
        """Check fp32 and bf16 products and the memory of a rank's device."""
        device = self.runtime.device(local_rank)
        return (*(matmul_check(device, dtype) for dtype in (torch.float32, torch.bfloat16)), self._memory())

    def _memory(self) -> Finding:
        available, total = self.memory_available(), self.runtime.memory_total()
        detail = f"{available / 2**30:.1f} of {total / 2**30:.1f} GiB free, at least {_LEAST_FREE:.0%} asked"
        return Finding("memory", available >= _LEAST_FREE * total, detail)


Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def matmul_check(device: torch.device, dtype: torch.dtype, product: Product = torch.matmul) -> Finding:
    """Multiply two matrices on the device and hold the product against fp64 on the host."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(_SIZE, _SIZE, generator=generator).to(dtype) for _ in range(2))
    exact = left.double() @ right.double()
    got = product(left.to(device), right.to(device)).cpu().double()
    error = float((got - exact).abs().max() / _SIZE**0.5)
    limit = _MARGIN * (_SIZE**0.5 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps)
    name = str(dtype).removeprefix("torch.")
    # Written so that an error of nan is not healthy.
    return Finding(f"matmul {name}", error <= limit, f"error {error:.1e} against fp64, limit {limit:.1e}")

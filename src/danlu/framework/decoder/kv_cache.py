"""What attention keeps of earlier positions while text is generated."""

import torch
from torch import Tensor


class KVCache:
    """Keys and values of the positions seen so far, one layer's, in buffers for all positions.

    Shapes: B sequences, S positions, K key-value heads, W width of a head.
    """

    def __init__(self, shape_BSKW: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device) -> None:
        self._k, self._v = (torch.empty(shape_BSKW, dtype=dtype, device=device) for _ in range(2))
        self.length = 0
        """Positions held."""

    def append(self, k_BSKW: Tensor, v_BSKW: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of the next positions; returns those of all positions."""
        end = self.length + k_BSKW.shape[1]
        if end > self._k.shape[1]:
            raise ValueError(f"the cache has room for {self._k.shape[1]} positions, but {end} are needed")
        for kept, new in ((self._k, k_BSKW), (self._v, v_BSKW)):
            kept[:, self.length : end] = new
        self.length = end
        return self._k[:, :end], self._v[:, :end]

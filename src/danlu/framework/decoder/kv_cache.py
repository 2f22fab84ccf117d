"""What attention keeps of earlier positions while text is generated."""

import torch
from torch import Tensor


class KVCache:
    """Keys and values of the positions seen so far, one layer's, in buffers for all positions.

    Latent attention keeps its latent and the shared key instead. Shapes: B sequences, S positions, K key-value heads,
    W width of a head; values are as wide as keys unless `value_width` is given.
    """

    def __init__(
        self,
        shape_BSKW: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
        value_width: int | None = None,
    ) -> None:
        *outer, width = shape_BSKW
        self._k, self._v = (
            torch.empty((*outer, last), dtype=dtype, device=device) for last in (width, value_width or width)
        )
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

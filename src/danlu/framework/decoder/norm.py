"""Norms of the decoder."""

from torch import Tensor, nn

from danlu.ops.operators.norm import rms_norm
from danlu.spec.model import Model


class RMSNorm(nn.RMSNorm):
    """torch's, by the operator of `ops`."""

    offset = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dim."""
        assert self.eps is not None
        return rms_norm(x, self.weight, self.eps, self.offset)


class ZeroCenteredRMSNorm(RMSNorm):
    """An RMS norm that multiplies by 1 + weight, in fp32: a weight near 0 has more bits than one near 1."""

    offset = 1.0


def build_norm(model: Model, width: int | None = None) -> nn.Module:
    """The norm before a layer's parts and before the head; with `width` that of a head's queries and keys."""
    if model.norm == "layer" and width is None:
        return nn.LayerNorm(model.width, eps=model.norm_epsilon)
    made = ZeroCenteredRMSNorm if model.zero_centered_norm else RMSNorm
    return made(width or model.width, eps=model.norm_epsilon)

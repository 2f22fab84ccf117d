"""Norms of the decoder."""

import torch.nn.functional as F
from torch import Tensor, nn

from danlu.spec.model import Model


class ZeroCenteredRMSNorm(nn.RMSNorm):
    """An RMS norm that multiplies by 1 + weight, in fp32: a weight near 0 has more bits than one near 1."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last dim."""
        scale = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), tuple(self.normalized_shape), scale, self.eps).type_as(x)


def build_norm(model: Model, width: int | None = None) -> nn.Module:
    """The norm before a layer's parts and before the head; with `width` that of a head's queries and keys."""
    if model.norm == "layer" and width is None:
        return nn.LayerNorm(model.width, eps=model.norm_epsilon)
    made = ZeroCenteredRMSNorm if model.zero_centered_norm else nn.RMSNorm
    return made(width or model.width, eps=model.norm_epsilon)

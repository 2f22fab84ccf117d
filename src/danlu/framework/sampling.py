"""Choose the next token from a model's logits."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn; by default from the model's own distribution."""

    temperature: float = 1.0
    """Logits are divided by it; 0 always takes the most likely token."""
    top_k: int = 0
    """Draw from the so many most likely tokens only; 0 for all."""
    top_p: float = 1.0
    """Draw from the fewest most likely tokens whose probabilities add up to this."""

    def __post_init__(self) -> None:
        """Refuse what has no meaning."""
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"`temperature` must be 0 or more, but is {self.temperature} instead")
        if self.top_k < 0:
            raise ValueError(f"`top_k` must be 0 or more, but is {self.top_k} instead")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"`top_p` must be above 0 and at most 1, but is {self.top_p} instead")


class NonFiniteLogitsError(ArithmeticError):
    """A model returned logits that are not finite numbers, so no token can be drawn."""


def choose_token(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token of one sequence; `generator` is on the CPU and gives one number, whatever the device.

    Of equal logits the lower token is taken first.
    """
    logits_V = logits_V.double().cpu()
    if not logits_V.isfinite().all():
        raise NonFiniteLogitsError(
            f"{int((~logits_V.isfinite()).sum()):,} of {len(logits_V):,} logits are not finite: the checkpoint's "
            "weights are, or the numbers overflow in this dtype; try fp32, or an earlier step"
        )
    if sampling.temperature == 0:
        return int(logits_V.argmax())
    shares, tokens = (logits_V / sampling.temperature).softmax(0).sort(descending=True, stable=True)
    if sampling.top_k:
        shares = shares[: sampling.top_k]
    cumulative = (shares / shares.sum()).cumsum(0)
    if sampling.top_p < 1:
        # The token that reaches `top_p` is the last one kept.
        cumulative = cumulative[: int((cumulative < sampling.top_p).sum()) + 1]
    drawn = torch.rand((), dtype=torch.float64, generator=generator) * cumulative[-1]
    return int(tokens[min(int(torch.searchsorted(cumulative, drawn, right=True)), len(cumulative) - 1)])

"""One rank's share of a step's data: what the loader makes and the forward pass takes."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """This rank's rows of the global batch, and with `cp` this rank's positions of every row.

    All are `[sequences, positions]`.
    """

    tokens: Tensor
    """Token ids."""
    targets: Tensor
    """The token after each, which the model is to predict."""

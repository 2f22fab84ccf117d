"""One rank's share of a step's data: what the loader makes and the forward pass takes."""

from dataclasses import dataclass

from torch import Tensor

IGNORE_INDEX = -100
"""The target of a position whose prediction does not count: `ignore_index` of torch's cross-entropy."""


@dataclass(frozen=True)
class Batch:
    """This rank's rows of the global batch, and with `cp` this rank's positions of every row."""

    tokens: Tensor
    """Token ids: `[sequences, positions]`."""
    targets: Tensor
    """The token after each, which the model is to predict, or `IGNORE_INDEX`: `[sequences, positions]`."""
    positions: Tensor | None = None
    """Each token's position in its document, 0 where one begins; None if a row is one sequence.

    It decides what attention may see, so it is of the full rows even where `cp` shards them: `[sequences, length]`.
    """
    counted: int | None = None
    """Targets of this rank that count; None if all of them do, on every rank."""

    def microbatches(self, number: int) -> list["Batch"]:
        """The rows in `number` pieces."""
        tokens, targets = self.tokens.chunk(number), self.targets.chunk(number)
        positions = [None] * len(tokens) if self.positions is None else self.positions.chunk(number)
        return [Batch(*piece) for piece in zip(tokens, targets, positions, strict=True)]

    @property
    def model_inputs(self) -> dict[str, Tensor]:
        """What the model takes besides tokens, on every pipeline stage."""
        return {} if self.positions is None else {"positions": self.positions}

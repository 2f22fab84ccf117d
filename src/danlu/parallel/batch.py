"""One rank's share of a step's data: what the loader makes and the forward pass takes."""

from dataclasses import dataclass

from torch import Tensor

IGNORE_INDEX = -100
"""The target of a position whose prediction does not count: `ignore_index` of torch's cross-entropy."""


@dataclass(frozen=True)
class TokensAhead:
    """The tokens that the modules of multi-token prediction read at every position, and those they are to predict."""

    tokens: Tensor
    """For module k, from 0: the token k + 1 places ahead, 0 where the sequence has ended: `[sequences, k, positions]`.
    """
    targets: Tensor
    """The token after that, or `IGNORE_INDEX`: `[sequences, k, positions]`."""
    counted: tuple[int, ...] | None = None
    """Targets of this rank that count, by module; None if all do that the sequences have, on every rank."""

    def chunk(self, number: int) -> list["TokensAhead"]:
        """The rows in `number` pieces."""
        pieces = zip(self.tokens.chunk(number), self.targets.chunk(number), strict=True)
        return [TokensAhead(tokens, targets) for tokens, targets in pieces]


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
    ahead: "TokensAhead | None" = None
    """What multi-token prediction reads and predicts; None without it."""

    def microbatches(self, number: int) -> list["Batch"]:
        """The rows in `number` pieces."""
        tokens, targets = self.tokens.chunk(number), self.targets.chunk(number)
        positions = [None] * len(tokens) if self.positions is None else self.positions.chunk(number)
        ahead = [None] * len(tokens) if self.ahead is None else self.ahead.chunk(number)
        pieces = zip(tokens, targets, positions, ahead, strict=True)
        return [Batch(rows, wanted, places, ahead=further) for rows, wanted, places, further in pieces]

    @property
    def model_inputs(self) -> dict[str, Tensor]:
        """What the model takes besides tokens, on every pipeline stage."""
        inputs = {} if self.positions is None else {"positions": self.positions}
        if self.ahead is not None:
            inputs |= {"tokens_ahead": self.ahead.tokens, "targets_ahead": self.ahead.targets}
        return inputs

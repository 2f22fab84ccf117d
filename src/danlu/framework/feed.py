"""The batch of a step, cut to what one rank needs of it."""

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from danlu.comm.mesh import Mesh
from danlu.spec.recipe import Batch
from danlu.storage.tokens import batch_rows


class Samples(Protocol):
    """Training samples by number; the order is a pure function of the number, so a cursor is one integer."""

    def at(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Samples as rows of `length + 1` tokens."""
        ...


class Feed:
    """Reads this rank's rows of every batch, and of each row this rank's part of the sequence."""

    def __init__(self, samples: Samples, batch: Batch, vocabulary: int, mesh: Mesh) -> None:
        self.samples = samples
        self.vocabulary = vocabulary
        self.device = mesh.device
        self.sequences = batch.sequences
        self.share = (mesh.data_index, mesh.plan.degrees.data)
        self.length = batch.length // mesh.size("cp")
        self.first_column = mesh.coordinate("cp") * self.length

    def at(self, cursor: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets (the tokens one place further) of the batch whose first sample is number `cursor`."""
        rows = torch.from_numpy(self.samples.at(batch_rows(cursor, self.sequences, *self.share)))
        if (highest := int(rows.max())) >= self.vocabulary:  # a split table would take it for a zero vector
            raise ValueError(f"token ids must be below {self.vocabulary}, but one of samples {cursor} … is {highest}")
        columns = rows[:, self.first_column : self.first_column + self.length + 1].to(self.device)
        return columns[:, :-1].contiguous(), columns[:, 1:].contiguous()

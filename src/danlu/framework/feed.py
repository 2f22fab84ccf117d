"""The batch of a step, cut to what one rank needs of it, and read while the step before it runs."""

import threading
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from danlu.comm.mesh import Mesh
from danlu.spec.recipe import Batch
from danlu.storage.tokens import batch_rows

AHEAD = 2
"""Batches read before they are asked for: one is in hand while the next is on its way."""


class Samples(Protocol):
    """Training samples by number; the order is a pure function of the number, so a cursor is one integer."""

    def at(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Samples as rows of `length + 1` tokens; called from several threads."""
        ...


class Feed:
    """Reads this rank's rows of every batch, and of each row this rank's part of the sequence."""

    def __init__(self, samples: Samples, batch: Batch, vocabulary: int, mesh: Mesh, ahead: int = AHEAD) -> None:
        """`ahead` batches are read in the background; what goes wrong there is raised when its batch is asked for."""
        self.samples = samples
        self.vocabulary = vocabulary
        self.device = mesh.device
        self.sequences = batch.sequences
        self.share = (mesh.data_index, mesh.plan.degrees.data)
        self.length = batch.length // mesh.size("cp")
        self.first_column = mesh.coordinate("cp") * self.length
        self.ahead = ahead
        self._coming: dict[int, Future[NDArray[np.int64]]] = {}

    def at(self, cursor: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets (the tokens one place further) of the batch whose first sample is number `cursor`."""
        rows = torch.from_numpy(self._rows(cursor))
        if (highest := int(rows.max())) >= self.vocabulary:  # a split table would take it for a zero vector
            raise ValueError(f"token ids must be below {self.vocabulary}, but one of samples {cursor} … is {highest}")
        columns = rows[:, self.first_column : self.first_column + self.length + 1].to(self.device)
        return columns[:, :-1].contiguous(), columns[:, 1:].contiguous()

    def forget(self) -> None:
        """Drop what was read ahead, because the order ahead is about to change."""
        for coming in self._coming.values():
            coming.exception()  # waits; what went wrong will go wrong again where it matters
        self._coming.clear()

    def _rows(self, cursor: int) -> NDArray[np.int64]:
        coming = self._coming.pop(cursor, None)
        rows = self._read(cursor) if coming is None else coming.result()
        wanted = [cursor + number * self.sequences for number in range(1, self.ahead + 1)]
        self._coming = {start: self._coming[start] if start in self._coming else self._begin(start) for start in wanted}
        return rows

    def _read(self, cursor: int) -> NDArray[np.int64]:
        return self.samples.at(batch_rows(cursor, self.sequences, *self.share))

    def _begin(self, cursor: int) -> Future[NDArray[np.int64]]:
        """Read a batch in a thread that does not hold up the end of the process."""
        coming: Future[NDArray[np.int64]] = Future()

        def read() -> None:
            try:
                coming.set_result(self._read(cursor))
            except BaseException as error:
                coming.set_exception(error)

        threading.Thread(target=read, name=f"batch {cursor}", daemon=True).start()
        return coming

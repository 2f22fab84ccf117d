"""One rank's rows and columns of the global batch, prefetched while earlier steps run."""

import threading
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from danlu.comm.mesh import ParallelMesh
from danlu.parallel.batch import Batch
from danlu.spec.recipe import BatchConfig
from danlu.storage.data.token_shards import rank_sample_indices

PREFETCH_BATCHES = 2
"""Batches read ahead: one is ready while the next is being read."""


class SampleSource(Protocol):
    """Training samples by index; the order is a pure function of the index, so a cursor is one integer."""

    def read_samples(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        """Samples as rows of `length + 1` tokens; called from several threads."""
        ...


class BatchSource(Protocol):
    """This rank's share of every batch; `BatchLoader` implements it."""

    def at(self, cursor: int) -> Batch:
        """The batch that starts at sample `cursor`."""
        ...


class BatchLoader:
    """Reads this rank's rows of every batch, and this rank's positions of every row."""

    def __init__(
        self,
        samples: SampleSource,
        batch: BatchConfig,
        vocabulary: int,
        mesh: ParallelMesh,
        prefetch: int = PREFETCH_BATCHES,
    ) -> None:
        """`prefetch` batches are read in the background; an error there is raised when its batch is requested."""
        self.samples = samples
        self.vocabulary = vocabulary
        self.device = mesh.device
        self.sequences = batch.sequences
        self.data_shard = (mesh.dp_rank, mesh.plan.degrees.dp)
        self.length = batch.length // mesh.size("cp")
        self.first_column = mesh.coordinate("cp") * self.length
        self.prefetch = prefetch
        self._pending: dict[int, Future[NDArray[np.int64]]] = {}

    def at(self, cursor: int) -> Batch:
        """The batch that starts at sample `cursor`; its targets are its tokens shifted by one."""
        rows = torch.from_numpy(self._rows(cursor))
        if (highest := int(rows.max())) >= self.vocabulary:  # a sharded embedding would return zeros for it
            raise ValueError(
                f"token ids must be below {self.vocabulary}, but a sample of the batch at {cursor} has id {highest}"
            )
        columns = rows[:, self.first_column : self.first_column + self.length + 1].to(self.device)
        return Batch(columns[:, :-1].contiguous(), columns[:, 1:].contiguous())

    def drop_prefetched(self) -> None:
        """Drop prefetched batches, because the order of the samples is about to change."""
        for pending in self._pending.values():
            pending.exception()  # waits; an error here will be raised again when the batch is read
        self._pending.clear()

    def _rows(self, cursor: int) -> NDArray[np.int64]:
        pending = self._pending.pop(cursor, None)
        rows = self._read(cursor) if pending is None else pending.result()
        wanted = [cursor + number * self.sequences for number in range(1, self.prefetch + 1)]
        self._pending = {
            start: self._pending[start] if start in self._pending else self._begin(start) for start in wanted
        }
        return rows

    def _read(self, cursor: int) -> NDArray[np.int64]:
        return self.samples.read_samples(rank_sample_indices(cursor, self.sequences, *self.data_shard))

    def _begin(self, cursor: int) -> Future[NDArray[np.int64]]:
        """Read a batch in a daemon thread, which does not delay the end of the process."""
        pending: Future[NDArray[np.int64]] = Future()

        def read() -> None:
            try:
                pending.set_result(self._read(cursor))
            except BaseException as error:
                pending.set_exception(error)

        threading.Thread(target=read, name=f"batch {cursor}", daemon=True).start()
        return pending

"""Samples of a held-out data set: always the same ones, in the same order."""

from collections.abc import Callable

import numpy as np

from danlu.spec import SpecError
from danlu.storage.data.dataset_index import INDEX_FILE
from danlu.storage.data.shard_reader import dataset_problem
from danlu.storage.data.shuffle import IntArray
from danlu.storage.data.token_shards import TokenShards


class HeldOutSamples:
    """`count` samples spread evenly over a data set, repeated forever, each round filled up to `padded` samples.

    Of a large data set a part is as good as all of it, if the part is not its beginning. What is filled up repeats the
    last sample; whoever reads it leaves it out of the loss.
    """

    def __init__(self, shards: TokenShards, length: int, tokens: int) -> None:
        """At most `tokens` tokens, in samples of `length` tokens and one more target."""
        self.shards, self.length = shards, length
        self.available = shards.num_samples(length)
        if not self.available:
            message = f"holds {shards.tokens} tokens, but one sample of length {length} takes {length + 1}"
            hint = f"build it from more text, or set `batch.length` to at most {shards.tokens - 1}"
            raise SpecError([dataset_problem(shards.location, INDEX_FILE, "tokens", message, hint)])
        self.count = min(self.available, max(1, tokens // length))
        self.padded = self.count

    def pad_to_multiple(self, samples: int) -> None:
        """Fill every round up to a multiple of `samples`."""
        self.padded = -(-self.count // samples) * samples

    def read_samples(self, indices: IntArray) -> IntArray:
        """Samples at these indices of the endless sequence: int64 [n, length + 1]."""
        return self._read_rows(indices, self.shards.read)

    def read_words(self, indices: IntArray) -> IntArray:
        """The same with their marks (`token_marks`)."""
        return self._read_rows(indices, self.shards.read_words)

    def _read_rows(self, indices: IntArray, read: Callable[[int, int], IntArray]) -> IntArray:
        numbers = np.minimum(np.asarray(indices, dtype=np.int64) % self.padded, self.count - 1)
        starts = (numbers * self.available // self.count * self.length).tolist()
        self.shards.prefetch(starts, self.length + 1)
        return np.stack([read(start, self.length + 1) for start in starts])

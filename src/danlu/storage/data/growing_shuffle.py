"""The sample order of a source that grows while it is read.

A source has versions: version k is its first n_k shards, so each contains the samples of the one before, and more.
From the sample at which a run applies a larger version, the current epoch is larger by the new samples: the rest of
the epoch is the unread old samples and all new ones, shuffled together. Every sample is still read once per epoch, and
the order before that sample does not change.

In closed form: let an epoch have reached position p when its size grows from m to n. The positions p … n - 1 are
permuted separately. If that gives position y, y ≥ m is a new sample, and y < m is what would have been at position y
of the smaller epoch. That one may have grown likewise: one step per growth within the epoch.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from danlu.storage.data.shuffle import IntArray, derive_seed, permute_positions


@dataclass(frozen=True)
class _EpochSize:
    """One size of an epoch: from `position` on it has `size` samples."""

    position: int
    size: int


@dataclass(frozen=True)
class _GrowthSegment:
    """The samples between two growths."""

    start: int
    epoch: int
    """Number of the current epoch at `start`."""
    sizes: tuple[_EpochSize, ...]
    """The sizes that epoch has had, the last from `start` on."""

    @property
    def size(self) -> int:
        return self.sizes[-1].size

    @property
    def first_epoch_end(self) -> int:
        """Where the current epoch ends; full epochs of one size follow."""
        return self.start + self.size - self.sizes[-1].position

    def epoch_and_position(self, number: int) -> tuple[int, int]:
        """Epoch and position of a sample."""
        if number < self.first_epoch_end:
            return self.epoch, self.sizes[-1].position + number - self.start
        more, position = divmod(number - self.first_epoch_end, self.size)
        return self.epoch + 1 + more, position


class GrowingShuffle:
    """The sample at each index of an endless sequence over a source that grows now and then."""

    def __init__(self, sizes: Sequence[tuple[int, int]], seed: int) -> None:
        """`sizes` lists (index, samples): from that index on an epoch has so many samples. The first index is 0."""
        if not sizes or sizes[0][0] != 0 or sizes[0][1] < 1:
            raise ValueError(f"`sizes` must begin at index 0 with 1 sample or more, but are {list(sizes)} instead")
        self._seed = seed
        self._segments = [_GrowthSegment(0, 0, (_EpochSize(0, sizes[0][1]),))]
        for start, size in sizes[1:]:
            self._grow(start, size)

    def sample_ids(self, numbers: IntArray) -> IntArray:
        """The sample at each index."""
        found = np.empty_like(numbers)
        starts = np.array([segment.start for segment in self._segments])
        owners = np.searchsorted(starts, numbers, side="right") - 1
        for owner in np.unique(owners):
            rows = np.flatnonzero(owners == owner)
            found[rows] = self._ids_in_segment(self._segments[owner], numbers[rows])
        return found

    def epoch_and_position(self, number: int) -> tuple[int, int]:
        """Epoch of an index of the sequence, and the position within it."""
        starts = [segment.start for segment in self._segments]
        return self._segments[bisect_right(starts, number) - 1].epoch_and_position(number)

    def _grow(self, start: int, size: int) -> None:
        last = self._segments[-1]
        if start < last.start or size < last.size:
            raise ValueError(f"a source must grow and its indices ascend, but {size} at {start} follows {last}")
        if size == last.size:
            return
        epoch, position = last.epoch_and_position(start)
        before = last.sizes if epoch == last.epoch else (_EpochSize(0, last.size),)
        # A layer that no position was read from changes nothing: the new one shuffles what it would have put first.
        kept = tuple(layer for layer in before if layer.position < position)
        layers = (*kept, _EpochSize(position, size)) if kept else (_EpochSize(0, size),)
        if start == last.start:
            self._segments.pop()
        self._segments.append(_GrowthSegment(start, epoch, layers))

    def _ids_in_segment(self, segment: _GrowthSegment, numbers: IntArray) -> IntArray:
        found = np.empty_like(numbers)
        later = numbers >= segment.first_epoch_end
        if later.any():
            more, positions = np.divmod(numbers[later] - segment.first_epoch_end, segment.size)
            found[later] = permute_positions(positions, more + segment.epoch + 1, segment.size, self._seed)
        if not later.all():
            here = segment.sizes[-1].position + numbers[~later] - segment.start
            found[~later] = self._ids_in_grown_epoch(here, segment.epoch, segment.sizes)
        return found

    def _ids_in_grown_epoch(self, positions: IntArray, epoch: int, layers: tuple[_EpochSize, ...]) -> IntArray:
        """Samples at positions of an epoch that has grown; all are at or after the last growth."""
        layer, smaller = layers[-1], layers[:-1]
        # A full epoch has the order of a source that never grew; the rest of a grown one has its own key.
        seed = derive_seed(self._seed, "grown", layer.position, layer.size) if smaller else self._seed
        epochs = np.full_like(positions, epoch)
        found = layer.position + permute_positions(
            positions - layer.position, epochs, layer.size - layer.position, seed
        )
        if smaller:
            old = found < smaller[-1].size
            if old.any():
                found[old] = self._ids_in_grown_epoch(found[old], epoch, smaller)
        return found

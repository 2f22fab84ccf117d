"""The order of samples of a source that grows while it is read.

A source has editions: number k is its first n_k shards, so each holds the samples of the one before, and more. From
the sample on at which a run takes up a larger edition, the epoch under way is larger by what is new: its rest is what
it had not read yet of the old and all of the new, shuffled together. Every sample is still read once an epoch, and what
stood before that sample stands there still.

In closed form: say that an epoch has reached position p when its size grows from m to n. The positions p … n - 1 are
put in an order of their own. Where that says position y, y ≥ m is a new sample, and y < m is what would have stood at
position y of the smaller epoch. That one may have grown likewise: the answer takes a step a growth within the epoch.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from danlu.storage.order import Ints, derived_seed, permuted


@dataclass(frozen=True)
class _Layer:
    """One size of an epoch: from `position` on it has `size` samples."""

    position: int
    size: int


@dataclass(frozen=True)
class _Segment:
    """The samples between two growths."""

    start: int
    epoch: int
    """Number of the epoch under way at `start`."""
    layers: tuple[_Layer, ...]
    """The sizes that epoch has had, the last from `start` on."""

    @property
    def size(self) -> int:
        return self.layers[-1].size

    @property
    def first_end(self) -> int:
        """Where the epoch under way ends; whole epochs of one size follow."""
        return self.start + self.size - self.layers[-1].position

    def place(self, number: int) -> tuple[int, int]:
        """Epoch and position of a sample."""
        if number < self.first_end:
            return self.epoch, self.layers[-1].position + number - self.start
        more, position = divmod(number - self.first_end, self.size)
        return self.epoch + 1 + more, position


class GrowingOrder:
    """Which sample stands at each place of an endless sequence over a source that grows now and then."""

    def __init__(self, sizes: Sequence[tuple[int, int]], seed: int) -> None:
        """`sizes` lists (place, samples): from that place on an epoch has so many. The first place is 0."""
        if not sizes or sizes[0][0] != 0 or sizes[0][1] < 1:
            raise ValueError(f"`sizes` must begin at place 0 with 1 sample or more, but are {list(sizes)} instead")
        self._seed = seed
        self._segments = [_Segment(0, 0, (_Layer(0, sizes[0][1]),))]
        for start, size in sizes[1:]:
            self._grow(start, size)

    def at(self, numbers: Ints) -> Ints:
        """The sample at each place."""
        found = np.empty_like(numbers)
        starts = np.array([segment.start for segment in self._segments])
        owners = np.searchsorted(starts, numbers, side="right") - 1
        for owner in np.unique(owners):
            rows = np.flatnonzero(owners == owner)
            found[rows] = self._within(self._segments[owner], numbers[rows])
        return found

    def place(self, number: int) -> tuple[int, int]:
        """Epoch and position within it of a place of the sequence."""
        starts = [segment.start for segment in self._segments]
        return self._segments[bisect_right(starts, number) - 1].place(number)

    def _grow(self, start: int, size: int) -> None:
        last = self._segments[-1]
        if start < last.start or size < last.size:
            raise ValueError(f"a source must grow and its places ascend, but {size} at {start} follows {last}")
        if size == last.size:
            return
        epoch, position = last.place(start)
        before = last.layers if epoch == last.epoch else (_Layer(0, last.size),)
        # A layer that no position was read from changes nothing: what it would have put first, the new one shuffles.
        kept = tuple(layer for layer in before if layer.position < position)
        layers = (*kept, _Layer(position, size)) if kept else (_Layer(0, size),)
        if start == last.start:
            self._segments.pop()
        self._segments.append(_Segment(start, epoch, layers))

    def _within(self, segment: _Segment, numbers: Ints) -> Ints:
        found = np.empty_like(numbers)
        later = numbers >= segment.first_end
        if later.any():
            more, positions = np.divmod(numbers[later] - segment.first_end, segment.size)
            found[later] = permuted(positions, more + segment.epoch + 1, segment.size, self._seed)
        if not later.all():
            here = segment.layers[-1].position + numbers[~later] - segment.start
            found[~later] = self._in_layers(here, segment.epoch, segment.layers)
        return found

    def _in_layers(self, positions: Ints, epoch: int, layers: tuple[_Layer, ...]) -> Ints:
        """Samples at positions of an epoch that has grown; all are at or after the last growth."""
        layer, smaller = layers[-1], layers[:-1]
        # A whole epoch's order is that of a source that never grew; the rest of a grown one has a key of its own.
        seed = derived_seed(self._seed, "grown", layer.position, layer.size) if smaller else self._seed
        epochs = np.full_like(positions, epoch)
        found = layer.position + permuted(positions - layer.position, epochs, layer.size - layer.position, seed)
        if smaller:
            old = found < smaller[-1].size
            if old.any():
                found[old] = self._in_layers(found[old], epoch, smaller)
        return found

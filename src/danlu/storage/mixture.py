"""Which source of a mixture each sample comes from: exact shares in every window, found in closed form.

The sources are the leaves of a balanced binary tree. At a node, of the first i samples that reach it

    left(i) = floor((i · left + phase) / (left + right))

go to the left and the rest to the right, `left` and `right` being the weights below it: a sample goes left where the
figure steps. So the number of a sample within its source is the same figure, composed down the tree: nothing is
stored and nothing is counted up. The two sides of a node are off their share by less than one sample in any window,
hence a source by less than the depth of its leaf: one in a mixture of two, at most log2 of the sources, rounded up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from danlu.spec.mixing import LARGEST_TOTAL
from danlu.storage.order import Ints, derived_seed


@dataclass(frozen=True)
class _Node:
    left: "_Node | int"
    right: "_Node | int"
    share: int
    total: int
    phase: int

    def before(self, places: Ints) -> Ints:
        """How many of the first `places` samples at this node go to the left."""
        periods, rest = np.divmod(places, self.total)  # in two parts: places · share may not fit in 64 bits
        return periods * self.share + (rest * self.share + self.phase) // self.total


class Mixture:
    """Samples dealt to sources by weight: a pure function of seed and index."""

    def __init__(self, weights: Sequence[int], seed: int) -> None:
        """Whole weights, one a source; see `whole_weights` for others."""
        if not weights or min(weights) < 1 or sum(weights) > LARGEST_TOTAL:
            raise ValueError(f"`weights` must be 1 or more and at most 2^31 together, but are {list(weights)} instead")
        self.weights = tuple(weights)
        self._seed = seed
        self._root = self._node(0, len(weights))

    def places(self, indices: Ints) -> tuple[Ints, Ints]:
        """The source of each sample, and its number among the samples of that source."""
        sources, numbers = np.empty_like(indices), np.empty_like(indices)
        self._deal(self._root, indices, np.arange(len(indices)), sources, numbers)
        return sources, numbers

    def before(self, source: int, cursor: int) -> int:
        """How many of the samples 0 … cursor - 1 come from a source."""
        node, first, last, count = self._root, 0, len(self.weights), np.array([cursor], dtype=np.int64)
        while not isinstance(node, int):
            middle, left = (first + last) // 2, node.before(count)
            if source < middle:
                node, last, count = node.left, middle, left
            else:
                node, first, count = node.right, middle, count - left
        return int(count[0])

    def _node(self, first: int, last: int) -> "_Node | int":
        if last - first == 1:
            return first
        middle = (first + last) // 2
        share, total = sum(self.weights[first:middle]), sum(self.weights[first:last])
        phase = derived_seed(self._seed, "mixture", first, last) % total
        return _Node(self._node(first, middle), self._node(middle, last), share, total, phase)

    def _deal(self, node: "_Node | int", places: Ints, rows: Ints, sources: Ints, numbers: Ints) -> None:
        if isinstance(node, int):
            sources[rows], numbers[rows] = node, places
            return
        before = node.before(places)
        goes_left = node.before(places + 1) > before
        self._deal(node.left, before[goes_left], rows[goes_left], sources, numbers)
        self._deal(node.right, (places - before)[~goes_left], rows[~goes_left], sources, numbers)

"""Which source of a mixture each sample comes from: exact shares in every window, computed in closed form.

The sources are the leaves of a balanced binary tree. At a node, of the first i samples that reach it

    left(i) = floor((i · left + phase) / (left + right))

go to the left and the rest to the right, `left` and `right` being the weights below it: a sample goes left where
left(i) increases. So the index of a sample within its source is the same function, composed down the tree: nothing is
stored and nothing is counted. The two sides of a node differ from their share by less than one sample in any window,
hence a source by less than the depth of its leaf: one in a mixture of two, at most log2 of the sources, rounded up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from danlu.spec.mixture_weights import MAX_TOTAL_WEIGHT
from danlu.storage.data.shuffle import IntArray, derive_seed


@dataclass(frozen=True)
class _Node:
    left: "_Node | int"
    right: "_Node | int"
    left_weight: int
    total_weight: int
    phase: int

    def count_left(self, counts: IntArray) -> IntArray:
        """How many of the first `counts` samples at this node go to the left."""
        periods, rest = np.divmod(counts, self.total_weight)  # in two steps: counts · weight may not fit in 64 bits
        return periods * self.left_weight + (rest * self.left_weight + self.phase) // self.total_weight


class MixtureSampler:
    """Assigns samples to sources by weight: a pure function of seed and index."""

    def __init__(self, weights: Sequence[int], seed: int) -> None:
        """Integer weights, one per source; see `integer_weights` for others."""
        if not weights or min(weights) < 1 or sum(weights) > MAX_TOTAL_WEIGHT:
            raise ValueError(f"`weights` must be 1 or more and at most 2^31 together, but are {list(weights)} instead")
        self.weights = tuple(weights)
        self._seed = seed
        self._root = self._build_node(0, len(weights))

    def locate(self, indices: IntArray) -> tuple[IntArray, IntArray]:
        """The source of each sample, and its index among the samples of that source."""
        sources, numbers = np.empty_like(indices), np.empty_like(indices)
        self._assign(self._root, indices, np.arange(len(indices)), sources, numbers)
        return sources, numbers

    def count_before(self, source: int, cursor: int) -> int:
        """How many of the samples 0 … cursor - 1 come from a source."""
        node, first, last, count = self._root, 0, len(self.weights), np.array([cursor], dtype=np.int64)
        while not isinstance(node, int):
            middle, left = (first + last) // 2, node.count_left(count)
            if source < middle:
                node, last, count = node.left, middle, left
            else:
                node, first, count = node.right, middle, count - left
        return int(count[0])

    def _build_node(self, first: int, last: int) -> "_Node | int":
        if last - first == 1:
            return first
        middle = (first + last) // 2
        share, total = sum(self.weights[first:middle]), sum(self.weights[first:last])
        phase = derive_seed(self._seed, "mixture", first, last) % total
        return _Node(self._build_node(first, middle), self._build_node(middle, last), share, total, phase)

    def _assign(
        self, node: "_Node | int", indices: IntArray, rows: IntArray, sources: IntArray, numbers: IntArray
    ) -> None:
        if isinstance(node, int):
            sources[rows], numbers[rows] = node, indices
            return
        before = node.count_left(indices)
        goes_left = node.count_left(indices + 1) > before
        self._assign(node.left, before[goes_left], rows[goes_left], sources, numbers)
        self._assign(node.right, (indices - before)[~goes_left], rows[~goes_left], sources, numbers)

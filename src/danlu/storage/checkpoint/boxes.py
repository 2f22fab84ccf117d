"""Rectangles in a tensor's global coordinates: an offset and a size for every dimension."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod

Extent = tuple[int, ...]
Box = tuple[Extent, Extent]
"""Offset and size."""
_LINE, _PAGE, _LARGE = 64, 4096, 1 << 20


def volume(size: Extent) -> int:
    """Elements of a box of this size; a scalar has one."""
    return prod(size)


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes share, or None."""
    low = tuple(map(max, a[0], b[0]))
    high = tuple(min(x + m, y + n) for x, m, y, n in zip(*a, *b, strict=True))
    if any(start >= end for start, end in zip(low, high, strict=True)):
        return None
    return low, tuple(end - start for start, end in zip(low, high, strict=True))


def around(boxes: Iterable[Box]) -> Box:
    """The smallest box that holds all of these."""
    found = list(boxes)
    low = tuple(map(min, *(offset for offset, _ in found))) if len(found) > 1 else found[0][0]
    ends = [tuple(x + n for x, n in zip(offset, size, strict=True)) for offset, size in found]
    high = tuple(map(max, *ends)) if len(ends) > 1 else ends[0]
    return low, tuple(end - start for start, end in zip(low, high, strict=True))


def cut(box: Box, itemsize: int, most: int) -> Iterator[Box]:
    """Pieces of at most `most` bytes, in memory order: each is contiguous where the box is.

    The first dimensions are walked one index at a time until what is left of a row fits; a piece is then a run of rows.
    One row of the last dimension is never cut, however long.
    """
    offset, size = box
    if volume(size) * itemsize <= most or len(size) == 0:
        yield box
        return
    row = volume(size[1:]) * itemsize
    if row > most and len(size) > 1:
        for index in range(size[0]):
            for inner in cut((offset[1:], size[1:]), itemsize, most):
                yield (offset[0] + index, *inner[0]), (1, *inner[1])
        return
    rows = max(1, most // max(row, 1))
    for start in range(0, size[0], rows):
        yield (offset[0] + start, *offset[1:]), (min(rows, size[0] - start), *size[1:])


def laid_out(sizes: Sequence[int]) -> Iterator[int]:
    """Where in a pack buffers of these sizes begin; large ones on a page, so that they can be read past the cache."""
    at = 0
    for size in sizes:
        step = _PAGE if size >= _LARGE else _LINE
        at = -(-at // step) * step
        yield at
        at += size

"""Rectangles in a tensor's global coordinates: an offset and a size for every dimension."""

from collections.abc import Iterable, Iterator, Sequence
from math import prod

Dims = tuple[int, ...]
Box = tuple[Dims, Dims]
"""Offset and size."""
CHUNK_BYTES = 16 << 20
"""Largest chunk of a tensor: what has to be read to verify any byte of it."""
_CACHE_LINE, _PAGE, _LARGE = 64, 4096, 1 << 20


def numel(size: Dims) -> int:
    """Elements of a box of this size; a scalar has one."""
    return prod(size)


def intersect(a: Box, b: Box) -> Box | None:
    """The intersection of two boxes, or None."""
    low = tuple(map(max, a[0], b[0]))
    high = tuple(min(x + m, y + n) for x, m, y, n in zip(*a, *b, strict=True))
    if any(start >= end for start, end in zip(low, high, strict=True)):
        return None
    return low, tuple(end - start for start, end in zip(low, high, strict=True))


def bounding_box(boxes: Iterable[Box]) -> Box:
    """The smallest box that contains all of these."""
    found = list(boxes)
    low = tuple(map(min, *(offset for offset, _ in found))) if len(found) > 1 else found[0][0]
    ends = [tuple(x + n for x, n in zip(offset, size, strict=True)) for offset, size in found]
    high = tuple(map(max, *ends)) if len(ends) > 1 else ends[0]
    return low, tuple(end - start for start, end in zip(low, high, strict=True))


def split_box(box: Box, itemsize: int, most: int) -> Iterator[Box]:
    """Boxes of at most `most` bytes, in memory order: each is contiguous if the box is.

    The first dimensions are walked one index at a time until the rest of a row fits; a box is then a run of rows. One
    row of the last dimension is never split, however long.
    """
    offset, size = box
    if numel(size) * itemsize <= most or len(size) == 0:
        yield box
        return
    row = numel(size[1:]) * itemsize
    if row > most and len(size) > 1:
        for index in range(size[0]):
            for inner in split_box((offset[1:], size[1:]), itemsize, most):
                yield (offset[0] + index, *inner[0]), (1, *inner[1])
        return
    rows = max(1, most // max(row, 1))
    for start in range(0, size[0], rows):
        yield (offset[0] + start, *offset[1:]), (min(rows, size[0] - start), *size[1:])


def aligned_offsets(sizes: Sequence[int]) -> Iterator[int]:
    """Offsets of buffers of these sizes in a pack; large ones at a page, so that they can be read with O_DIRECT."""
    at = 0
    for size in sizes:
        step = _PAGE if size >= _LARGE else _CACHE_LINE
        at = -(-at // step) * step
        yield at
        at += size

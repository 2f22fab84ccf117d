"""Collectives over the levels of a network, out of the chip's own collectives inside each level.

What a flat collective sends over a trimmed trunk once for every rank, these send once for every block of ranks: an
all-reduce reduces inside a block first, and every rank takes its own share of the result over the trunk. An all-to-all
sends the same bytes, in few large messages instead of many small ones. Results are those of the flat collectives, in
the same order; sums are taken in another order, so that they may differ in the last bits.

A large tensor is split into pieces, of which some pass the outermost level while others pass those inside it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from danlu import torch_compat
from danlu.comm.level_groups import Level, LevelGroups
from danlu.comm.own_collectives import is_answered

_WITHOUT_REDUCE_SCATTER = ("gloo",)
"""Backends that reduce the whole tensor on all ranks and throw away the rest: twice the bytes."""
_PIECE_BYTES = 2 << 20
"""Of one rank: what fits its cache, and still takes a trunk long beside what starting a collective takes."""
_UNDER_WAY = 4
"""Pieces that may be on the outermost level at once."""

P = TypeVar("P")
B = TypeVar("B")


def all_reduce(tensor: Tensor, over: LevelGroups, pieces: int | None = None) -> None:
    """Sum a contiguous tensor over all ranks, in place."""
    pieces = _pieces(tensor, pieces)
    if not over.levels or not tensor.numel():
        return
    *inner, last = over.levels
    flat, unit = tensor.view(-1), pieces * prod(level.size for level in inner)
    padded = flat if flat.numel() % unit == 0 else _padded(flat, -(-flat.numel() // unit) * unit)

    def begin(piece: Tensor) -> tuple[Tensor, Tensor, dist.Work]:
        mine = piece
        for level in inner:  # what passes the last level is this rank's share of what its block has summed
            mine = _reduce_scatter_level(mine, level)
        return piece, mine, dist.all_reduce(mine, group=last.group, async_op=True)

    def finish(begun: tuple[Tensor, Tensor, dist.Work]) -> None:
        piece, mine, work = begun
        work.wait()
        for level in reversed(inner):
            gathered = piece if level is inner[0] else mine.new_empty(level.size * mine.numel())
            torch_compat.all_gather_single(gathered, mine, level.group)
            mine = gathered

    _pipeline(padded.view(pieces, -1), begin, finish)
    if padded is not flat:
        flat.copy_(padded[: flat.numel()])


def reduce_scatter(tensor: Tensor, over: LevelGroups, pieces: int | None = None) -> Tensor:
    """The sum over all ranks of this rank's part of `tensor`, whose first dimension holds a part for every rank."""
    pieces = _pieces(tensor, pieces)
    parts = _parts(tensor, over.size)
    if not over.levels or not parts.numel():
        return parts[0]
    found = torch.empty_like(parts[0])
    *inner, last = over.levels

    def begin(columns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dist.Work]:
        summed, place = columns
        for level in inner:  # inner levels first: what passes an outer one is already reduced
            # Parts are in order of ranks, so those for the same coordinate of this level are apart by its size.
            grouped = summed.reshape(-1, level.size, place.numel()).transpose(0, 1).contiguous()
            summed = _reduce_scatter_level(grouped, level).view(-1, place.numel())
        return place, *_begin_reduce_scatter(summed.contiguous(), last)

    def finish(begun: tuple[Tensor, Tensor, dist.Work]) -> None:
        place, addends, work = begun
        work.wait()
        place.copy_(_sum(addends))

    _pipeline(_columns(parts.view(over.size, -1), found.view(-1), pieces), begin, finish)
    return found


def all_gather(tensor: Tensor, over: LevelGroups, pieces: int | None = None) -> Tensor:
    """The tensors of all ranks, one after the other along a new first dimension."""
    found = tensor.new_empty((over.size, *tensor.shape))
    pieces = _pieces(found, pieces)
    if not over.levels:
        found.copy_(tensor)
    if not over.levels or not tensor.numel():
        return found
    *inner, last = over.levels

    def begin(columns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dist.Work]:  # outer levels first: over them once
        place, mine = columns
        gathered = mine.new_empty((last.size, mine.numel()))
        return place, gathered, torch_compat.begin_all_gather_single(gathered.view(-1), mine, last.group)

    def finish(begun: tuple[Tensor, Tensor, dist.Work]) -> None:
        place, parts, work = begun
        work.wait()
        for level in reversed(inner):
            gathered = parts.new_empty((level.size, *parts.shape))
            torch_compat.all_gather_single(gathered.view(-1), parts.view(-1), level.group)
            parts = gathered.transpose(0, 1).reshape(-1, parts.shape[-1])
        place.copy_(parts)

    _pipeline(_columns(found.view(over.size, -1), tensor.contiguous().view(-1), pieces), begin, finish)
    return found


def broadcast(tensor: Tensor, over: LevelGroups, source: int) -> None:
    """Give all ranks the tensor of the `source`-th of them, in place: over every link once."""
    if not tensor.numel():
        return
    coordinates = _coordinates(source, over.levels)
    for depth in reversed(range(len(over.levels))):
        level = over.levels[depth]
        # Who shares the source's place on the inner levels takes part: it has the tensor, or is given it here.
        if all(over.levels[each].coordinate == coordinates[each] for each in range(depth)):
            dist.broadcast(tensor, group=level.group, group_src=coordinates[depth])


def all_to_all(tensor: Tensor, over: LevelGroups, pieces: int | None = None) -> Tensor:
    """Send the r-th part of the first dimension to the r-th rank, and return the parts that all ranks sent here."""
    pieces = _pieces(tensor, pieces)
    parts = _parts(tensor, over.size).view(over.size, -1)
    if not over.levels or not parts.numel():
        return tensor.clone()
    found = torch.empty_like(parts)
    *inner, last = over.levels

    def begin(columns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, dist.Work]:
        passed, place = columns
        for level in inner:
            received, work = _begin_all_to_all(passed, over, level)
            work.wait()
            passed = received.transpose(0, 1).reshape(place.shape)
        return place, *_begin_all_to_all(passed, over, last)

    def finish(begun: tuple[Tensor, Tensor, dist.Work]) -> None:
        place, received, work = begun
        work.wait()
        place.copy_(received.view(place.shape))  # no level is outside the last one: they are in order

    _pipeline(_columns(parts, found, pieces), begin, finish)
    return found.view(tensor.shape)


def _begin_all_to_all(parts: Tensor, over: LevelGroups, level: Level) -> tuple[Tensor, dist.Work]:
    """Send parts, in order (for outer coordinates, for this one, from inner ones), over one level.

    They arrive in order (from this coordinate, for outer ones, from inner ones).
    """
    inner = level_stride(over.levels, level)
    grouped = parts.reshape(-1, level.size, inner, parts.shape[1]).transpose(0, 1).contiguous()
    received = torch.empty_like(grouped)
    return received, dist.all_to_all_single(received, grouped, group=level.group, async_op=True)


def level_stride(levels: Sequence[Level], wanted: Level) -> int:
    """How many ranks apart the neighbors on a level are: the ranks of all levels inside it."""
    stride = 1
    for level in levels:
        if level is wanted:
            return stride
        stride *= level.size
    raise ValueError("the level must be one of the group's, but is not")


def all_to_all_v(rows: Tensor, counts: Tensor, over: LevelGroups) -> tuple[Tensor, Tensor]:
    """Send `counts[r]` rows to the r-th rank; the rows sent here, in order of their ranks, and how many each sent.

    `rows` are in order of the ranks they are for, and `counts` is on the host.
    """
    # Blocks of rows in order (for outer coordinates, for this one, from inner ones), one more level passed each time.
    for level in over.levels:
        inner = level_stride(over.levels, level)
        blocks = counts.view(-1, level.size, inner)
        order = torch.arange(counts.numel()).view(blocks.shape).transpose(0, 1).reshape(-1)
        sent_counts = counts[order].contiguous()
        received_counts = _exchange_counts(sent_counts, level, rows.device)
        sent = _blocks_in_order(rows, counts, order)
        splits = [each.view(level.size, -1).sum(1).tolist() for each in (sent_counts, received_counts)]
        received = rows.new_empty((sum(splits[1]), *rows.shape[1:]))
        dist.all_to_all_single(received, sent, splits[1], splits[0], group=level.group)
        back = torch.arange(counts.numel()).view(level.size, -1, inner).transpose(0, 1).reshape(-1)
        rows, counts = _blocks_in_order(received, received_counts, back), received_counts[back]
    return rows, counts


def _exchange_counts(counts: Tensor, level: Level, device: torch.device) -> Tensor:
    sent = counts.to(device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=level.group)
    return received.cpu()


def _blocks_in_order(rows: Tensor, counts: Tensor, order: Tensor) -> Tensor:
    """Blocks of so many rows each, in another order."""
    starts = counts.cumsum(0) - counts
    sizes = counts[order]
    # row number within its block, plus where the block started
    within = torch.arange(int(sizes.sum())) - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return rows.index_select(0, (starts[order].repeat_interleave(sizes) + within).to(rows.device))


def _reduce_scatter_level(tensor: Tensor, level: Level) -> Tensor:
    """This rank's share, of `level.size` equal ones, of the sum over one level."""
    addends, work = _begin_reduce_scatter(tensor, level)
    work.wait()
    return _sum(addends)


def _begin_reduce_scatter(tensor: Tensor, level: Level) -> tuple[Tensor, dist.Work]:
    """What is to be added up for this rank's share when the work is done: one row, or one of every rank."""
    if level.group.name() in _WITHOUT_REDUCE_SCATTER and not is_answered(level.group):
        received = torch.empty_like(tensor).view(level.size, -1)
        work = dist.all_to_all_single(received, tensor.view(level.size, -1), group=level.group, async_op=True)
        return received, work
    mine = tensor.new_empty((1, tensor.numel() // level.size))
    return mine, torch_compat.begin_reduce_scatter_single(mine.view(-1), tensor.view(-1), level.group)


def _sum(addends: Tensor) -> Tensor:
    return addends[0] if addends.shape[0] == 1 else addends.sum(0, dtype=addends.dtype)


def _columns(left: Tensor, right: Tensor, pieces: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tensors whose last dimensions are as long, in pieces along it."""
    pieces = min(pieces, left.shape[-1])
    return zip(left.tensor_split(pieces, -1), right.tensor_split(pieces, -1), strict=True)


def _parts(tensor: Tensor, ranks: int) -> Tensor:
    """One part for every rank along the first dimension."""
    if tensor.shape[0] % ranks:
        raise ValueError(
            f"the first dimension must hold a part for each of {ranks} ranks, but has {tensor.shape[0]} rows"
        )
    return tensor.contiguous().view(ranks, tensor.shape[0] // ranks, *tensor.shape[1:])


def _pieces(tensor: Tensor, pieces: int | None) -> int:
    if pieces is None:
        return max(1, tensor.nbytes // _PIECE_BYTES)
    if pieces < 1:
        raise ValueError(f"`pieces` must be 1 or more, but is {pieces}")
    return pieces


def _pipeline(pieces: Iterable[P], begin: Callable[[P], B], finish: Callable[[B], None]) -> None:
    """Begin and finish every piece in order, and have a few of them under way at once."""
    under_way: deque[B] = deque()
    for piece in pieces:
        if len(under_way) == _UNDER_WAY:
            finish(under_way.popleft())
        under_way.append(begin(piece))
    for begun in under_way:
        finish(begun)


def _padded(flat: Tensor, size: int) -> Tensor:
    padded = flat.new_zeros(size)
    padded[: flat.numel()] = flat
    return padded


def _coordinates(index: int, levels: Sequence[Level]) -> list[int]:
    found = []
    for level in levels:
        found.append(index % level.size)
        index //= level.size
    return found

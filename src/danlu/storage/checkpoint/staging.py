"""Copy a rank's part of the state into host memory, with a hash of every chunk taken from the tensors on the way."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from danlu.storage.checkpoint.boxes import Box, cut, laid_out, volume
from danlu.storage.checkpoint.manifest import ITEMSIZE, Chunk
from danlu.storage.checkpoint.pieces import Piece, local_bytes
from danlu.storage.hashing import copy_and_hash, crc32c

CHUNK_BYTES = 16 << 20
"""Largest chunk: what has to be read to check any byte of it."""


@dataclass(frozen=True)
class Place:
    """Where one piece goes in the pack: its chunks in order, and their first bytes."""

    piece: Piece
    boxes: Sequence[Box]
    at: Sequence[int]


@dataclass(frozen=True)
class PackPlan:
    """What a rank writes, and where in its pack."""

    places: Sequence[Place]
    bytes: int
    gaps: Sequence[tuple[int, int]]
    """First and last byte between chunks; zeros go there."""

    @classmethod
    def of(cls, pieces: Sequence[Piece], chunk_bytes: int = CHUNK_BYTES) -> "PackPlan":
        """Lay out the pieces that are this rank's to write, in the order of their names."""
        mine = sorted((piece for piece in pieces if piece.replica == 0), key=lambda piece: (piece.name, piece.box))
        boxes = [list(cut(piece.box, ITEMSIZE[piece.dtype], chunk_bytes)) for piece in mine]
        sizes = [
            volume(size) * ITEMSIZE[piece.dtype] for piece, each in zip(mine, boxes, strict=True) for _, size in each
        ]
        starts = list(laid_out(sizes))
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        gaps = [(end, start) for end, start in zip(ends, starts[1:], strict=False) if end < start]
        places, done = [], 0
        for piece, each in zip(mine, boxes, strict=True):
            places.append(Place(piece, each, starts[done : done + len(each)]))
            done += len(each)
        return cls(places, ends[-1] if ends else 0, gaps)


def stage(plan: PackPlan, tensors: Mapping[str, Tensor], into: memoryview) -> list[list[Chunk]]:
    """Copy what the plan names into memory and return the chunks of every place, with their hashes."""
    for start, end in plan.gaps:
        into[start:end] = bytes(end - start)
    return [_stage_one(place, tensors[place.piece.name], into) for place in plan.places]


def _stage_one(place: Place, tensor: Tensor, into: memoryview) -> list[Chunk]:
    source, done, chunks = local_bytes(tensor), 0, []
    for box, at in zip(place.boxes, place.at, strict=True):
        length = volume(box[1]) * ITEMSIZE[place.piece.dtype]
        target = into[at : at + length]
        crc = copied(source[done : done + length], target)
        chunks.append(Chunk(offset=box[0], size=box[1], at=at, crc32c=crc))
        done += length
    if done != source.numel():
        raise RuntimeError(f"{place.piece.name}: {source.numel()} bytes are held, but its place in the pack has {done}")
    return chunks


def copied(part: Tensor, target: memoryview) -> int:
    """Copy bytes of a tensor into host memory, and return their crc32c."""
    if part.device.type == "cpu":
        return copy_and_hash(part.numpy().data, target)
    torch.frombuffer(target, dtype=torch.uint8).copy_(part)
    return crc32c(target)  # the bytes are first seen by this processor where the chip has put them

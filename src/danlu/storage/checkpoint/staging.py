"""Host memory that a save is copied into, with a hash of every chunk taken from the training tensors on the way."""

import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from danlu.storage.checkpoint.boxes import Box, cut, volume
from danlu.storage.checkpoint.manifest import ITEMSIZE, Chunk
from danlu.storage.checkpoint.pieces import Piece, laid_out, local_bytes
from danlu.storage.hashing import copy_and_hash, crc32c

CHUNK_BYTES = 16 << 20
"""Largest chunk: what has to be read to check any byte of it."""
_PAGE = 4096


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

    @classmethod
    def of(cls, pieces: Sequence[Piece], chunk_bytes: int = CHUNK_BYTES) -> "PackPlan":
        """Lay out the pieces that are this rank's to write, in the order of their names."""
        mine = sorted((piece for piece in pieces if piece.replica == 0), key=lambda piece: (piece.name, piece.box))
        boxes = [list(cut(piece.box, ITEMSIZE[piece.dtype], chunk_bytes)) for piece in mine]
        sizes = [
            volume(size) * ITEMSIZE[piece.dtype] for piece, each in zip(mine, boxes, strict=True) for _, size in each
        ]
        starts = list(laid_out(sizes))
        end = starts[-1] + sizes[-1] if sizes else 0
        places, done = [], 0
        for piece, each in zip(mine, boxes, strict=True):
            places.append(Place(piece, each, starts[done : done + len(each)]))
            done += len(each)
        return cls(places, end)


class Slot:
    """A buffer in shared memory: it outlives the process that filled it, and is there before it is needed.

    Its pages are taken when it is made, so that the first save is as quick as the others.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = -(-max(size, 1) // _PAGE) * _PAGE
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(descriptor, self.size)
            os.posix_fallocate(descriptor, 0, self.size)  # here, not at a page fault, a full memory shows itself
            self._map = mmap.mmap(descriptor, self.size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        finally:
            os.close(descriptor)
        self.view = memoryview(self._map)

    def close(self) -> None:
        """Let go of the memory and remove it."""
        with suppress(BufferError):  # an upload that failed may hold a part of it; the memory goes when that does
            self.view.release()
            self._map.close()
        self.path.unlink(missing_ok=True)


def stage(plan: PackPlan, tensors: Mapping[str, Tensor], into: memoryview) -> list[list[Chunk]]:
    """Copy what the plan names into memory and return the chunks of every place, with their hashes."""
    return [_stage_one(place, tensors[place.piece.name], into) for place in plan.places]


def _stage_one(place: Place, tensor: Tensor, into: memoryview) -> list[Chunk]:
    source, done, chunks = local_bytes(tensor), 0, []
    for box, at in zip(place.boxes, place.at, strict=True):
        length = volume(box[1]) * ITEMSIZE[place.piece.dtype]
        target = into[at : at + length]
        part = source[done : done + length]
        if part.device.type == "cpu":
            crc = copy_and_hash(part.numpy().data, target)
        else:  # the bytes are first seen by this processor where the chip has put them
            torch.frombuffer(target, dtype=torch.uint8).copy_(part)
            crc = crc32c(target)
        chunks.append(Chunk(offset=box[0], size=box[1], at=at, crc32c=crc))
        done += length
    if done != source.numel():
        raise RuntimeError(f"{place.piece.name}: {source.numel()} bytes are held, but its place in the pack has {done}")
    return chunks

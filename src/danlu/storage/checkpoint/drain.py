"""From the staging memory to the store, in the background of the training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from danlu.storage.checkpoint.boxes import volume
from danlu.storage.checkpoint.fingerprint import all_finite, as_bits, fingerprint
from danlu.storage.checkpoint.manifest import ITEMSIZE, Chunk, Held

if TYPE_CHECKING:  # importers weigh numbers too, and need no torch
    from danlu.storage.checkpoint.staging import PackPlan

_WORD = 2**64


@dataclass(frozen=True)
class Weighed:
    """What a pack holds, told from its bytes in the staging memory."""

    tensors: dict[str, Held]
    finite: bool


def weigh(plan: "PackPlan", chunks: Sequence[Sequence[Chunk]], staged: memoryview) -> Weighed:
    """Fingerprint of every tensor, and whether all numbers are finite."""
    tensors: dict[str, Held] = {}
    finite = True
    for place, mine in zip(plan.places, chunks, strict=True):
        piece, total = place.piece, 0
        for chunk in mine:
            itemsize = ITEMSIZE[piece.dtype]
            bits = as_bits(staged[chunk.at : chunk.at + volume(chunk.size) * itemsize], itemsize, chunk.size)
            total += fingerprint(bits, chunk.offset)
            finite = finite and all_finite(bits, piece.dtype)
        before = tensors.get(piece.name)
        tensors[piece.name] = Held(
            dtype=piece.dtype,
            shape=piece.shape,
            chunks=(*(before.chunks if before else ()), *mine),
            fingerprint=(total + (before.fingerprint if before else 0)) % _WORD,
        )
    return Weighed(tensors, finite)


def parts(staged: memoryview, length: int, piece: int = 32 << 20) -> list[memoryview]:
    """A pack's bytes in pieces, as a store takes them."""
    return [staged[start : min(start + piece, length)] for start in range(0, length, piece)]

"""From the staging memory to the store, in the background of the training."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from danlu.storage.checkpoint.boxes import volume
from danlu.storage.checkpoint.fingerprint import as_bits, fingerprint
from danlu.storage.checkpoint.manifest import ITEMSIZE, Chunk, Dtype, Held

if TYPE_CHECKING:  # importers weigh numbers too, and need no torch
    from danlu.storage.checkpoint.staging import PackPlan

_EXPONENT: dict[Dtype, int] = {
    "F64": 0x7FF << 52,
    "F32": 0xFF << 23,
    "F16": 0x1F << 10,
    "BF16": 0xFF << 7,
    "F8_E5M2": 0x1F << 2,
}
"""Bits that are all set in an infinity and in what is not a number."""
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


def all_finite(bits: NDArray[np.unsignedinteger], dtype: Dtype) -> bool:
    """Whether no element is infinite or not a number."""
    if dtype == "F8_E4M3":  # has no infinity; all bits but the sign set is its one NaN
        return not bool(((bits & 0x7F) == 0x7F).any())
    if dtype not in _EXPONENT:
        return True
    if dtype in ("F32", "F64"):
        with np.errstate(all="ignore"):
            total = bits.view(np.float32 if dtype == "F32" else np.float64).sum(dtype=None)
        if math.isfinite(total):  # what is not finite does not vanish in a sum
            return True
    mask = bits.dtype.type(_EXPONENT[dtype])
    return not bool(((bits & mask) == mask).any())


def parts(staged: memoryview, length: int, piece: int = 32 << 20) -> list[memoryview]:
    """A pack's bytes in pieces, as a store takes them."""
    return [staged[start : min(start + piece, length)] for start in range(0, length, piece)]

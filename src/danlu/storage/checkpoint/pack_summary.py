"""Fingerprints of a staged pack, computed in the background of the training."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from danlu.storage.checkpoint.boxes import numel
from danlu.storage.checkpoint.fingerprint import all_finite, as_bits, fingerprint
from danlu.storage.checkpoint.manifest import ITEMSIZE, Chunk, TensorShard

if TYPE_CHECKING:  # importers need this module, and no torch
    from danlu.storage.checkpoint.staging import PackPlan

_UINT64_RANGE = 2**64
_PART_BYTES = 32 << 20


@dataclass(frozen=True)
class PackSummary:
    """The tensors in a pack, from its bytes in the staging buffer."""

    tensors: dict[str, TensorShard]
    finite: bool


def summarize_pack(plan: "PackPlan", chunks: Sequence[Sequence[Chunk]], staged: memoryview) -> PackSummary:
    """Fingerprint of every tensor, and whether all elements are finite."""
    tensors: dict[str, TensorShard] = {}
    finite = True
    for entry, mine in zip(plan.entries, chunks, strict=True):
        shard, total = entry.shard, 0
        for chunk in mine:
            itemsize = ITEMSIZE[shard.dtype]
            bits = as_bits(staged[chunk.at : chunk.at + numel(chunk.size) * itemsize], itemsize, chunk.size)
            total += fingerprint(bits, chunk.offset)
            finite = finite and all_finite(bits, shard.dtype)
        before = tensors.get(shard.name)
        tensors[shard.name] = TensorShard(
            dtype=shard.dtype,
            shape=shard.shape,
            chunks=(*(before.chunks if before else ()), *mine),
            fingerprint=(total + (before.fingerprint if before else 0)) % _UINT64_RANGE,
        )
    return PackSummary(tensors, finite)


def split_buffer(staged: memoryview, length: int) -> list[memoryview]:
    """A pack's bytes in parts, as a store accepts them."""
    return [staged[start : min(start + _PART_BYTES, length)] for start in range(0, length, _PART_BYTES)]

"""Compare two checkpoints: by fingerprints without reading data, or element by element. No torch."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from danlu.storage.checkpoint.boxes import Box, intersect, numel
from danlu.storage.checkpoint.fingerprint import as_bits
from danlu.storage.checkpoint.hash_tree import same_dtype_and_shape
from danlu.storage.checkpoint.manifest import ITEMSIZE, Manifest, SafetensorsDtype
from danlu.storage.checkpoint.reader import CheckpointReader, StoredChunk
from danlu.storage.store.checksum import crc32c

UIntArray = NDArray[np.unsignedinteger]
_NUMPY_DTYPES: dict[SafetensorsDtype, type] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.uint8,
}  # fmt: skip


@dataclass
class CheckpointDiff:
    """Differences of two checkpoints by names, shapes and fingerprints."""

    only_first: list[str] = field(default_factory=list)
    only_second: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    """In both, but with different shape or dtype."""
    different: list[str] = field(default_factory=list)
    """Same shape and dtype, different content."""
    equal: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Whether both hold the same tensors with the same bits."""
        return not (self.only_first or self.only_second or self.reshaped or self.different)


def compare_manifests(
    first: Manifest, second: Manifest, wanted: Callable[[str], bool] = lambda name: True
) -> CheckpointDiff:
    """Compare without reading data: fingerprints do not depend on the layouts that wrote them."""
    found = CheckpointDiff()
    for name in sorted(filter(wanted, first.tensors.keys() | second.tensors.keys())):
        a, b = first.tensors.get(name), second.tensors.get(name)
        if b is None:
            found.only_first.append(name)
        elif a is None:
            found.only_second.append(name)
        elif not same_dtype_and_shape(a, b):
            found.reshaped.append(name)
        elif a.fingerprint == b.fingerprint:
            found.equal.append(name)
        else:
            found.different.append(name)
    return found


@dataclass(frozen=True)
class TensorDiff:
    """Differences of two tensors of the same shape and dtype."""

    elements: int
    differing: int
    """Elements whose bits are not the same."""
    first: tuple[int, ...] | None
    """Index of the first of them."""
    largest: float
    """Largest |Δ| over elements that are finite in both."""
    not_finite: int
    """Differing elements that are infinite or not a number in either."""


def compare_tensor(
    first: CheckpointReader, second: CheckpointReader, name: str, on_bytes: Callable[[int], None] = lambda done: None
) -> TensorDiff:
    """Read a tensor from both, with every chunk verified, and compare its elements."""
    a, b = read_bits(first, name, on_bytes), read_bits(second, name, on_bytes)
    dtype = first.manifest.tensors[name].dtype
    where = np.flatnonzero(a.reshape(-1) != b.reshape(-1))
    if not where.size:
        return TensorDiff(a.size, 0, None, 0.0, 0)
    largest, not_finite = _max_abs_diff(a.reshape(-1)[where], b.reshape(-1)[where], dtype)
    index = tuple(int(i) for i in np.unravel_index(where[0], a.shape)) if a.ndim else ()
    return TensorDiff(a.size, int(where.size), index, largest, not_finite)


def read_bits(reader: CheckpointReader, name: str, on_bytes: Callable[[int], None] = lambda done: None) -> UIntArray:
    """A full tensor as the unsigned integers of its elements; every chunk is verified."""
    shape = reader.manifest.tensors[name].shape
    return read_box_bits(reader, name, ((0,) * len(shape), shape), on_bytes)


def read_box_bits(
    reader: CheckpointReader, name: str, box: Box, on_bytes: Callable[[int], None] = lambda done: None
) -> UIntArray:
    """A box of a tensor as the unsigned integers of its elements; every chunk that overlaps it is read and verified."""
    itemsize = ITEMSIZE[reader.manifest.tensors[name].dtype]
    bits = as_bits(memoryview(bytearray(numel(box[1]) * itemsize)), itemsize, box[1])

    def consume(stored: StoredChunk, content: memoryview) -> int:
        chunk = stored.chunk
        shared = intersect(box, chunk.box)
        if shared is not None:
            there, here = (
                tuple(
                    slice(at - first, at - first + count)
                    for at, first, count in zip(shared[0], origin, shared[1], strict=True)
                )
                for origin in (chunk.offset, box[0])
            )
            bits[here] = as_bits(content, itemsize, chunk.size)[there]
        return crc32c(content)

    reader.read_chunks(reader.find_chunks({name: [box]}), consume, on_bytes)
    return bits


def decode_numbers(bits: UIntArray, dtype: SafetensorsDtype) -> NDArray[np.generic]:
    """Elements as numpy numbers; bf16 and the 8-bit floats are decoded by hand."""
    if dtype == "BF16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype == "F8_E5M2":  # the upper half of an fp16
        return (bits.astype(np.uint16) << np.uint16(8)).view(np.float16)
    if dtype == "F8_E4M3":
        return _e4m3_table()[bits]
    return bits.view(_NUMPY_DTYPES[dtype])


def _max_abs_diff(a: UIntArray, b: UIntArray, dtype: SafetensorsDtype) -> tuple[float, int]:
    if dtype not in ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"):
        x, y = decode_numbers(a, dtype), decode_numbers(b, dtype)
        distance = np.maximum(x, y).view(a.dtype) - np.minimum(x, y).view(a.dtype)  # unsigned: it cannot overflow
        return float(distance.max()), 0
    x, y = decode_numbers(a, dtype).astype(np.float64), decode_numbers(b, dtype).astype(np.float64)
    finite = np.isfinite(x) & np.isfinite(y)
    largest = float(np.abs(x[finite] - y[finite]).max()) if finite.any() else 0.0
    return largest, int((~finite).sum())


def _e4m3_table() -> NDArray[np.float32]:
    """Every value of an 8-bit float with four bits of exponent (bias 7), three of mantissa and no infinity."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, code & 7
    small = mantissa * 2.0**-9
    value = np.where(exponent == 0, small, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value = np.where((code & 0x7F) == 0x7F, np.nan, value)
    return np.where(code >> 7, -value, value).astype(np.float32)

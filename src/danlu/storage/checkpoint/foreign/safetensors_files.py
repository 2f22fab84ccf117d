"""Safetensors files, one or several with an index, as tensors to import; read without a library."""

import json
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from danlu.storage.checkpoint.foreign.dcp import SourceCheckpoint
from danlu.storage.checkpoint.foreign.safe_pickle import CheckpointImportError
from danlu.storage.checkpoint.manifest import ITEMSIZE
from danlu.storage.checkpoint.single_writer import SourceShard, SourceTensor
from danlu.storage.store.safe_path import UnsafePathError, sibling_file

_MAX_HEADER_BYTES = 100 << 20
"""Bytes; the format's own limit."""
_INDEX = "*.safetensors.index.json"


def open_safetensors(path: Path) -> SourceCheckpoint:
    """Read the headers of a file, or of all files in a folder; with an index, of the files it names."""
    files = [path] if path.is_file() else _files(path)
    tensors: dict[str, SourceTensor] = {}
    for file in files:
        for tensor in _tensors(file):
            if tensor.name in tensors:
                raise CheckpointImportError(f"{file}: {tensor.name} must be in one file, but is in an earlier one too")
            tensors[tensor.name] = tensor
    return SourceCheckpoint(list(tensors.values()))


def _files(folder: Path) -> list[Path]:
    indices = sorted(folder.glob(_INDEX))
    if len(indices) > 1:
        raise CheckpointImportError(f"{folder} has {len(indices)} indices; give the file to import")
    if not indices:
        if not (found := sorted(folder.glob("*.safetensors"))):
            raise CheckpointImportError(f"{folder} must hold .safetensors files, but holds none")
        return found
    try:
        names = list(json.loads(indices[0].read_text("utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointImportError(f"{indices[0]} must map tensors to files, but does not: {error!r}") from None
    try:
        files = sorted({sibling_file(indices[0], name) for name in names})
    except UnsafePathError as error:
        raise CheckpointImportError(str(error)) from None
    if absent := [file.name for file in files if not file.is_file()]:
        raise CheckpointImportError(
            f"{folder} lacks {len(absent)} of the files its index names, the first is {absent[0]}"
        )
    return files


def _tensors(file: Path) -> list[SourceTensor]:
    header, start = _header(file)
    length = file.stat().st_size - start
    return [_tensor(file, name, entry, start, length) for name, entry in header.items() if name != "__metadata__"]


def _header(file: Path) -> tuple[dict[str, Any], int]:
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if not 0 < size <= min(_MAX_HEADER_BYTES, file.stat().st_size - 8):
            raise CheckpointImportError(f"{file} is not a safetensors file: its header would have {size} bytes")
        try:
            header = json.loads(opened.read(size))
        except ValueError as error:
            raise CheckpointImportError(f"{file} is not a safetensors file: its header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise CheckpointImportError(f"{file} is not a safetensors file: its header is not an object")
    return header, 8 + size


def _tensor(file: Path, name: str, entry: Any, start: int, length: int) -> SourceTensor:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise CheckpointImportError(f"{file}: {name} must have dtype, shape and data_offsets, but has not") from None
    if dtype not in ITEMSIZE:
        raise CheckpointImportError(f"{file}: {name} is stored as {dtype}, but must be one of {', '.join(ITEMSIZE)}")
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)):
        raise CheckpointImportError(f"{file}: {name} must have a shape and offsets of whole numbers, but has {entry}")
    if end > length or end - begin != prod(shape) * ITEMSIZE[dtype]:
        raise CheckpointImportError(
            f"{file}: {name} must lie inside the file with its {prod(shape)} elements, but does not"
        )
    box = (0,) * len(shape), shape
    return SourceTensor(name, dtype, shape, [SourceShard(box, partial(_bytes, file, start + begin, end - begin))])


def _bytes(file: Path, at: int, length: int) -> memoryview:
    content = bytearray(length)
    with file.open("rb") as opened:
        opened.seek(at)
        if opened.readinto(content) != length:
            raise CheckpointImportError(f"{file} ends before byte {at + length}")
    return memoryview(content)

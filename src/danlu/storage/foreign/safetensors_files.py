"""Safetensors files, one or several with an index, as tensors to be written; read without a library."""

import json
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

from danlu.storage.checkpoint.manifest import ITEMSIZE
from danlu.storage.checkpoint.single import Part, Whole
from danlu.storage.foreign.dcp import Found
from danlu.storage.foreign.pickled import Refused

_MOST_HEADER = 100 << 20
"""Bytes; the format's own limit."""
_INDEX = "*.safetensors.index.json"


def open_safetensors(place: Path) -> Found:
    """Read the headers of a file, or of all files in a folder; where there is an index, the files it names."""
    files = [place] if place.is_file() else _files(place)
    tensors: dict[str, Whole] = {}
    for file in files:
        for tensor in _tensors(file):
            if tensor.name in tensors:
                raise Refused(f"{file}: {tensor.name} must be in one file, but is in an earlier one too")
            tensors[tensor.name] = tensor
    return Found(list(tensors.values()))


def _files(folder: Path) -> list[Path]:
    indices = sorted(folder.glob(_INDEX))
    if len(indices) > 1:
        raise Refused(f"{folder} has {len(indices)} indices; give the file to import")
    if not indices:
        if not (found := sorted(folder.glob("*.safetensors"))):
            raise Refused(f"{folder} must hold .safetensors files, but holds none")
        return found
    try:
        names = sorted(set(json.loads(indices[0].read_text("utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{indices[0]} must map tensors to files, but does not: {error!r}") from None
    if wrong := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise Refused(f"{indices[0]} must name files beside it, but names {wrong[0]!r}")
    if absent := [name for name in names if not (folder / name).is_file()]:
        raise Refused(f"{folder} lacks {len(absent)} of the files its index names, the first is {absent[0]}")
    return [folder / name for name in names]


def _tensors(file: Path) -> list[Whole]:
    header, start = _header(file)
    length = file.stat().st_size - start
    return [_tensor(file, name, entry, start, length) for name, entry in header.items() if name != "__metadata__"]


def _header(file: Path) -> tuple[dict[str, Any], int]:
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        if not 0 < size <= min(_MOST_HEADER, file.stat().st_size - 8):
            raise Refused(f"{file} is no safetensors file: its header would have {size} bytes")
        try:
            header = json.loads(opened.read(size))
        except ValueError as error:
            raise Refused(f"{file} is no safetensors file: its header is no JSON: {error}") from None
    if not isinstance(header, dict):
        raise Refused(f"{file} is no safetensors file: its header is no object")
    return header, 8 + size


def _tensor(file: Path, name: str, entry: Any, start: int, length: int) -> Whole:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise Refused(f"{file}: {name} must have dtype, shape and data_offsets, but has not") from None
    if dtype not in ITEMSIZE:
        raise Refused(f"{file}: {name} is stored as {dtype}, but must be one of {', '.join(ITEMSIZE)}")
    if not all(isinstance(number, int) and number >= 0 for number in (*shape, begin, end)):
        raise Refused(f"{file}: {name} must have a shape and offsets of whole numbers, but has {entry}")
    if end > length or end - begin != prod(shape) * ITEMSIZE[dtype]:
        raise Refused(f"{file}: {name} must lie inside the file with its {prod(shape)} elements, but does not")
    box = (0,) * len(shape), shape
    return Whole(name, dtype, shape, [Part(box, partial(_bytes, file, start + begin, end - begin))])


def _bytes(file: Path, at: int, length: int) -> memoryview:
    content = bytearray(length)
    with file.open("rb") as opened:
        opened.seek(at)
        if opened.readinto(content) != length:
            raise Refused(f"{file} ends before byte {at + length}")
    return memoryview(content)

"""The tensor in a record that `torch.save` wrote: a zip with a pickle that describes it, and its bytes."""

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from danlu.storage.checkpoint.boxes import numel
from danlu.storage.checkpoint.foreign.safe_pickle import CheckpointImportError, PickledObject, read_pickle
from danlu.storage.checkpoint.manifest import ITEMSIZE, SafetensorsDtype

DTYPE_OF_TORCH_NAME: Mapping[str, SafetensorsDtype] = {
    "float64": "F64", "double": "F64", "float32": "F32", "float": "F32", "float16": "F16", "half": "F16",
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "long": "I64", "int32": "I32", "int": "I32", "int16": "I16", "short": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_DTYPE_OF_STORAGE: Mapping[str, SafetensorsDtype] = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
_UNTYPED_STORAGE = "UntypedStorage"
_ALLOWED_GLOBALS = {
    "torch._utils": frozenset({"_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"}),
    "torch": frozenset({*_DTYPE_OF_STORAGE, *DTYPE_OF_TORCH_NAME, "Size"}),
    "torch.storage": frozenset({_UNTYPED_STORAGE}),
    "collections": frozenset({"OrderedDict"}),
}
_UINT_OF_SIZE = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_MAX_PICKLE_BYTES = 1 << 20


@dataclass(frozen=True)
class FileSlice:
    """Byte range of a record in a file."""

    path: Path
    offset: int
    length: int


def read_tensor(record: FileSlice, dtype: SafetensorsDtype, shape: tuple[int, ...]) -> memoryview:
    """The tensor's bytes, row by row; `CheckpointImportError` if the record is not the expected tensor."""
    where = f"{record.path} from byte {record.offset}"
    with record.path.open("rb") as file:
        window = _FileSection(file, record.offset, record.length)
        try:
            archive = zipfile.ZipFile(io.BufferedReader(window))
        except zipfile.BadZipFile as error:
            raise CheckpointImportError(f"{where} must be a zip of torch.save, but is not: {error}") from None
        with archive:
            return _tensor(archive, where, dtype, shape)


def _tensor(archive: zipfile.ZipFile, where: str, dtype: SafetensorsDtype, shape: tuple[int, ...]) -> memoryview:
    root = next((name.removesuffix("data.pkl") for name in archive.namelist() if name.endswith("/data.pkl")), None)
    if root is None:
        raise CheckpointImportError(f"{where} must hold data.pkl, but holds {', '.join(archive.namelist()[:5])}")
    if (
        f"{root}byteorder" in archive.namelist()
        and _read_zip_entry(archive, f"{root}byteorder", where, 16) != b"little"
    ):
        raise CheckpointImportError(f"{where} was written by a big-endian machine, which is not supported")
    rebuilt = read_pickle(
        _read_zip_entry(archive, f"{root}data.pkl", where, _MAX_PICKLE_BYTES), f"{where}, data.pkl", _ALLOWED_GLOBALS
    )
    storage, first, size, strides, found = _parse_rebuild_call(rebuilt, where)
    if (found, size) != (dtype, shape):
        raise CheckpointImportError(
            f"{where} must hold {dtype} {list(shape)} as the metadata says, but has {found} {list(size)}"
        )
    reach = first + sum((count - 1) * stride for count, stride in zip(size, strides, strict=True)) + 1
    limit = max(reach, 0) * ITEMSIZE[dtype]
    raw = _read_zip_entry(archive, f"{root}data/{storage}", where, None) if numel(size) else b""
    if not numel(size):
        return memoryview(b"")
    if first < 0 or min(strides, default=0) < 0 or limit > len(raw):
        raise CheckpointImportError(f"{where}: a view of {limit} bytes must lie inside its storage of {len(raw)} bytes")
    itemsize = ITEMSIZE[dtype]
    flat = np.frombuffer(raw, dtype=_UINT_OF_SIZE[itemsize], count=len(raw) // itemsize)
    view = np.lib.stride_tricks.as_strided(flat[first:], size, [stride * itemsize for stride in strides])
    return np.ascontiguousarray(view).reshape(-1).view(np.uint8).data


def _parse_rebuild_call(
    rebuilt: Any, where: str
) -> tuple[str, int, tuple[int, ...], tuple[int, ...], SafetensorsDtype]:
    """Storage, first element, size, strides and dtype, from the call that would rebuild the tensor."""
    if isinstance(rebuilt, PickledObject) and rebuilt.cls.name == "_rebuild_parameter":
        rebuilt = rebuilt.args[0]
    if not isinstance(rebuilt, PickledObject) or not rebuilt.cls.name.startswith("_rebuild_tensor_v"):
        raise CheckpointImportError(f"{where} must describe one tensor, but describes {type(rebuilt).__name__}")
    try:
        persistent, first, size, strides = rebuilt.args[:4]
        tag, kind, key, _, _ = persistent.args[0]
        if tag != "storage" or not isinstance(key, str) or not key.isdigit():
            raise CheckpointImportError(f"{where} must name a storage by its number, but has {tag!r}, {key!r}")
        dtype = (
            _DTYPE_OF_STORAGE[kind.name] if kind.name != _UNTYPED_STORAGE else DTYPE_OF_TORCH_NAME[rebuilt.args[6].name]
        )
        return key, parse_count(first), parse_size(size), parse_size(strides), dtype
    except (ValueError, KeyError, AttributeError, IndexError, TypeError) as error:
        raise CheckpointImportError(f"{where} does not describe a tensor as torch.save does: {error}") from None


def parse_size(value: Any) -> tuple[int, ...]:
    """A size from a pickle: a tuple, or `torch.Size` of one."""
    if isinstance(value, PickledObject) and str(value.cls) == "torch.Size":
        (value,) = value.args
    return tuple(parse_count(number) for number in value)


def parse_count(value: Any) -> int:
    """A number of elements or bytes."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise CheckpointImportError(f"a size must be a number from 0 to 2^62, but is {value!r}")
    return value


def _read_zip_entry(archive: zipfile.ZipFile, name: str, where: str, most: int | None) -> bytes:
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise CheckpointImportError(f"{where} lacks {name}") from None
    if info.compress_type != zipfile.ZIP_STORED or (most is not None and info.file_size > most):
        raise CheckpointImportError(
            f"{where}: {name} must be stored uncompressed, in at most {most or info.file_size} bytes"
        )
    try:
        return archive.read(info)
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise CheckpointImportError(f"{where}: {name} is corrupt: {error}") from None


class _FileSection(io.RawIOBase):
    """A byte range of a file as a file object."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Seek within the range."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("cannot seek before the start")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Current position."""
        return self._at

    def readinto(self, into: Any) -> int:
        """Fill a buffer with the next bytes, up to the end of the range."""
        view = memoryview(into).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        self._file.seek(self._offset + self._at)
        read = self._file.readinto(view[:count])
        self._at += read
        return int(read)

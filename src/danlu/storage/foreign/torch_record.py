"""The tensor in a record that `torch.save` wrote: a zip with a pickle that describes it, and its bytes."""

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from danlu.storage.checkpoint.boxes import volume
from danlu.storage.checkpoint.manifest import ITEMSIZE, Dtype
from danlu.storage.foreign.pickled import Made, Refused, read_pickle

TORCH_DTYPES: Mapping[str, Dtype] = {
    "float64": "F64", "double": "F64", "float32": "F32", "float": "F32", "float16": "F16", "half": "F16",
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "long": "I64", "int32": "I32", "int": "I32", "int16": "I16", "short": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_STORAGES: Mapping[str, Dtype] = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8", "ByteStorage": "U8",
    "BoolStorage": "BOOL",
}  # fmt: skip
_UNTYPED = "UntypedStorage"
_ALLOWED = {
    "torch._utils": frozenset({"_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"}),
    "torch": frozenset({*_STORAGES, *TORCH_DTYPES, "Size"}),
    "torch.storage": frozenset({_UNTYPED}),
    "collections": frozenset({"OrderedDict"}),
}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_MOST_PICKLE = 1 << 20


@dataclass(frozen=True)
class Record:
    """Where in a file a record lies."""

    path: Path
    offset: int
    length: int


def read_tensor(record: Record, dtype: Dtype, shape: tuple[int, ...]) -> memoryview:
    """The tensor's bytes, row by row; `Refused` if the record holds anything but the tensor that is expected."""
    where = f"{record.path} from byte {record.offset}"
    with record.path.open("rb") as file:
        window = _Window(file, record.offset, record.length)
        try:
            archive = zipfile.ZipFile(io.BufferedReader(window))
        except zipfile.BadZipFile as error:
            raise Refused(f"{where} must be a zip of torch.save, but is not: {error}") from None
        with archive:
            return _tensor(archive, where, dtype, shape)


def _tensor(archive: zipfile.ZipFile, where: str, dtype: Dtype, shape: tuple[int, ...]) -> memoryview:
    root = next((name.removesuffix("data.pkl") for name in archive.namelist() if name.endswith("/data.pkl")), None)
    if root is None:
        raise Refused(f"{where} must hold data.pkl, but holds {', '.join(archive.namelist()[:5])}")
    if f"{root}byteorder" in archive.namelist() and _entry(archive, f"{root}byteorder", where, 16) != b"little":
        raise Refused(f"{where} was written by a big-endian machine, which is not read")
    made = read_pickle(_entry(archive, f"{root}data.pkl", where, _MOST_PICKLE), f"{where}, data.pkl", _ALLOWED)
    storage, first, size, strides, found = _described(made, where)
    if (found, size) != (dtype, shape):
        raise Refused(f"{where} must hold {dtype} {list(shape)} as the metadata says, but has {found} {list(size)}")
    reach = first + sum((count - 1) * stride for count, stride in zip(size, strides, strict=True)) + 1
    limit = max(reach, 0) * ITEMSIZE[dtype]
    raw = _entry(archive, f"{root}data/{storage}", where, None) if volume(size) else b""
    if not volume(size):
        return memoryview(b"")
    if first < 0 or min(strides, default=0) < 0 or limit > len(raw):
        raise Refused(f"{where}: a view of {limit} bytes must lie inside its storage of {len(raw)} bytes")
    itemsize = ITEMSIZE[dtype]
    flat = np.frombuffer(raw, dtype=_UNSIGNED[itemsize], count=len(raw) // itemsize)
    view = np.lib.stride_tricks.as_strided(flat[first:], size, [stride * itemsize for stride in strides])
    return np.ascontiguousarray(view).reshape(-1).view(np.uint8).data


def _described(made: Any, where: str) -> tuple[str, int, tuple[int, ...], tuple[int, ...], Dtype]:
    """Storage, first element, size, strides and dtype, out of the call that would rebuild the tensor."""
    if isinstance(made, Made) and made.of.name == "_rebuild_parameter":
        made = made.arguments[0]
    if not isinstance(made, Made) or not made.of.name.startswith("_rebuild_tensor_v"):
        raise Refused(f"{where} must describe one tensor, but describes {type(made).__name__}")
    try:
        persistent, first, size, strides = made.arguments[:4]
        word, kind, key, _, _ = persistent.arguments[0]
        if word != "storage" or not isinstance(key, str) or not key.isdigit():
            raise Refused(f"{where} must name a storage by its number, but has {word!r}, {key!r}")
        dtype = _STORAGES[kind.name] if kind.name != _UNTYPED else TORCH_DTYPES[made.arguments[6].name]
        return key, whole(first), extents(size), extents(strides), dtype
    except (ValueError, KeyError, AttributeError, IndexError, TypeError) as error:
        raise Refused(f"{where} does not describe a tensor as torch.save does: {error}") from None


def extents(value: Any) -> tuple[int, ...]:
    """A size out of a pickle: a tuple, or `torch.Size` of one."""
    if isinstance(value, Made) and str(value.of) == "torch.Size":
        (value,) = value.arguments
    return tuple(whole(number) for number in value)


def whole(value: Any) -> int:
    """A number of elements or bytes."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise Refused(f"a size must be a number from 0 to 2^62, but is {value!r}")
    return value


def _entry(archive: zipfile.ZipFile, name: str, where: str, most: int | None) -> bytes:
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise Refused(f"{where} lacks {name}") from None
    if info.compress_type != zipfile.ZIP_STORED or (most is not None and info.file_size > most):
        raise Refused(f"{where}: {name} must be stored plainly, in at most {most or info.file_size} bytes")
    try:
        return archive.read(info)
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise Refused(f"{where}: {name} is damaged: {error}") from None


class _Window(io.RawIOBase):
    """A part of a file that looks like one of its own."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place in the window."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("cannot go before the start")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Where it is."""
        return self._at

    def readinto(self, into: Any) -> int:
        """Fill a buffer with what follows, as far as the window goes."""
        view = memoryview(into).cast("B")
        count = max(0, min(len(view), self._length - self._at))
        self._file.seek(self._offset + self._at)
        read = self._file.readinto(view[:count])
        self._at += read
        return int(read)

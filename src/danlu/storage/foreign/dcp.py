"""Folders of PyTorch's distributed checkpoint (DCP), Megatron's `torch_dist` among them, as tensors to be written."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from danlu.storage.checkpoint.boxes import Box, volume
from danlu.storage.checkpoint.manifest import ITEMSIZE, Dtype
from danlu.storage.checkpoint.single import Part, Whole
from danlu.storage.foreign.pickled import MOST_BYTES, Made, Named, Refused, read_pickle
from danlu.storage.foreign.torch_record import TORCH_DTYPES, Record, extents, read_tensor, whole

METADATA = ".metadata"
_META, _FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
_ALLOWED: Mapping[str, frozenset[str]] = {
    _META: frozenset(
        {
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
            "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
        }
    ),
    _FILES: frozenset({"_StorageInfo", "_StoragePrefix"}),
    "torch.distributed._shard.sharded_tensor.metadata": frozenset({"TensorProperties", "MEM_FORMAT_ENCODING"}),
    "torch": frozenset({*TORCH_DTYPES, "Size", "device"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "collections": frozenset({"OrderedDict"}),
    "pathlib": frozenset({"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"}),
    "pathlib._local": frozenset({"PosixPath", "WindowsPath"}),
}  # fmt: skip
"""The few names a metadata file mentions; as labels, none is ever imported."""
_DATA_FILE = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$")


@dataclass
class Found:
    """What a foreign folder holds."""

    tensors: list[Whole]
    left_out: list[str] = field(default_factory=list)
    """What is not carried over, each with why."""

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(volume(tensor.shape) * ITEMSIZE[tensor.dtype] for tensor in self.tensors)


def open_dcp(folder: Path) -> Found:
    """Read the metadata of a folder; the tensors' bytes are read when they are written."""
    path = folder / METADATA
    if not path.is_file():
        raise Refused(f"{folder} must hold {METADATA}, but does not; it is no folder of a distributed checkpoint")
    if (size := path.stat().st_size) > MOST_BYTES:
        raise Refused(f"{path} has {size} bytes; no pickle above {MOST_BYTES} is read")
    metadata = read_pickle(path.read_bytes(), str(path), _ALLOWED)
    if not isinstance(metadata, Made) or metadata.of != Named(_META, "Metadata"):
        raise Refused(f"{path} must describe a distributed checkpoint, but describes {type(metadata).__name__}")
    entries, storage = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise Refused(f"{path} must say which tensors there are and where they lie, but does not")
    where = _where(storage, folder, path)
    found = Found([])
    for name, entry in entries.items():
        if not isinstance(entry, Made):
            raise Refused(f"{path}: {name} must be described by a class, but is {type(entry).__name__}")
        if entry.of.name == "TensorStorageMetadata":
            found.tensors.append(_tensor(str(name), entry, where, path))
        else:
            found.left_out.append(f"{name}: an object of Python, which only a pickle can hold")
    return found


Places = Mapping[tuple[str, tuple[int, ...]], Record]


def _where(storage: Mapping[Any, Any], folder: Path, path: Path) -> Places:
    """File and place of every chunk, by tensor and offset."""
    places: dict[tuple[str, tuple[int, ...]], Record] = {}
    for index, info in storage.items():
        if not isinstance(index, Made) or not isinstance(info, Made):
            raise Refused(f"{path}: a chunk must be named by a MetadataIndex and placed by a _StorageInfo")
        if info.get("transform_descriptors"):
            raise Refused(f"{path}: {index.get('fqn')} was transformed ({info.get('transform_descriptors')}); not read")
        file = info.get("relative_path")
        if not isinstance(file, str) or not _DATA_FILE.match(file):
            raise Refused(f"{path}: a data file must have a plain name, but {file!r} is none")
        offset = index.get("offset")
        key = str(index.get("fqn")), extents(offset) if offset is not None else ()
        places[key] = Record(folder / file, whole(info.get("offset")), whole(info.get("length")))
    return places


def _tensor(name: str, entry: Made, places: Places, path: Path) -> Whole:
    dtype, shape = _dtype(name, entry.get("properties"), path), extents(entry.get("size"))
    parts = []
    for chunk in entry.get("chunks", ()):
        box: Box = extents(chunk.get("offsets")), extents(chunk.get("sizes"))
        if len(box[0]) != len(shape) or any(o + n > s for o, n, s in zip(*box, shape, strict=True)):
            raise Refused(f"{path}: a chunk of {name} must lie inside {list(shape)}, but is {box}")
        record = places.get((name, box[0])) or places.get((name, ()))
        if record is None:
            raise Refused(f"{path}: {name}{list(box[0])} must lie in a file, but none is named")
        parts.append(Part(box, partial(read_tensor, record, dtype, box[1])))
    return Whole(name, dtype, shape, parts)


def _dtype(name: str, properties: Any, path: Path) -> Dtype:
    """The dtype is the first of the properties, which are pickled as a tuple or as fields."""
    state = properties.state if isinstance(properties, Made) else None
    first = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    if not isinstance(first, Named) or first.name not in TORCH_DTYPES:
        raise Refused(f"{path}: {name} must have a dtype that a checkpoint can hold, but has {first}")
    return TORCH_DTYPES[first.name]

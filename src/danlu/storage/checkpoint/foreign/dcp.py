"""Folders of PyTorch's distributed checkpoint (DCP), Megatron's `torch_dist` among them, as tensors to import."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from danlu.storage.checkpoint.boxes import Box, numel
from danlu.storage.checkpoint.foreign.safe_pickle import (
    MAX_PICKLE_BYTES,
    CheckpointImportError,
    GlobalRef,
    PickledObject,
    read_pickle,
)
from danlu.storage.checkpoint.foreign.torch_zip import (
    DTYPE_OF_TORCH_NAME,
    FileSlice,
    parse_count,
    parse_size,
    read_tensor,
)
from danlu.storage.checkpoint.manifest import ITEMSIZE, SafetensorsDtype
from danlu.storage.checkpoint.single_writer import SourceShard, SourceTensor
from danlu.storage.store.safe_path import UnsafePathError, sibling_file

METADATA_FILE = ".metadata"
_METADATA_MODULE, _FILESYSTEM_MODULE = (
    "torch.distributed.checkpoint.metadata",
    "torch.distributed.checkpoint.filesystem",
)
_ALLOWED_GLOBALS: Mapping[str, frozenset[str]] = {
    _METADATA_MODULE: frozenset(
        {
            "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
            "ChunkStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING",
        }
    ),
    _FILESYSTEM_MODULE: frozenset({"_StorageInfo", "_StoragePrefix"}),
    "torch.distributed._shard.sharded_tensor.metadata": frozenset({"TensorProperties", "MEM_FORMAT_ENCODING"}),
    "torch": frozenset({*DTYPE_OF_TORCH_NAME, "Size", "device"}),
    "torch.serialization": frozenset({"_get_layout"}),
    "collections": frozenset({"OrderedDict"}),
    "builtins": frozenset({"getattr"}),  # Python 3.11.0 to 3.11.3 writes a member of an Enum as getattr(class, name)
    "pathlib": frozenset({"PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path"}),
    "pathlib._local": frozenset({"PosixPath", "WindowsPath"}),
}  # fmt: skip
"""The few names a metadata file uses; as labels, none is ever imported."""


@dataclass
class SourceCheckpoint:
    """The content of a foreign folder."""

    tensors: list[SourceTensor]
    skipped: list[str] = field(default_factory=list)
    """What is not imported, each with the reason."""

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(numel(tensor.shape) * ITEMSIZE[tensor.dtype] for tensor in self.tensors)


def open_dcp(folder: Path) -> SourceCheckpoint:
    """Read the metadata of a folder; the tensors' bytes are read when they are imported."""
    path = folder / METADATA_FILE
    if not path.is_file():
        raise CheckpointImportError(
            f"{folder} must hold {METADATA_FILE}, but does not; it is not a distributed checkpoint"
        )
    if (size := path.stat().st_size) > MAX_PICKLE_BYTES:
        raise CheckpointImportError(f"{path} has {size} bytes; no pickle above {MAX_PICKLE_BYTES} is read")
    metadata = read_pickle(path.read_bytes(), str(path), _ALLOWED_GLOBALS)
    if not isinstance(metadata, PickledObject) or metadata.cls != GlobalRef(_METADATA_MODULE, "Metadata"):
        raise CheckpointImportError(
            f"{path} must describe a distributed checkpoint, but describes {type(metadata).__name__}"
        )
    entries, storage = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(storage, dict):
        raise CheckpointImportError(f"{path} must list the tensors and their files, but does not")
    where = _chunk_slices(storage, path)
    found = SourceCheckpoint([])
    for name, entry in entries.items():
        if not isinstance(entry, PickledObject):
            raise CheckpointImportError(f"{path}: {name} must be described by a class, but is {type(entry).__name__}")
        if entry.cls.name == "TensorStorageMetadata":
            found.tensors.append(_tensor(str(name), entry, where, path))
        else:
            found.skipped.append(f"{name}: an object of Python, which only a pickle can hold")
    return found


ChunkSlices = Mapping[tuple[str, tuple[int, ...]], FileSlice]


def _chunk_slices(storage: Mapping[Any, Any], path: Path) -> ChunkSlices:
    """File and byte range of every chunk, by tensor and offset."""
    slices: dict[tuple[str, tuple[int, ...]], FileSlice] = {}
    for index, info in storage.items():
        if not isinstance(index, PickledObject) or not isinstance(info, PickledObject):
            raise CheckpointImportError(f"{path}: a chunk must have a MetadataIndex and a _StorageInfo")
        if info.get("transform_descriptors"):
            raise CheckpointImportError(
                f"{path}: {index.get('fqn')} has transforms ({info.get('transform_descriptors')}); not supported"
            )
        try:
            file = sibling_file(path, info.get("relative_path"))
        except UnsafePathError as error:
            raise CheckpointImportError(str(error)) from None
        offset = index.get("offset")
        key = str(index.get("fqn")), parse_size(offset) if offset is not None else ()
        slices[key] = FileSlice(file, parse_count(info.get("offset")), parse_count(info.get("length")))
    return slices


def _tensor(name: str, entry: PickledObject, slices: ChunkSlices, path: Path) -> SourceTensor:
    dtype, shape = _dtype(name, entry.get("properties"), path), parse_size(entry.get("size"))
    shards = []
    for chunk in entry.get("chunks", ()):
        box: Box = parse_size(chunk.get("offsets")), parse_size(chunk.get("sizes"))
        if len(box[0]) != len(shape) or any(o + n > s for o, n, s in zip(*box, shape, strict=True)):
            raise CheckpointImportError(f"{path}: a chunk of {name} must lie inside {list(shape)}, but is {box}")
        record = slices.get((name, box[0])) or slices.get((name, ()))
        if record is None:
            raise CheckpointImportError(f"{path}: {name}{list(box[0])} must be in a file, but none is named")
        shards.append(SourceShard(box, partial(read_tensor, record, dtype, box[1])))
    return SourceTensor(name, dtype, shape, shards)


def _dtype(name: str, properties: Any, path: Path) -> SafetensorsDtype:
    """The dtype is the first of the properties, which are pickled as a tuple or as fields."""
    state = properties.state if isinstance(properties, PickledObject) else None
    first = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    if not isinstance(first, GlobalRef) or first.name not in DTYPE_OF_TORCH_NAME:
        raise CheckpointImportError(f"{path}: {name} must have a dtype that a checkpoint can hold, but has {first}")
    return DTYPE_OF_TORCH_NAME[first.name]

"""The metadata files of a checkpoint: leaves that list chunks, nodes over them, and the manifest that commits it.

    step-00000100/
        9f27ab01-000000.pack     bytes of the chunks that writer 0 wrote, one after the other
        9f27ab01-000000.json     its leaf: tensor, box, offset in the pack and crc32c of every chunk
        9f27ab01-n1-000000.json  a node over 64 leaves (only where there are more than that)
        manifest.json            the root: written last; without it there is no checkpoint

Every file is named by its parent together with its length and SHA-256, so the manifest is the root of a hash tree.
Nothing here needs torch. `docs/checkpoint-format.md` specifies it for readers in other languages.
"""

import hashlib
import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from danlu.spec.description import SpecModel, TupleOf
from danlu.storage.checkpoint.boxes import Box, numel

MANIFEST_FILE = "manifest.json"
FANOUT = 64
"""Largest number of children of a node."""
MAX_METADATA_BYTES = 256 << 20
"""No manifest, node or leaf is longer; a reader refuses before it allocates memory."""

SafetensorsDtype = Literal[
    "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"
]
ITEMSIZE: Mapping[SafetensorsDtype, int] = {
    "F64": 8, "I64": 8, "U64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of an element; the names are those of safetensors."""

_MAX_INT = 2**62
NonNegative = Annotated[int, Field(ge=0, le=_MAX_INT)]
DimsField = Annotated[TupleOf[NonNegative], Field(max_length=16)]
KeyName = Annotated[str, Field(min_length=1, max_length=4096)]
UInt64 = Annotated[int, Field(ge=0, lt=2**64)]
AttemptId = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
PackFileName = Annotated[str, Field(pattern=r"^[0-9a-f]{8}-[0-9]{6,8}\.pack$")]
"""A name in the manifest's folder: no "/", so never outside the checkpoint."""
ChildFileName = Annotated[str, Field(pattern=r"^[0-9a-f]{8}-(n[0-9]{1,2}-)?[0-9]{6,8}\.json$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class CorruptCheckpointError(RuntimeError):
    """A file of a checkpoint is not what was written; the message says which, and what was expected."""


class Bounds(SpecModel):
    """Bounding box of a child's chunks in a tensor, so that readers can skip the child."""

    offset: DimsField
    size: DimsField

    @property
    def box(self) -> Box:
        """Its box in the tensor."""
        return self.offset, self.size


class Chunk(Bounds):
    """A box of a tensor: contiguous bytes in a pack, row by row."""

    at: NonNegative
    """First byte in the pack."""
    crc32c: Annotated[int, Field(ge=0, lt=2**32)]
    """Of the bytes, taken from the training tensor while it was copied."""


class TensorMeta(SpecModel):
    """Dtype and shape of the full tensor; the same in every file that names it."""

    dtype: SafetensorsDtype
    shape: DimsField

    def nbytes(self, size: tuple[int, ...]) -> int:
        """Bytes of a box of this size."""
        return numel(size) * ITEMSIZE[self.dtype]


class TensorShard(TensorMeta):
    """The part of a tensor that one writer wrote."""

    chunks: Annotated[TupleOf[Chunk], Field(min_length=1)]
    fingerprint: UInt64
    """Weighted sum of the elements written here; the sums of all writers add up to that of the tensor, modulo 2^64."""

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        for chunk in self.chunks:
            if not len(chunk.offset) == len(chunk.size) == len(self.shape):
                raise ValueError(f"a chunk must have the {len(self.shape)} dimensions of its tensor")
            if any(start + count > whole for start, count, whole in zip(*chunk.box, self.shape, strict=True)):
                raise ValueError(f"chunk {chunk.box} must lie inside the tensor's shape {self.shape}")
            if numel(chunk.size) > _MAX_INT:
                raise ValueError(f"chunk {chunk.box} must have at most 2^62 elements")
        return self


class Leaf(SpecModel):
    """Everything that one writer wrote."""

    kind: Literal["danlu leaf"] = "danlu leaf"
    format: Literal[1] = 1
    step: NonNegative
    attempt: AttemptId
    """Random, the same for all files of a save: late files of an abandoned save cannot mix with the next."""
    writer: NonNegative
    pack: PackFileName
    bytes: NonNegative
    """Length of the pack."""
    finite: bool
    """Whether every floating-point element is a finite number."""
    tensors: dict[KeyName, TensorShard]

    @model_validator(mode="after")
    def _check_disjoint(self) -> Self:
        spans = sorted(
            (chunk.at, chunk.at + shard.nbytes(chunk.size)) for shard in self.tensors.values() for chunk in shard.chunks
        )
        if any(first[1] > second[0] for first, second in pairwise(spans)):
            raise ValueError("chunks must not overlap in the pack")
        if spans and spans[-1][1] > self.bytes:
            raise ValueError(f"chunks must end within the pack's {self.bytes} bytes, but one ends at {spans[-1][1]}")
        return self


class ChildRef(SpecModel):
    """A leaf or a node, as its parent names it."""

    file: ChildFileName
    bytes: Annotated[int, Field(gt=0, le=MAX_METADATA_BYTES)]
    sha256: Sha256
    reach: dict[KeyName, Bounds]


class TensorSummary(TensorMeta):
    """A tensor, with totals over everything below a node."""

    elements: NonNegative
    fingerprint: UInt64


class TreeNode(SpecModel):
    """Inner node of the hash tree."""

    kind: Literal["danlu node"] = "danlu node"
    format: Literal[1] = 1
    step: NonNegative
    attempt: AttemptId
    level: Annotated[int, Field(ge=1, le=8)]
    """Children of nodes of level 1 are leaves."""
    finite: bool
    packs: NonNegative
    bytes: NonNegative
    """Of all packs below it."""
    tensors: dict[KeyName, TensorSummary]
    children: Annotated[TupleOf[ChildRef], Field(min_length=1, max_length=FANOUT)]

    @model_validator(mode="after")
    def _check_children(self) -> Self:
        for child in self.children:
            for name, reach in child.reach.items():
                dims = len(self.tensors[name].shape) if name in self.tensors else -1
                if not len(reach.offset) == len(reach.size) == dims:
                    raise ValueError(f"{child.file} must reach into tensors that are named here, in their dimensions")
        return self


class Manifest(TreeNode):
    """The root; `manifest.json`."""

    kind: Literal["danlu checkpoint"] = "danlu checkpoint"  # type: ignore[assignment]
    scalars: dict[KeyName, int | float | str | bool | None]
    """Step, data cursor, seed: everything that is not a tensor."""
    layout: dict[KeyName, int]
    """Size of every axis of the mesh that wrote it; informational, no reader needs it."""
    written: float
    """Seconds since the epoch."""
    root: Sha256
    """SHA-256 of this file with 64 zeros in place of this hash."""

    @model_validator(mode="after")
    def _check_complete(self) -> Self:
        for name, tensor in self.tensors.items():
            if tensor.elements != numel(tensor.shape):
                raise ValueError(
                    f"tensor {name} must have {numel(tensor.shape)} elements in its chunks, but has {tensor.elements}"
                )
        return self


_NO_ROOT = "0" * 64
M = TypeVar("M", bound=SpecModel)


def to_json_bytes(description: SpecModel) -> bytes:
    """Canonical JSON: sorted keys, no spaces."""
    return json.dumps(description.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()


def to_sealed_json(kind: type[SpecModel], fields: Mapping[str, Any]) -> bytes:
    """JSON of a description that contains its own hash, with that `root` filled in."""
    text = to_json_bytes(kind.model_validate({**fields, "root": _NO_ROOT}))
    return text.replace(_NO_ROOT.encode(), hashlib.sha256(text).hexdigest().encode(), 1)


def parse_metadata(kind: type[M], text: bytes, where: str) -> M:
    """Parse a metadata file strictly; `CorruptCheckpointError` if it is not what this program writes."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        location = ".".join(map(str, first["loc"]))[:200] or "file"
        raise CorruptCheckpointError(
            f'{where} must be a "{kind.model_fields["kind"].default}" file, but {location}: {first["msg"]}'
        ) from None


def parse_manifest(text: bytes, where: str) -> Manifest:
    """Parse a manifest and compare it with its own root hash."""
    manifest = parse_metadata(Manifest, text, where)
    verify_root_hash(text, manifest.root, where)
    return manifest


def verify_root_hash(text: bytes, root: str, where: str) -> None:
    """Compare a sealed file with the hash that it names; `CorruptCheckpointError` if it has another."""
    unsealed = text.replace(root.encode(), _NO_ROOT.encode(), 1)
    if (found := hashlib.sha256(unsealed).hexdigest()) != root:
        raise CorruptCheckpointError(f"{where} must have the SHA-256 {root} that it names, but has {found}")


def replica_path(path: str) -> str:
    """Path of the replica of a metadata file, if its checkpoint has parity."""
    return f"{path.removesuffix('.json')}.copy.json"


def parse_child(kind: type[M], text: bytes, ref: ChildRef, where: str) -> M:
    """Parse a leaf or a node and compare it with what its parent names."""
    if len(text) != ref.bytes or hashlib.sha256(text).hexdigest() != ref.sha256:
        raise CorruptCheckpointError(
            f"{where} must be the {ref.bytes} bytes with SHA-256 {ref.sha256} that its parent names"
        )
    return parse_metadata(kind, text, where)

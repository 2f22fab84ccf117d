"""What the files of a checkpoint say: leaves that list chunks, nodes over them, and the manifest that makes it count.

    step-00000100/
        9f27ab01-000000.pack     bytes of the chunks that writer 0 wrote, one after the other
        9f27ab01-000000.json     its leaf: which tensor, which part of it, where in the pack, and its crc32c
        9f27ab01-n1-000000.json  a node over 64 leaves (only where there are more than that)
        manifest.json            the root: written last; without it there is no checkpoint

Every file is named by its parent together with its length and SHA-256, so the manifest is the root of a tree of hashes.
Nothing here needs torch. `docs/checkpoint-format.md` specifies it for readers in other languages.
"""

import hashlib
import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from danlu.spec.description import Description, Many
from danlu.storage.checkpoint.boxes import Box, volume

MANIFEST = "manifest.json"
FANOUT = 64
"""Children of a node at most."""
LARGEST_TEXT = 256 << 20
"""No manifest, node or leaf is longer; a reader refuses before it takes the memory."""

Dtype = Literal[
    "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"
]
ITEMSIZE: Mapping[Dtype, int] = {
    "F64": 8, "I64": 8, "U64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""Bytes of an element; the names are those of safetensors."""

_LARGEST = 2**62
Whole = Annotated[int, Field(ge=0, le=_LARGEST)]
Extents = Annotated[Many[Whole], Field(max_length=16)]
Name = Annotated[str, Field(min_length=1, max_length=4096)]
Word = Annotated[int, Field(ge=0, lt=2**64)]
Attempt = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]
Pack = Annotated[str, Field(pattern=r"^[0-9a-f]{8}-[0-9]{6,8}\.pack$")]
"""A name beside the manifest: no folder, so none outside the checkpoint."""
Child = Annotated[str, Field(pattern=r"^[0-9a-f]{8}-(n[0-9]{1,2}-)?[0-9]{6,8}\.json$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Damaged(RuntimeError):  # noqa: N818 - it is what the checkpoint is
    """A file of a checkpoint is not what was written; the message says which, and what was expected."""


class Chunk(Description):
    """A box of a tensor: contiguous bytes in a pack, row by row."""

    offset: Extents
    size: Extents
    at: Whole
    """First byte in the pack."""
    crc32c: Annotated[int, Field(ge=0, lt=2**32)]
    """Of the bytes, taken from the training tensor while it was copied."""

    @property
    def box(self) -> Box:
        """Where it lies in the tensor."""
        return self.offset, self.size


class Tensor(Description):
    """A tensor under its global name; the same in every file that mentions it."""

    dtype: Dtype
    shape: Extents

    def nbytes(self, size: tuple[int, ...]) -> int:
        """Bytes of a box of this size."""
        return volume(size) * ITEMSIZE[self.dtype]


class Held(Tensor):
    """What one writer wrote of a tensor."""

    chunks: Annotated[Many[Chunk], Field(min_length=1)]
    fingerprint: Word
    """Weighted sum of the elements written here; the sums of all writers add up to that of the tensor, modulo 2^64."""

    @model_validator(mode="after")
    def _inside(self) -> Self:
        for chunk in self.chunks:
            if not len(chunk.offset) == len(chunk.size) == len(self.shape):
                raise ValueError(f"a chunk must have the {len(self.shape)} dimensions of its tensor")
            if any(start + count > whole for start, count, whole in zip(*chunk.box, self.shape, strict=True)):
                raise ValueError(f"chunk {chunk.box} must lie inside the tensor's shape {self.shape}")
            if volume(chunk.size) > _LARGEST:
                raise ValueError(f"chunk {chunk.box} must have at most 2^62 elements")
        return self


class Leaf(Description):
    """What one writer wrote."""

    kind: Literal["danlu leaf"] = "danlu leaf"
    format: Literal[1] = 1
    step: Whole
    attempt: Attempt
    """Random, one for all files of a save: a straggler of a save that was given up cannot mix with the next."""
    writer: Whole
    pack: Pack
    bytes: Whole
    """Length of the pack."""
    finite: bool
    """Whether every floating-point element is a finite number."""
    tensors: dict[Name, Held]

    @model_validator(mode="after")
    def _disjoint(self) -> Self:
        spans = sorted(
            (chunk.at, chunk.at + held.nbytes(chunk.size)) for held in self.tensors.values() for chunk in held.chunks
        )
        if any(first[1] > second[0] for first, second in pairwise(spans)):
            raise ValueError("chunks must not overlap in the pack")
        if spans and spans[-1][1] > self.bytes:
            raise ValueError(f"chunks must end within the pack's {self.bytes} bytes, but one ends at {spans[-1][1]}")
        return self


class Reach(Description):
    """How far what lies under a child reaches into a tensor: a reader that needs nothing of it passes by."""

    offset: Extents
    size: Extents

    @property
    def box(self) -> Box:
        """Where it lies in the tensor."""
        return self.offset, self.size


class Under(Description):
    """A leaf or a node, as its parent names it."""

    file: Child
    bytes: Annotated[int, Field(gt=0, le=LARGEST_TEXT)]
    sha256: Sha256
    reach: dict[Name, Reach]


class Sum(Tensor):
    """A tensor, with what lies under a node added up."""

    elements: Whole
    fingerprint: Word


class Node(Description):
    """Leaves or nodes under one roof."""

    kind: Literal["danlu node"] = "danlu node"
    format: Literal[1] = 1
    step: Whole
    attempt: Attempt
    level: Annotated[int, Field(ge=1, le=8)]
    """Nodes of level 1 stand over leaves."""
    finite: bool
    packs: Whole
    bytes: Whole
    """Of all packs under it."""
    tensors: dict[Name, Sum]
    children: Annotated[Many[Under], Field(min_length=1, max_length=FANOUT)]

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        for child in self.children:
            for name, reach in child.reach.items():
                dims = len(self.tensors[name].shape) if name in self.tensors else -1
                if not len(reach.offset) == len(reach.size) == dims:
                    raise ValueError(f"{child.file} must reach into tensors that are named here, in their dimensions")
        return self


class Manifest(Node):
    """The root; `manifest.json`."""

    kind: Literal["danlu checkpoint"] = "danlu checkpoint"  # type: ignore[assignment]
    scalars: dict[Name, int | float | str | bool | None]
    """Step, cursor of the data, seed: what is no tensor."""
    layout: dict[Name, int]
    """Ranks on every axis of the mesh that wrote it; for people, no reader needs it."""
    written: float
    """Seconds since the epoch."""
    root: Sha256
    """SHA-256 of this text with 64 zeros in place of this hash."""

    @model_validator(mode="after")
    def _whole(self) -> Self:
        for name, tensor in self.tensors.items():
            if tensor.elements != volume(tensor.shape):
                raise ValueError(
                    f"tensor {name} must have {volume(tensor.shape)} elements in its chunks, but has {tensor.elements}"
                )
        return self


_NO_ROOT = "0" * 64
M = TypeVar("M", bound=Description)


def text_of(description: Description) -> bytes:
    """The one way to write it: sorted keys, no spaces."""
    return json.dumps(description.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()


def sealed(kind: type[Description], fields: Mapping[str, Any]) -> bytes:
    """The text of a description that ends in its own hash, with that `root` filled in."""
    text = text_of(kind.model_validate({**fields, "root": _NO_ROOT}))
    return text.replace(_NO_ROOT.encode(), hashlib.sha256(text).hexdigest().encode(), 1)


def parse(kind: type[M], text: bytes, where: str) -> M:
    """Read a file's text strictly; `Damaged` if it is not what this program writes."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))[:200] or "file"
        raise Damaged(f"{where} must be a checkpoint's {kind.__name__.lower()}, but {place}: {first['msg']}") from None


def open_manifest(text: bytes, where: str) -> Manifest:
    """Read a manifest and hold it against its own root."""
    manifest = parse(Manifest, text, where)
    check_root(text, manifest.root, where)
    return manifest


def check_root(text: bytes, root: str, where: str) -> None:
    """Hold a sealed text against the hash that it names; `Damaged` if it has another."""
    unsealed = text.replace(root.encode(), _NO_ROOT.encode(), 1)
    if (found := hashlib.sha256(unsealed).hexdigest()) != root:
        raise Damaged(f"{where} must have the SHA-256 {root} that it names, but has {found}")


def twin_of(path: str) -> str:
    """Where the second copy of a text lies, if its checkpoint has parity."""
    return f"{path.removesuffix('.json')}.copy.json"


def open_child(kind: type[M], text: bytes, under: Under, where: str) -> M:
    """Read a leaf or a node and hold it against what its parent says."""
    if len(text) != under.bytes or hashlib.sha256(text).hexdigest() != under.sha256:
        raise Damaged(f"{where} must be the {under.bytes} bytes with SHA-256 {under.sha256} that its parent names")
    return parse(kind, text, where)

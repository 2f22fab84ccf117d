"""The hash tree over the leaves: built by groups of writers, walked by readers that need a part of it."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from danlu.storage.checkpoint.boxes import Box, bounding_box, intersect, numel
from danlu.storage.checkpoint.manifest import (
    Bounds,
    ChildRef,
    CorruptCheckpointError,
    Leaf,
    TensorMeta,
    TensorSummary,
    TreeNode,
)

UINT64_RANGE = 2**64


def build_tree(level: int, children: Sequence[tuple[str, bytes, Leaf | TreeNode]]) -> TreeNode:
    """The node over children, each given by file name, bytes and content."""
    first = children[0][2]
    tensors: dict[str, TensorSummary] = {}
    for file, _, child in children:
        if (child.step, child.attempt) != (first.step, first.attempt):
            raise CorruptCheckpointError(
                f"{file} must belong to step {first.step}, attempt {first.attempt}, but does not"
            )
        for name, summary in _tensor_summaries(child).items():
            tensors[name] = _add_summaries(name, file, tensors.get(name), summary)
    return TreeNode(
        step=first.step,
        attempt=first.attempt,
        level=level,
        finite=all(child.finite for _, _, child in children),
        packs=sum(child.packs if isinstance(child, TreeNode) else 1 for _, _, child in children),
        bytes=sum(child.bytes for _, _, child in children),
        tensors=tensors,
        children=tuple(_child_ref(file, text, child) for file, text, child in children),
    )


def children_overlapping(node: TreeNode, wanted: Mapping[str, Sequence[Box]]) -> Iterable[ChildRef]:
    """Children whose chunks overlap the wanted boxes, given by tensor name."""
    for child in node.children:
        common = child.reach.keys() & wanted.keys()
        if any(intersect(child.reach[name].box, box) for name in common for box in wanted[name]):
            yield child


def _child_ref(file: str, text: bytes, child: Leaf | TreeNode) -> ChildRef:
    if isinstance(child, Leaf):
        boxes = {name: bounding_box(chunk.box for chunk in shard.chunks) for name, shard in child.tensors.items()}
    else:
        inside: dict[str, list[Box]] = {}
        for each in child.children:
            for name, reach in each.reach.items():
                inside.setdefault(name, []).append(reach.box)
        boxes = {name: bounding_box(found) for name, found in inside.items()}
    bounds = {name: Bounds(offset=offset, size=size) for name, (offset, size) in boxes.items()}
    return ChildRef(file=file, bytes=len(text), sha256=hashlib.sha256(text).hexdigest(), reach=bounds)


def _tensor_summaries(child: Leaf | TreeNode) -> Mapping[str, TensorSummary]:
    if isinstance(child, TreeNode):
        return child.tensors
    return {
        name: TensorSummary(
            dtype=shard.dtype,
            shape=shard.shape,
            elements=sum(numel(chunk.size) for chunk in shard.chunks),
            fingerprint=shard.fingerprint,
        )
        for name, shard in child.tensors.items()
    }


def _add_summaries(name: str, file: str, so_far: TensorSummary | None, more: TensorSummary) -> TensorSummary:
    if so_far is None:
        return more
    if not same_dtype_and_shape(so_far, more):
        raise CorruptCheckpointError(
            f"tensor {name} must be {so_far.dtype} {list(so_far.shape)} for every writer, "
            f"but is {more.dtype} {list(more.shape)} in {file}"
        )
    return TensorSummary(
        dtype=more.dtype,
        shape=more.shape,
        elements=so_far.elements + more.elements,
        fingerprint=(so_far.fingerprint + more.fingerprint) % UINT64_RANGE,
    )


def same_dtype_and_shape(a: TensorMeta, b: TensorMeta) -> bool:
    """Whether two entries describe the same tensor."""
    return (a.dtype, a.shape) == (b.dtype, b.shape)

"""The tree over the leaves: made by groups of writers, walked by readers who need a part of it."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence

from danlu.storage.checkpoint.boxes import Box, around, overlap, volume
from danlu.storage.checkpoint.manifest import Damaged, Leaf, Node, Reach, Sum, Tensor, Under

WORD = 2**64


def roof(level: int, children: Sequence[tuple[str, bytes, Leaf | Node]]) -> Node:
    """The node over children, each given by file name, text and content."""
    first = children[0][2]
    tensors: dict[str, Sum] = {}
    for file, _, child in children:
        if (child.step, child.attempt) != (first.step, first.attempt):
            raise Damaged(f"{file} must belong to step {first.step}, attempt {first.attempt}, but does not")
        for name, part in _sums(child).items():
            tensors[name] = _added(name, file, tensors.get(name), part)
    return Node(
        step=first.step,
        attempt=first.attempt,
        level=level,
        finite=all(child.finite for _, _, child in children),
        packs=sum(child.packs if isinstance(child, Node) else 1 for _, _, child in children),
        bytes=sum(child.bytes for _, _, child in children),
        tensors=tensors,
        children=tuple(_under(file, text, child) for file, text, child in children),
    )


def within_reach(node: Node, wanted: Mapping[str, Sequence[Box]]) -> Iterable[Under]:
    """Children that hold something of what is wanted: boxes by tensor name."""
    for child in node.children:
        common = child.reach.keys() & wanted.keys()
        if any(overlap(child.reach[name].box, box) for name in common for box in wanted[name]):
            yield child


def _under(file: str, text: bytes, child: Leaf | Node) -> Under:
    if isinstance(child, Leaf):
        boxes = {name: around(chunk.box for chunk in held.chunks) for name, held in child.tensors.items()}
    else:
        inside: dict[str, list[Box]] = {}
        for each in child.children:
            for name, reach in each.reach.items():
                inside.setdefault(name, []).append(reach.box)
        boxes = {name: around(found) for name, found in inside.items()}
    reaches = {name: Reach(offset=offset, size=size) for name, (offset, size) in boxes.items()}
    return Under(file=file, bytes=len(text), sha256=hashlib.sha256(text).hexdigest(), reach=reaches)


def _sums(child: Leaf | Node) -> Mapping[str, Sum]:
    if isinstance(child, Node):
        return child.tensors
    return {
        name: Sum(
            dtype=held.dtype,
            shape=held.shape,
            elements=sum(volume(chunk.size) for chunk in held.chunks),
            fingerprint=held.fingerprint,
        )
        for name, held in child.tensors.items()
    }


def _added(name: str, file: str, so_far: Sum | None, part: Sum) -> Sum:
    if so_far is None:
        return part
    if not same(so_far, part):
        raise Damaged(
            f"tensor {name} must be {so_far.dtype} {list(so_far.shape)} for every writer, "
            f"but is {part.dtype} {list(part.shape)} in {file}"
        )
    return Sum(
        dtype=part.dtype,
        shape=part.shape,
        elements=so_far.elements + part.elements,
        fingerprint=(so_far.fingerprint + part.fingerprint) % WORD,
    )


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two mentions are of one tensor."""
    return (a.dtype, a.shape) == (b.dtype, b.shape)

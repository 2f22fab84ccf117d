"""Make a save count: leaves, then nodes over them, then the manifest; each durable before the next is begun.

Ranks meet in the store alone: the first of every 64 writers waits for the leaves of the others, and the first rank of
all creates the manifest. Nobody waits for everybody, and no collective of the training is touched.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from danlu.storage.checkpoint.manifest import (
    FANOUT,
    LARGEST_TEXT,
    MANIFEST,
    Leaf,
    Manifest,
    Node,
    parse,
    sealed,
    text_of,
    twin_of,
)
from danlu.storage.checkpoint.tree import roof
from danlu.storage.store import Store

_FIRST_WAIT, _LONGEST_WAIT = 0.001, 0.25


class SaveFailed(RuntimeError):  # noqa: N818 - it is what happened
    """A checkpoint did not come about; the message says why. The ones before it are as they were."""


def folder_of(step: int) -> str:
    """Name of a step's folder."""
    return f"step-{step:08d}"


def pack_name(attempt: str, writer: int) -> str:
    """Name of a writer's pack; `.json` in place of `.pack` is its leaf."""
    return f"{attempt}-{writer:06d}.pack"


def leaf_name(attempt: str, writer: int) -> str:
    """Name of a writer's leaf."""
    return f"{attempt}-{writer:06d}.json"


def levels(writers: int) -> int:
    """Levels of the tree over this many leaves, the manifest included."""
    count, level = writers, 1
    while count > FANOUT:
        count, level = -(-count // FANOUT), level + 1
    return level


def commit(
    store: Store,
    leaf: Leaf,
    writers: int,
    root: Mapping[str, Any],
    patience: float,
    stop: Callable[[], bool] = lambda: False,
    *,
    twins: bool = False,
) -> bytes | None:
    """Write a leaf, do this writer's part of the tree, and return the manifest's text from the writer that creates it.

    `root` is what the manifest has beside a node. A writer that is missing for `patience` seconds fails the save. With
    `twins` leaves and nodes are written twice; the manifest's twin is for its creator to write, once it counts.
    """
    folder, writer, attempt = folder_of(leaf.step), leaf.writer, leaf.attempt
    text = text_of(leaf)
    if len(text) > LARGEST_TEXT:
        raise SaveFailed(f"the leaf of writer {writer} must be at most {LARGEST_TEXT} bytes, but has {len(text)}")
    _put(store, f"{folder}/{leaf_name(attempt, writer)}", text, twins)
    top = levels(writers)
    for level in range(1, top + 1):
        span = FANOUT**level
        if writer % span:
            return None
        below = FANOUT ** (level - 1)
        numbers = range(writer // below, -(-min(writer + span, writers) // below))
        names = [leaf_name(attempt, n) if level == 1 else _node_name(attempt, level - 1, n) for n in numbers]
        kind = Leaf if level == 1 else Node
        children = [(name, *_await(store, f"{folder}/{name}", kind, patience, stop)) for name in names]
        node = roof(level, children)
        if level < top:
            _put(store, f"{folder}/{_node_name(attempt, level, writer // span)}", text_of(node), twins)
    fields = node.model_dump() | {"kind": "danlu checkpoint", **root}
    manifest = sealed(Manifest, fields)
    store.create(f"{folder}/{MANIFEST}", manifest)
    return manifest


def _put(store: Store, path: str, text: bytes, twins: bool) -> None:
    if twins:
        store.write(twin_of(path), [text])
    store.write(path, [text])


def await_leaf(
    store: Store, step: int, attempt: str, writer: int, patience: float, stop: Callable[[], bool] = lambda: False
) -> Leaf:
    """What another writer wrote, once it has."""
    path = f"{folder_of(step)}/{leaf_name(attempt, writer)}"
    _, leaf = _await(store, path, Leaf, patience, stop)
    assert isinstance(leaf, Leaf)
    return leaf


def _node_name(attempt: str, level: int, number: int) -> str:
    return f"{attempt}-n{level}-{number:06d}.json"


def _await(
    store: Store, path: str, kind: type[Leaf] | type[Node], patience: float, stop: Callable[[], bool]
) -> tuple[bytes, Leaf | Node]:
    """A file that another writer is about to write."""
    began = time.monotonic()
    deadline = began + patience
    while True:
        try:
            text = store.read(path)
            return text, parse(kind, text, f"{store.name}/{path}")
        except FileNotFoundError:
            if stop():
                raise SaveFailed(
                    f"{store.name}/{path} will not come: its rank could not write it, and says why"
                ) from None
            if time.monotonic() > deadline:
                raise SaveFailed(
                    f"{store.name}/{path} must come from another rank within {patience:g} s, but did not; "
                    "that rank has failed, or its store is slow"
                ) from None
        # A twentieth of what was waited already: neither a store that is asked all the time, nor a save that idles.
        time.sleep(min(max(_FIRST_WAIT, (time.monotonic() - began) / 20), _LONGEST_WAIT))

"""Commit a save whose packs are durable: leaves, then nodes over them, then the manifest, each durable before the next.

Writers wait for each other through the store, without a collective: the first of every 64 for their leaves, the first
of every 4,096 for the nodes, and so on up to writer 0, which creates the manifest. The others wait for nobody.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from danlu.storage.checkpoint.hash_tree import build_tree
from danlu.storage.checkpoint.manifest import (
    FANOUT,
    MANIFEST_FILE,
    MAX_METADATA_BYTES,
    Leaf,
    Manifest,
    TreeNode,
    parse_metadata,
    replica_path,
    to_json_bytes,
    to_sealed_json,
)
from danlu.storage.store.base import Store

_FIRST_WAIT, _LONGEST_WAIT = 0.001, 0.25


class CheckpointSaveError(RuntimeError):
    """A checkpoint was not committed; the message says why. Earlier ones are not affected."""


def step_folder(step: int) -> str:
    """Name of a step's folder."""
    return f"step-{step:08d}"


def pack_name(attempt: str, writer: int) -> str:
    """Name of a writer's pack; `.json` in place of `.pack` is its leaf."""
    return f"{attempt}-{writer:06d}.pack"


def leaf_name(attempt: str, writer: int) -> str:
    """Name of a writer's leaf."""
    return f"{attempt}-{writer:06d}.json"


def tree_levels(writers: int) -> int:
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
    timeout: float,
    stop: Callable[[], bool] = lambda: False,
    *,
    replicas: bool = False,
) -> bytes | None:
    """Write a leaf and this writer's part of the tree; the writer that creates the manifest returns its bytes.

    `root` has the fields of the manifest that a node has not. A writer that is missing for `timeout` seconds fails the
    save. With `replicas`, leaves and nodes are written twice; the creator of the manifest writes its replica after the
    commit.
    """
    folder, writer, attempt = step_folder(leaf.step), leaf.writer, leaf.attempt
    text = to_json_bytes(leaf)
    if len(text) > MAX_METADATA_BYTES:
        raise CheckpointSaveError(
            f"the leaf of writer {writer} must be at most {MAX_METADATA_BYTES} bytes, but has {len(text)}"
        )
    _write_metadata(store, f"{folder}/{leaf_name(attempt, writer)}", text, replicas)
    top = tree_levels(writers)
    for level in range(1, top + 1):
        span = FANOUT**level
        if writer % span:
            return None
        below = FANOUT ** (level - 1)
        numbers = range(writer // below, -(-min(writer + span, writers) // below))
        names = [leaf_name(attempt, n) if level == 1 else _node_name(attempt, level - 1, n) for n in numbers]
        kind = Leaf if level == 1 else TreeNode
        children = [(name, *_wait_for_file(store, f"{folder}/{name}", kind, timeout, stop)) for name in names]
        node = build_tree(level, children)
        if level < top:
            _write_metadata(
                store, f"{folder}/{_node_name(attempt, level, writer // span)}", to_json_bytes(node), replicas
            )
    fields = node.model_dump() | {"kind": "danlu checkpoint", **root}
    manifest = to_sealed_json(Manifest, fields)
    store.create(f"{folder}/{MANIFEST_FILE}", manifest)
    return manifest


def _write_metadata(store: Store, path: str, text: bytes, replicas: bool) -> None:
    if replicas:
        store.write(replica_path(path), [text])
    store.write(path, [text])


def wait_for_leaf(
    store: Store, step: int, attempt: str, writer: int, timeout: float, stop: Callable[[], bool] = lambda: False
) -> Leaf:
    """Wait for the leaf of another writer."""
    path = f"{step_folder(step)}/{leaf_name(attempt, writer)}"
    _, leaf = _wait_for_file(store, path, Leaf, timeout, stop)
    assert isinstance(leaf, Leaf)
    return leaf


def _node_name(attempt: str, level: int, number: int) -> str:
    return f"{attempt}-n{level}-{number:06d}.json"


def _wait_for_file(
    store: Store, path: str, kind: type[Leaf] | type[TreeNode], timeout: float, stop: Callable[[], bool]
) -> tuple[bytes, Leaf | TreeNode]:
    """Wait for a file of another writer."""
    began = time.monotonic()
    deadline = began + timeout
    while True:
        try:
            text = store.read(path)
            return text, parse_metadata(kind, text, f"{store.name}/{path}")
        except FileNotFoundError:
            if stop():
                raise CheckpointSaveError(
                    f"{store.name}/{path} was not written: its rank failed; see that rank's log"
                ) from None
            if time.monotonic() > deadline:
                raise CheckpointSaveError(
                    f"{store.name}/{path} was not written by another rank within {timeout:g} s; "
                    "that rank has failed, or its store is slow"
                ) from None
        # A twentieth of the time waited so far: neither polls the store all the time, nor delays the save.
        time.sleep(min(max(_FIRST_WAIT, (time.monotonic() - began) / 20), _LONGEST_WAIT))

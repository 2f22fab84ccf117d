"""Read the metadata files of a checkpoint: bounded in size, and from the replica if need be."""

from collections.abc import Callable
from typing import TypeVar

from danlu.storage.checkpoint.commit import step_folder
from danlu.storage.checkpoint.manifest import (
    MANIFEST_FILE,
    MAX_METADATA_BYTES,
    CorruptCheckpointError,
    Manifest,
    parse_manifest,
    replica_path,
)
from danlu.storage.store.base import Store

T = TypeVar("T")
MetadataParser = Callable[[bytes, str], T]
"""Parses a metadata file, given its name for messages; `CorruptCheckpointError` if it is not intact."""
OnRepair = Callable[[str], None]


def read_bounded(store: Store, path: str, most: int = MAX_METADATA_BYTES) -> bytes:
    """A file's bytes; `CorruptCheckpointError` if it has more than `most`."""
    if (size := store.size(path)) > most:
        raise CorruptCheckpointError(f"{store.name}/{path} must have at most {most} bytes, but has {size}")
    return store.read(path)


def read_metadata(store: Store, path: str, most: int, parse: MetadataParser[T], on_repair: OnRepair) -> T:
    """A parsed metadata file, or its replica if it is corrupt or missing; then `on_repair` is called.

    Raises the error of the file itself if there is no intact replica.
    """
    try:
        return parse(read_bounded(store, path, most), f"{store.name}/{path}")
    except (CorruptCheckpointError, OSError, EOFError) as error:
        replica = replica_path(path)
        try:
            found = parse(read_bounded(store, replica, most), f"{store.name}/{replica}")
        except (CorruptCheckpointError, OSError, EOFError):
            raise error from None
        on_repair(f"{error}; read from {replica.rpartition('/')[2]}")
        return found


def read_intact_bytes(store: Store, path: str, most: int, parse: MetadataParser[object]) -> bytes:
    """The bytes of a metadata file, or of its replica: of the first that is intact."""

    def parse_and_keep(text: bytes, where: str) -> bytes:
        parse(text, where)
        return text

    return read_metadata(store, path, most, parse_and_keep, lambda line: None)


def manifest_parser(manifest: Manifest) -> MetadataParser[Manifest]:
    """A parser that accepts only this manifest, even if another is valid."""

    def parse(text: bytes, where: str) -> Manifest:
        found = parse_manifest(text, where)
        if found.root != manifest.root:
            raise CorruptCheckpointError(f"{where} must have root {manifest.root}, but has {found.root}")
        return found

    return parse


def read_manifest(store: Store, step: int, on_repair: OnRepair = lambda line: None) -> Manifest:
    """The manifest of a step; FileNotFoundError if there is none, whatever else there may be."""
    path = f"{step_folder(step)}/{MANIFEST_FILE}"
    store.size(path)  # its existence makes a checkpoint complete: a replica alone does not

    def parse(text: bytes, where: str) -> Manifest:
        manifest = parse_manifest(text, where)
        if manifest.step != step:
            raise CorruptCheckpointError(f"{where} must be of step {step}, but is of step {manifest.step}")
        return manifest

    return read_metadata(store, path, MAX_METADATA_BYTES, parse, on_repair)

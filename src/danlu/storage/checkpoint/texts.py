"""Read the texts of a checkpoint: never more bytes than one may have, and from the second copy where there is one."""

from collections.abc import Callable
from typing import TypeVar

from danlu.storage.checkpoint.commit import folder_of
from danlu.storage.checkpoint.manifest import LARGEST_TEXT, MANIFEST, Damaged, Manifest, open_manifest, twin_of
from danlu.storage.store import Store

T = TypeVar("T")
Open = Callable[[bytes, str], T]
"""Makes something of a text, given what to call the file in messages; `Damaged` if it is not right."""
OnMended = Callable[[str], None]


def bounded_text(store: Store, path: str, most: int = LARGEST_TEXT) -> bytes:
    """A file's bytes; `Damaged` if it has too many to be what it should."""
    if (size := store.size(path)) > most:
        raise Damaged(f"{store.name}/{path} must have at most {most} bytes, but has {size}")
    return store.read(path)


def whole_text(store: Store, path: str, most: int, opened: Open[T], on_mended: OnMended) -> T:
    """What a text says, or its twin if the text is damaged or gone; then `on_mended` is told.

    Raises what is wrong with the text itself if there is no twin, or none that is right.
    """
    try:
        return opened(bounded_text(store, path, most), f"{store.name}/{path}")
    except (Damaged, OSError, EOFError) as error:
        twin = twin_of(path)
        try:
            found = opened(bounded_text(store, twin, most), f"{store.name}/{twin}")
        except (Damaged, OSError, EOFError):
            raise error from None
        on_mended(f"{error}; taken from {twin.rpartition('/')[2]}")
        return found


def right_text(store: Store, path: str, most: int, opened: Open[object]) -> bytes:
    """The bytes of a text, or of its twin: of the first that is right."""

    def kept(text: bytes, where: str) -> bytes:
        opened(text, where)
        return text

    return whole_text(store, path, most, kept, lambda line: None)


def opener_of(manifest: Manifest) -> Open[Manifest]:
    """What takes a text for this manifest and no other, however right in itself."""

    def opened(text: bytes, where: str) -> Manifest:
        found = open_manifest(text, where)
        if found.root != manifest.root:
            raise Damaged(f"{where} must have root {manifest.root}, but has {found.root}")
        return found

    return opened


def manifest_of(store: Store, step: int, on_mended: OnMended = lambda line: None) -> Manifest:
    """The manifest of a step; FileNotFoundError where there is none, whatever else there may be."""
    path = f"{folder_of(step)}/{MANIFEST}"
    store.size(path)  # that it is there is what makes a checkpoint complete: a twin alone does not

    def opened(text: bytes, where: str) -> Manifest:
        manifest = open_manifest(text, where)
        if manifest.step != step:
            raise Damaged(f"{where} must be of step {step}, but is of step {manifest.step}")
        return manifest

    return whole_text(store, path, LARGEST_TEXT, opened, on_mended)

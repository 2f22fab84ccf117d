"""Which checkpoints a store holds, and which of them may go. Nothing here needs torch."""

import re

from danlu.storage.checkpoint.commit import folder_of
from danlu.storage.checkpoint.manifest import MANIFEST, Damaged, Manifest, open_manifest
from danlu.storage.store import Store

QUARANTINE = "quarantined.json"
"""What a manifest is called whose checkpoint must not be resumed from: not finite, or damaged."""
_FOLDER = re.compile(r"^step-(\d{8,})$")


class Shelf:
    """The checkpoints in a store, by step."""

    def __init__(self, store: Store, keep: int) -> None:
        self.store = store
        self.keep = keep

    def steps(self) -> list[int]:
        """Steps to resume from: complete, their manifest readable, finite; oldest first."""
        return [step for step in self.all_steps() if (found := self.manifest(step)) is not None and found.finite]

    def all_steps(self) -> list[int]:
        """Steps with a manifest, oldest first."""
        return [step for step in self.folders() if self._has(step, MANIFEST)]

    def quarantined(self) -> list[int]:
        """Steps that were set aside."""
        return [step for step in self.folders() if self._has(step, QUARANTINE)]

    def folders(self) -> list[int]:
        """Steps that have a folder, whatever is in it; oldest first."""
        return sorted(int(found[1]) for name in self.store.list() if (found := _FOLDER.match(name)))

    def manifest(self, step: int) -> Manifest | None:
        """The manifest of a step, or None if it is not there or not what was written."""
        path = f"{folder_of(step)}/{MANIFEST}"
        try:
            return open_manifest(self.store.read(path), f"{self.store.name}/{path}")
        except (FileNotFoundError, Damaged):
            return None

    def set_aside(self, step: int) -> None:
        """Keep a checkpoint from being resumed from, and its files for whoever looks into it."""
        folder = folder_of(step)
        self.store.write(f"{folder}/{QUARANTINE}", [self.store.read(f"{folder}/{MANIFEST}")])
        self.store.remove(f"{folder}/{MANIFEST}")

    def remove(self, step: int) -> None:
        """Delete a checkpoint; first its manifest, so that one that is half deleted does not look complete."""
        folder = folder_of(step)
        self.store.remove(f"{folder}/{MANIFEST}")
        self.store.remove(folder)

    def added(self, manifest: Manifest) -> None:
        """Set a new checkpoint that is not finite aside; otherwise delete the oldest beyond `keep`."""
        if not manifest.finite:
            self.set_aside(manifest.step)
            return
        for old in self.steps()[: -self.keep]:
            self.remove(old)

    def _has(self, step: int, file: str) -> bool:
        try:
            return self.store.size(f"{folder_of(step)}/{file}") > 0
        except FileNotFoundError:
            return False

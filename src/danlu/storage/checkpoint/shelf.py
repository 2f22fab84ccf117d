"""Which checkpoints a store holds, and which of them may go. Nothing here needs torch."""

import re

from danlu.storage.checkpoint.commit import SaveFailed, folder_of
from danlu.storage.checkpoint.manifest import MANIFEST, Damaged, Manifest, twin_of
from danlu.storage.checkpoint.texts import manifest_of
from danlu.storage.store import Store

QUARANTINE = "quarantined.json"
"""What a manifest is called whose checkpoint must not be resumed from: not finite, or damaged."""
_FOLDER = re.compile(r"step-([0-9]{8,18})")


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
        found = (_FOLDER.fullmatch(name) for name in self.store.list())
        return sorted(int(match[1]) for match in found if match and match[0] == folder_of(int(match[1])))

    def manifest(self, step: int) -> Manifest | None:
        """The manifest of a step, or None if it is not there or not what was written."""
        try:
            return manifest_of(self.store, step)
        except (FileNotFoundError, Damaged):
            return None

    def make_way(self, step: int) -> None:
        """Before a save: refuse to replace a checkpoint, and set aside what stands there and is none."""
        names = self.store.list(folder_of(step))
        if MANIFEST not in names:
            if twin_of(MANIFEST) in names:  # of one that was set aside or removed: it must not speak for the next
                self.store.remove(f"{folder_of(step)}/{twin_of(MANIFEST)}")
            return
        if (found := self.manifest(step)) is not None and found.finite:
            name = f"{self.store.name}/{folder_of(step)}"
            raise SaveFailed(f"{name} must be new, but exists already; it is left as it is")
        self.set_aside(step)

    def clear(self, step: int, attempt: str) -> None:
        """Before the first save of a process: take away what a killed one left of the same step."""
        if not self._has(step, MANIFEST) and not self._has(step, QUARANTINE):
            self.store.sweep(folder_of(step), keep=attempt)

    def set_aside(self, step: int) -> None:
        """Keep a checkpoint from being resumed from, and its files for whoever looks into it."""
        folder = folder_of(step)
        self.store.write(f"{folder}/{QUARANTINE}", [self.store.read(f"{folder}/{MANIFEST}")])
        self.store.remove(f"{folder}/{MANIFEST}")
        self.store.remove(f"{folder}/{twin_of(MANIFEST)}")

    def remove(self, step: int) -> None:
        """Delete a checkpoint; first its manifest, so that one that is half deleted does not look complete."""
        folder = folder_of(step)
        self.store.remove(f"{folder}/{MANIFEST}")
        self.store.remove(folder)

    def retire(self, proven: int) -> None:
        """Delete checkpoints and leftovers that those up to `proven`, which is known to be whole, make needless.

        `keep` of them stay; later ones may yet turn out not to be whole, and count for nothing here.
        """
        # Every writer has ended its earlier saves before it takes part in a later one: nobody writes to leftovers.
        leftovers = [
            old
            for old in self.folders()
            if old < proven and not self._has(old, MANIFEST) and not self._has(old, QUARANTINE)
        ]
        good = [step for step in self.steps() if step <= proven]
        failed: list[OSError] = []
        for old in [*good[: -self.keep], *leftovers]:
            try:
                self.remove(old)
            except OSError as error:  # one that cannot be deleted must not keep the others
                failed.append(error)
        if failed:
            raise failed[0]

    def _has(self, step: int, file: str) -> bool:
        try:
            return self.store.size(f"{folder_of(step)}/{file}") > 0
        except FileNotFoundError:
            return False

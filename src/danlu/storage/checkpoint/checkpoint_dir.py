"""Which checkpoints a store has, and which of them may be deleted. Nothing here needs torch."""

import re

from danlu.storage.checkpoint.commit import CheckpointSaveError, step_folder
from danlu.storage.checkpoint.manifest import MANIFEST_FILE, CorruptCheckpointError, Manifest, replica_path
from danlu.storage.checkpoint.metadata_files import read_manifest
from danlu.storage.store.base import Store

QUARANTINE_FILE = "quarantined.json"
"""Name of the manifest of a checkpoint that must not be resumed from: not finite, or corrupt."""
_FOLDER = re.compile(r"step-([0-9]{8,18})")


class CheckpointDir:
    """The checkpoints in a store, by step."""

    def __init__(self, store: Store, keep: int) -> None:
        self.store = store
        self.keep = keep

    def resumable_steps(self) -> list[int]:
        """Steps to resume from: complete, their manifest readable, finite; oldest first."""
        return [
            step
            for step in self.committed_steps()
            if (found := self.manifest_or_none(step)) is not None and found.finite
        ]

    def committed_steps(self) -> list[int]:
        """Steps with a manifest, oldest first."""
        return [step for step in self.steps_with_folder() if self._has(step, MANIFEST_FILE)]

    def quarantined_steps(self) -> list[int]:
        """Steps that were quarantined."""
        return [step for step in self.steps_with_folder() if self._has(step, QUARANTINE_FILE)]

    def steps_with_folder(self) -> list[int]:
        """Steps that have a folder, whatever is in it; oldest first."""
        found = (_FOLDER.fullmatch(name) for name in self.store.list())
        return sorted(int(match[1]) for match in found if match and match[0] == step_folder(int(match[1])))

    def manifest_or_none(self, step: int) -> Manifest | None:
        """The manifest of a step, or None if it is missing or not what was written."""
        try:
            return read_manifest(self.store, step)
        except (FileNotFoundError, CorruptCheckpointError):
            return None

    def refuse_or_quarantine(self, step: int) -> None:
        """Before a save: refuse to replace a good checkpoint, and quarantine one that is not."""
        names = self.store.list(step_folder(step))
        if MANIFEST_FILE not in names:
            if replica_path(MANIFEST_FILE) in names:  # of one quarantined or removed: not valid for the next
                self.store.remove(f"{step_folder(step)}/{replica_path(MANIFEST_FILE)}")
            return
        if (found := self.manifest_or_none(step)) is not None and found.finite:
            name = f"{self.store.name}/{step_folder(step)}"
            raise CheckpointSaveError(f"{name} must be new, but exists already; it is not changed")
        self.quarantine(step)

    def remove_leftovers(self, step: int, attempt: str) -> None:
        """Before the first save of a process: remove what a killed one left of the same step."""
        if not self._has(step, MANIFEST_FILE) and not self._has(step, QUARANTINE_FILE):
            self.store.remove_except(step_folder(step), keep=attempt)

    def quarantine(self, step: int) -> None:
        """Prevent a checkpoint from being resumed from, but keep its files for analysis."""
        folder = step_folder(step)
        self.store.write(f"{folder}/{QUARANTINE_FILE}", [self.store.read(f"{folder}/{MANIFEST_FILE}")])
        self.store.remove(f"{folder}/{MANIFEST_FILE}")
        self.store.remove(f"{folder}/{replica_path(MANIFEST_FILE)}")

    def remove(self, step: int) -> None:
        """Delete a checkpoint; its manifest first, so that a half-deleted one does not look complete."""
        folder = step_folder(step)
        self.store.remove(f"{folder}/{MANIFEST_FILE}")
        self.store.remove(folder)

    def remove_after(self, step: int) -> None:
        """Delete all later steps but quarantined ones, the newest first: what an interruption leaves is a valid run."""
        for later in reversed(self.steps_with_folder()):
            if later > step and (self._has(later, MANIFEST_FILE) or not self._has(later, QUARANTINE_FILE)):
                self.remove(later)

    def purge_stale(self, verified: int) -> None:
        """Delete checkpoints and leftovers older than the newest `keep` verified checkpoints.

        Steps up to `verified` are verified; later ones may yet turn out to be corrupt, and are ignored here.
        """
        # Every writer has finished its earlier saves before it takes part in a later one: no rank writes to leftovers.
        leftovers = [
            old
            for old in self.steps_with_folder()
            if old < verified and not self._has(old, MANIFEST_FILE) and not self._has(old, QUARANTINE_FILE)
        ]
        good = [step for step in self.resumable_steps() if step <= verified]
        failed: list[OSError] = []
        for old in [*good[: -self.keep], *leftovers]:
            try:
                self.remove(old)
            except OSError as error:  # one failure must not keep the others
                failed.append(error)
        if failed:
            raise failed[0]

    def _has(self, step: int, file: str) -> bool:
        try:
            return self.store.size(f"{step_folder(step)}/{file}") > 0
        except FileNotFoundError:
            return False

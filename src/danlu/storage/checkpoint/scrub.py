"""Read kept checkpoints again in idle time, so that bit rot is found while it can still be repaired."""

import re
import threading
from collections.abc import Callable, Iterator

from danlu.storage.checkpoint.checkpoint_dir import CheckpointDir
from danlu.storage.checkpoint.manifest import FANOUT, CorruptCheckpointError, Leaf, TreeNode
from danlu.storage.checkpoint.reader import CheckpointReader, group_adjacent, iter_chunks, iter_padding
from danlu.storage.checkpoint.repair import repair_pack

_POLL = 0.5
_READ_ERRORS = (CorruptCheckpointError, OSError, EOFError)
_CHILD = re.compile(r"[0-9a-f]{8}-(?:n([0-9]+)-)?([0-9]+)\.json")


class Scrubber:
    """A thread that regularly reads this rank's share of every kept checkpoint, and repairs what it can."""

    def __init__(
        self,
        checkpoint_dir: CheckpointDir,
        rank: int,
        world: int,
        seconds: float,
        busy: Callable[[], bool],
        report: Callable[[str], None],
    ) -> None:
        """Reading waits while `busy`, during a save; `report` is called with what was found."""
        self.checkpoint_dir = checkpoint_dir
        self.rank, self.world, self.interval = rank, world, seconds
        self._busy, self._report = busy, report
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="danlu-scrub", daemon=True)

    def start(self) -> None:
        """Start; the first pass begins after the interval."""
        self._thread.start()

    def close(self) -> None:
        """Stop after the current read."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self.interval):
            try:
                for step in self.checkpoint_dir.resumable_steps():
                    self._scrub(step)
            except OSError as error:
                self._report(f"kept checkpoints could not be read again: {type(error).__name__}: {error}")

    def _scrub(self, step: int) -> None:
        try:
            reader = CheckpointReader(self.checkpoint_dir.store, step)
            for leaf in leaves_of_rank(reader, reader.manifest, self.rank, self.world):
                if self._ended.is_set():
                    return
                if self._is_corrupt(reader, leaf):
                    repair_pack(reader, leaf)
                    path = f"{reader.store.name}/{reader.folder}/{leaf.pack}"
                    self._report(f"{path} was corrupt (bit rot found by the scrubber) and was repaired from parity")
        except FileNotFoundError:
            return  # deleted meanwhile, after a newer one was saved
        except _READ_ERRORS as error:
            if step in self.checkpoint_dir.resumable_steps():
                self._report(f"step {step} was read again by the scrubber, is corrupt and cannot be repaired: {error}")

    def _is_corrupt(self, reader: CheckpointReader, leaf: Leaf) -> bool:
        """Read a pack in parts, each while no save is running."""
        chunks_and_padding = sorted([*iter_chunks(leaf), *iter_padding(leaf)], key=lambda stored: stored.chunk.at)
        for run in group_adjacent(chunks_and_padding):
            while self._busy() and not self._ended.wait(_POLL):
                pass
            if self._ended.is_set():
                return False
            before = len(reader.repairs)
            if reader.check_chunks(run) or len(reader.repairs) > before:
                return True
        return False


def leaves_of_rank(reader: CheckpointReader, node: TreeNode, rank: int, world: int) -> Iterator[Leaf]:
    """A rank's share of the leaves: those whose writer modulo the world size is this rank; no other nodes are read."""
    for ref in node.children:
        match = _CHILD.fullmatch(ref.file)
        assert match is not None  # a manifest with other names is refused
        span = FANOUT ** int(match[1] or 0)
        first = int(match[2]) * span
        if (rank - first) % world >= span:
            continue
        child = reader.read_child(node, ref)
        if isinstance(child, Leaf):
            yield child
        else:
            yield from leaves_of_rank(reader, child, rank, world)

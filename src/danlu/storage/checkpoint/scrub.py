"""Read kept checkpoints again in idle time, so that rot is found while it can still be mended."""

import re
import threading
from collections.abc import Callable, Iterator

from danlu.storage.checkpoint.manifest import FANOUT, Damaged, Leaf, Node
from danlu.storage.checkpoint.mending import mend_pack
from danlu.storage.checkpoint.reader import Reader, chunks_of, padding_of, runs_of
from danlu.storage.checkpoint.shelf import Shelf

_POLL = 0.5
_FAILS = (Damaged, OSError, EOFError)
_CHILD = re.compile(r"[0-9a-f]{8}-(?:n([0-9]+)-)?([0-9]+)\.json")


class Scrubber:
    """A thread that reads this rank's share of every kept checkpoint once in so many seconds, and mends what it can."""

    def __init__(
        self, shelf: Shelf, rank: int, world: int, seconds: float, busy: Callable[[], bool], tell: Callable[[str], None]
    ) -> None:
        """`busy` says whether a save is under way, for which reading waits; `tell` is told what was found."""
        self.shelf = shelf
        self.rank, self.world, self.seconds = rank, world, seconds
        self._busy, self._tell = busy, tell
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="danlu-scrub", daemon=True)

    def start(self) -> None:
        """Begin; the first reading is due after the interval."""
        self._thread.start()

    def close(self) -> None:
        """End after the read that is under way."""
        self._ended.set()

    def _run(self) -> None:
        while not self._ended.wait(self.seconds):
            try:
                for step in self.shelf.steps():
                    self._scrub(step)
            except OSError as error:
                self._tell(f"kept checkpoints could not be read again: {type(error).__name__}: {error}")

    def _scrub(self, step: int) -> None:
        try:
            reader = Reader(self.shelf.store, step)
            for leaf in share_of(reader, reader.manifest, self.rank, self.world):
                if self._ended.is_set():
                    return
                if self._is_rotten(reader, leaf):
                    mend_pack(reader, leaf)
                    path = f"{reader.store.name}/{reader.folder}/{leaf.pack}"
                    self._tell(f"{path} had rotted, was found so in idle time and is mended from parity")
        except FileNotFoundError:
            return  # deleted meanwhile: a newer one has taken its place
        except _FAILS as error:
            if step in self.shelf.steps():
                self._tell(f"step {step} was read again in idle time and is damaged beyond mending: {error}")

    def _is_rotten(self, reader: Reader, leaf: Leaf) -> bool:
        """Read a pack in pieces, each when no save is under way."""
        every = sorted([*chunks_of(leaf), *padding_of(leaf)], key=lambda stored: stored.chunk.at)
        for run in runs_of(every):
            while self._busy() and not self._ended.wait(_POLL):
                pass
            if self._ended.is_set():
                return False
            before = len(reader.mended)
            if reader.faults(run) or len(reader.mended) > before:
                return True
        return False


def share_of(reader: Reader, node: Node, rank: int, world: int) -> Iterator[Leaf]:
    """A rank's share of the leaves: those whose writer's number is its own, counted round; no other nodes are read."""
    for under in node.children:
        match = _CHILD.fullmatch(under.file)
        assert match is not None  # a manifest with other names is not read
        span = FANOUT ** int(match[1] or 0)
        first = int(match[2]) * span
        if (rank - first) % world >= span:
            continue
        child = reader.child(node, under)
        if isinstance(child, Leaf):
            yield child
        else:
            yield from share_of(reader, child, rank, world)

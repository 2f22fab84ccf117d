"""What a store does to a disk, written down call by call: names it gives, bytes it writes, what it waits for."""

import json
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from danlu.storage.store.syscalls import Syscalls

TOP = 0
"""The folder that is there, and on the disk, before anything begins."""


@dataclass(frozen=True)
class Write:
    """Bytes of a file."""

    file: int
    offset: int
    data: bytes


@dataclass(frozen=True)
class Resize:
    """A new length of a file: `ftruncate`, or `fallocate` where `grow` (it never shrinks)."""

    file: int
    length: int
    grow: bool


@dataclass(frozen=True)
class Name:
    """A name for a file or folder: a new file, `mkdir` or `link`."""

    folder: int
    name: str
    node: int


@dataclass(frozen=True)
class Move:
    """`rename` inside a folder; the file systems in use do it at once or not at all."""

    folder: int
    source: str
    target: str
    node: int


@dataclass(frozen=True)
class Unname:
    """`unlink` or `rmdir`."""

    folder: int
    name: str


@dataclass(frozen=True)
class Sync:
    """An `fsync` that returned, of a file or of a folder."""

    node: int


@dataclass(frozen=True)
class Mark:
    """Something the program was told: `saved` when a commit returned, `dropping` before a step may vanish."""

    what: str
    step: int


Op = Write | Resize | Name | Move | Unname | Sync | Mark


class History:
    """All calls below one folder in the order they were made, by however many writers and processes."""

    def __init__(self, top: Path) -> None:
        self.top = str(top.resolve())
        self.ops: list[Op] = []
        self.lock = threading.Lock()
        self._nodes: dict[str, int] = {self.top: TOP}
        self._count = 1
        self.folders = {TOP}

    def mark(self, what: str, step: int) -> None:
        """Write down what the program knows by now."""
        with self.lock:
            self.ops.append(Mark(what, step))

    def node(self, path: str) -> int:
        """The file or folder under a path."""
        return self._nodes[path]

    def named(self, path: str, node: int | None = None, *, folder: bool = False) -> int:
        """A name was given, to a new file or folder unless `node` says to which."""
        if node is None:
            node, self._count = self._count, self._count + 1
        if folder:
            self.folders.add(node)
        above, _, name = path.rpartition("/")
        self._nodes[path] = node
        self.ops.append(Name(self._nodes[above], name, node))
        return node

    def moved(self, source: str, target: str) -> None:
        """A file got another name."""
        above, _, name = source.rpartition("/")
        assert target.rpartition("/")[0] == above, "a move between folders is not in the model"
        self._nodes[target] = self._nodes.pop(source)
        self.ops.append(Move(self._nodes[above], name, target.rpartition("/")[2], self._nodes[target]))

    def unnamed(self, path: str) -> None:
        """A name is gone."""
        above, _, name = path.rpartition("/")
        del self._nodes[path]
        self.ops.append(Unname(self._nodes[above], name))


def log_line(op: Op, history: History) -> str:
    """A call in a line of text; a name says whether it is a folder's."""
    fields: dict[str, object] = {"op": type(op).__name__}
    for key, value in vars(op).items():
        fields[key] = value.hex() if isinstance(value, bytes) else value
    if isinstance(op, Name):
        fields["is_folder"] = op.node in history.folders
    return json.dumps(fields)


def read_log(log: Path, top: Path) -> History:
    """The history that lines of `log_line` tell."""
    history = History(top)
    kinds = {kind.__name__: kind for kind in (Write, Resize, Name, Move, Unname, Sync, Mark)}
    for line in log.read_text("utf-8").splitlines():
        fields = json.loads(line)
        kind = kinds[fields.pop("op")]
        if fields.pop("is_folder", False):
            history.folders.add(fields["node"])
        if kind is Write:
            fields["data"] = bytes.fromhex(fields["data"])
        history.ops.append(kind(**fields))
    return history


class Killed(BaseException):
    """The process ended here; nothing it would still do happens."""


class Recorder(Syscalls):
    """Makes the calls and writes them down; after `left` calls that change something the process is dead."""

    def __init__(self, history: History, left: int | None = None, turn: Callable[[], None] = lambda: None) -> None:
        self.history = history
        self.left = left
        self._turn = turn
        self._open: dict[int, int | None] = {}

    @contextmanager
    def _change(self) -> Iterator[History]:
        """One call that changes the disk, alone."""
        self._turn()
        with self.history.lock:
            if self.left is not None:
                if self.left <= 0:
                    raise Killed
                self.left -= 1
            yield self.history

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        if not flags & os.O_CREAT:
            self._turn()
            if self.left is not None and self.left <= 0:
                raise Killed
            with self.history.lock:
                descriptor = super().open(path, flags, mode)
                self._open[descriptor] = self.history.node(path)
            return descriptor
        assert flags & os.O_EXCL, "a file that may be there already is not in the model"
        with self._change() as history:
            descriptor = super().open(path, flags, mode)
            self._open[descriptor] = history.named(path)
            return descriptor

    def close(self, descriptor: int) -> None:
        self._open.pop(descriptor, None)
        super().close(descriptor)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        with self._change() as history:
            taken = super().pwrite(descriptor, data, offset)
            history.ops.append(Write(self._file(descriptor), offset, bytes(data[:taken])))
            return taken

    def fallocate(self, descriptor: int, offset: int, length: int) -> None:
        with self._change() as history:
            super().fallocate(descriptor, offset, length)
            history.ops.append(Resize(self._file(descriptor), offset + length, grow=True))

    def ftruncate(self, descriptor: int, length: int) -> None:
        with self._change() as history:
            super().ftruncate(descriptor, length)
            history.ops.append(Resize(self._file(descriptor), length, grow=False))

    def fsync(self, descriptor: int) -> None:
        with self._change() as history:
            # The real disk is not waited for: what a crash leaves is decided by the model, not by this machine.
            history.ops.append(Sync(self._file(descriptor)))

    def rename(self, source: str, target: str) -> None:
        with self._change() as history:
            super().rename(source, target)
            history.moved(source, target)

    def link(self, source: str, target: str) -> None:
        with self._change() as history:
            super().link(source, target)
            history.named(target, history.node(source))

    def unlink(self, path: str) -> None:
        with self._change() as history:
            super().unlink(path)
            history.unnamed(path)

    def mkdir(self, path: str) -> None:
        with self._change() as history:
            super().mkdir(path)
            history.named(path, folder=True)

    def rmdir(self, path: str) -> None:
        with self._change() as history:
            super().rmdir(path)
            history.unnamed(path)

    def _file(self, descriptor: int) -> int:
        node = self._open[descriptor]
        assert node is not None
        return node


class Turns:
    """Lets several threads make their calls in an order drawn by lot, one call at a time.

    A thread goes on for some ten calls before another may: so one is often left standing between two calls while
    another gets far.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._waiting: set[int] = set()
        self._threads: set[int] = set()
        self._next: int | None = None
        self._last = 0
        self._changed = threading.Condition()

    def take(self) -> None:
        """Wait until it is this thread's turn."""
        me = threading.get_ident()
        with self._changed:
            self._waiting.add(me)
            self._draw()
            self._changed.wait_for(lambda: self._next == me)
            self._waiting.discard(me)
            self._next = None

    def enter(self) -> None:
        """This thread will make calls; nobody's turn comes before all who entered wait for theirs."""
        with self._changed:
            self._threads.add(threading.get_ident())

    def leave(self) -> None:
        """This thread makes no more calls."""
        with self._changed:
            self._threads.discard(threading.get_ident())
            self._draw()

    def _draw(self) -> None:
        if self._next is None and self._waiting and self._waiting >= self._threads:
            if self._last not in self._waiting or self._random.random() < 0.1:
                self._last = self._random.choice(sorted(self._waiting))
            self._next = self._last
            self._changed.notify_all()

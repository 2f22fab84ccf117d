"""Every state a crash may leave a disk in, reckoned from the calls a program made.

The model (that of ALICE and CrashMonkey, in its weak form). The machine stops between two calls. Then

- a file's bytes that were written before an `fsync` of that file returned are there. Of later writes, resizes and
  allocations any subset is, in any order: a write may be absent, whole, torn (its first or its last part), or zeros
  where only the length reached the disk;
- a folder's names that were given, moved or taken away before an `fsync` of that folder returned are so. Of later ones
  any subset is (`weak`: a later one may be there without an earlier one), or any prefix (`ordered`: what ext4, XFS and
  btrfs do). The states of the second are among those of the first;
- folders are independent of each other and of the content of files; one `rename` happens at once or not at all;
- an `fsync` of a file says nothing about its name.

What is not in the model: bytes that change after they were durable. That is damage, and tested as such.
"""

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from math import prod
from pathlib import Path

from history import TOP, History, Mark, Move, Name, Op, Resize, Sync, Unname, Write

SECTOR = 512
Entries = Mapping[str, int]


@dataclass(frozen=True)
class State:
    """What a crash left: every file and folder that can be reached, by path."""

    cut: int
    ordered: bool
    """Whether it can come about where a folder's changes reach the disk in order."""
    files: Mapping[str, bytes]
    folders: Sequence[str]

    def digest(self) -> bytes:
        """Equal for equal states."""
        total = hashlib.blake2b(digest_size=16)
        for path in sorted(self.folders):
            total.update(b"d" + path.encode() + b"\0")
        for path in sorted(self.files):
            total.update(b"f" + path.encode() + b"\0" + hashlib.blake2b(self.files[path]).digest())
        return total.digest()

    def make(self, folder: Path) -> None:
        """Make it so, in a folder that is empty."""
        for path in sorted(self.folders):
            (folder / path).mkdir()
        for path, content in self.files.items():
            (folder / path).write_bytes(content)


@dataclass
class _Disk:
    """What is surely on the disk, and what was done since."""

    content: dict[int, bytes] = field(default_factory=dict)
    entries: dict[int, dict[str, int]] = field(default_factory=lambda: {TOP: {}})
    written: dict[int, list[Write | Resize]] = field(default_factory=dict)
    renamed: dict[int, list[Name | Move | Unname]] = field(default_factory=dict)

    def do(self, op: Op, folders: set[int]) -> None:
        """Take one more call into account."""
        match op:
            case Write() | Resize():
                self.written.setdefault(op.file, []).append(op)
            case Name() | Move() | Unname():
                self.renamed.setdefault(op.folder, []).append(op)
            case Sync() if op.node in folders:
                self.entries[op.node] = _named(self.entries.get(op.node, {}), self.renamed.pop(op.node, ()))
            case Sync():
                whole = [(each, "whole") for each in self.written.pop(op.node, ())]
                self.content[op.node] = _filled(self.content.get(op.node, b""), whole)


def states(history: History, most_a_cut: int, seed: int) -> Iterator[State]:
    """All states a crash may leave between any two calls; where there are too many, the extremes and a sample."""
    disk = _Disk()
    for cut in range(len(history.ops) + 1):
        draw = random.Random(f"{seed}-{cut}")
        for kept, ordered in _name_choices(disk, most_a_cut, draw):
            entries = {folder: _named(disk.entries.get(folder, {}), kept.get(folder, ())) for folder in history.folders}
            found, paths = _reachable(entries, history.folders)
            for contents in _content_choices(disk, set(found.values()), max(1, most_a_cut // 8), draw):
                files = {path: contents.get(node, disk.content.get(node, b"")) for path, node in found.items()}
                yield State(cut, ordered, files, paths)
        if cut < len(history.ops):
            disk.do(history.ops[cut], history.folders)


def sampled(history: History, a_cut: int, seed: int) -> Iterator[State]:
    """Up to so many states of every cut, drawn by lot from several times as many; none of equal ones that were due."""
    seen: set[tuple[bytes, int]] = set()
    marks = 0
    for cut, group in groupby(states(history, 4 * a_cut, seed), lambda state: state.cut):
        marks += bool(cut) and isinstance(history.ops[cut - 1], Mark)  # an equal state with more promised is another
        found = {state.digest(): state for state in group}
        fresh = [state for digest, state in found.items() if (digest, marks) not in seen]
        seen |= {(digest, marks) for digest in found}
        yield from random.Random(f"{seed}-{cut}").sample(fresh, min(a_cut, len(fresh)))


def known(history: History, cut: int) -> list[int]:
    """Steps whose save had returned at a cut and that nobody has begun to take away, oldest first."""
    steps: list[int] = []
    for op in history.ops[:cut]:
        if isinstance(op, Mark) and op.what == "saved":
            steps.append(op.step)
        elif isinstance(op, Mark) and op.what == "dropping" and op.step in steps:
            steps.remove(op.step)
    return steps


def _named(before: Entries, changes: Sequence[Name | Move | Unname]) -> dict[str, int]:
    entries = dict(before)
    for change in changes:
        match change:
            case Name(name=name, node=node):
                entries[name] = node
            case Move(source=source, target=target, node=node):
                entries.pop(source, None)
                entries[target] = node
            case Unname(name=name):
                entries.pop(name, None)
    return entries


def _filled(before: bytes, changes: Sequence[tuple[Write | Resize, str]]) -> bytes:
    content = bytearray(before)
    for change, how in changes:
        if isinstance(change, Resize):
            if how == "whole" and (len(content) < change.length or not change.grow):
                content[change.length :] = bytes(max(0, change.length - len(content)))
            continue
        if how == "absent":
            continue
        data = _torn(change.data, how)
        end = change.offset + len(data)
        content.extend(bytes(max(0, end - len(content))))
        content[change.offset : end] = data
    return bytes(content)


def _torn(data: bytes, how: str) -> bytes:
    middle = len(data) // 2 // SECTOR * SECTOR or len(data) // 2
    return {
        "whole": data,
        "zeros": bytes(len(data)),
        "first": data[:middle],
        "last": bytes(middle) + data[middle:],
    }[how]


def _reachable(entries: Mapping[int, Entries], folders: set[int]) -> tuple[dict[str, int], list[str]]:
    files: dict[str, int] = {}
    paths: list[str] = []
    left = [("", TOP)]
    while left:
        above, folder = left.pop()
        for name, node in entries[folder].items():
            if node in folders:
                paths.append(above + name)
                left.append((f"{above}{name}/", node))
            else:
                files[above + name] = node
    return files, paths


def _name_choices(
    disk: _Disk, most: int, draw: random.Random
) -> Iterator[tuple[dict[int, Sequence[Name | Move | Unname]], bool]]:
    """Which of the names that may be lost are not, folder by folder; and whether each folder's are a prefix."""
    pending = {folder: changes for folder, changes in disk.renamed.items() if changes}
    total = sum(map(len, pending.values()))
    if 2**total <= most:
        masks = list(product((False, True), repeat=total))
    else:
        masks = [*_prefixes([len(changes) for changes in pending.values()], most // 2, draw)]
        masks += [tuple(where != only for where in range(total)) for only in range(total)]
        masks += [tuple(where == only for where in range(total)) for only in range(total)]
        masks += [tuple(draw.random() < 0.5 for _ in range(total)) for _ in range(most // 2)]
    for mask in dict.fromkeys(masks):
        kept, at, ordered = {}, 0, True
        for folder, changes in pending.items():
            mine = mask[at : at + len(changes)]
            at += len(changes)
            kept[folder] = [change for change, there in zip(changes, mine, strict=True) if there]
            ordered = ordered and list(mine) == sorted(mine, reverse=True)
        yield kept, ordered


def _prefixes(lengths: Sequence[int], most: int, draw: random.Random) -> list[tuple[bool, ...]]:
    if prod(length + 1 for length in lengths) <= most:
        ends = list(product(*(range(length + 1) for length in lengths)))
    else:
        ends = [tuple(draw.randint(0, length) for length in lengths) for _ in range(most)]
    return [
        tuple(place < end for end, length in zip(each, lengths, strict=True) for place in range(length))
        for each in ends
    ]


def _content_choices(disk: _Disk, reached: set[int], most: int, draw: random.Random) -> Iterator[dict[int, bytes]]:
    """What files that were not brought to the disk may hold; only those that can be reached matter."""
    pending = [(file, changes) for file, changes in disk.written.items() if changes and file in reached]
    ways = [
        ("absent", "whole") if isinstance(change, Resize) else ("absent", "whole", "zeros", "first", "last")
        for _, changes in pending
        for change in changes
    ]
    if prod(map(len, ways)) <= most:
        choices = list(product(*ways))
    else:
        choices = [("absent",) * len(ways), ("whole",) * len(ways)]
        choices += [tuple(draw.choice(way) for way in ways) for _ in range(most)]
    for choice in dict.fromkeys(choices):
        contents, at = {}, 0
        for file, changes in pending:
            how = choice[at : at + len(changes)]
            at += len(changes)
            contents[file] = _filled(disk.content.get(file, b""), list(zip(changes, how, strict=True)))
        yield contents

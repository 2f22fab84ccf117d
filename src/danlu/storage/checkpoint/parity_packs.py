"""Parity over the packs of several writers: any few of them that are lost or rotten are worked out from the others.

    step-00000100/
        9f27ab01-g000000.parity.json   which packs make up group 0, and how many parity blocks there are
        9f27ab01-g000000-0.parity      one block as long as the longest of them

Parity needs no trust: what is mended counts only if it has the crc32c that was taken from the training tensor.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import combinations
from typing import Annotated, Literal

from pydantic import Field

from danlu.spec.description import Description, Many
from danlu.storage.checkpoint.manifest import LARGEST_TEXT, Attempt, Damaged, Pack, Whole, parse, text_of
from danlu.storage.parity import encode, repair
from danlu.storage.store import Buffer, Store

Copies = Callable[[str], Iterable[Store]]
MOST_MEMBERS = 128
_PIECE = 16 << 20
_MARK = ".parity.json"


class Member(Description):
    """A pack of a group; beyond its end it counts as zeros."""

    pack: Pack
    bytes: Whole


class Group(Description):
    """Packs that are protected together."""

    kind: Literal["danlu parity"] = "danlu parity"
    format: Literal[1] = 1
    step: Whole
    attempt: Attempt
    group: Whole
    members: Annotated[Many[Member], Field(min_length=1, max_length=MOST_MEMBERS)]
    parity: Annotated[int, Field(ge=1, le=50)]
    """Blocks of parity: as many packs may be lost."""

    @property
    def length(self) -> int:
        """Bytes of a parity block."""
        return max(member.bytes for member in self.members)


def writers_of(group: int, writers: int, size: int) -> range:
    """The writers of a group's packs: those that follow each other, and may share a host, are in different ones."""
    return range(group, writers, _groups(writers, size))


def group_kept_by(writer: int, writers: int, size: int) -> int | None:
    """The group whose parity this writer makes, if any: the one before its own, where there is another."""
    groups = _groups(writers, size)
    return (writer - 1) % groups if writer < groups else None


def _groups(writers: int, size: int) -> int:
    """Groups of at most `size` packs."""
    return -(-writers // size)


def write_parity(store: Store, folder: str, group: Group) -> None:
    """Make the parity of a group whose packs are written; in the memory of one piece of each.

    From the store and no nearer copy: a buffer in memory may be filled again meanwhile, and parity that mixes two
    saves mends nothing.
    """

    def block(number: int) -> Iterator[Buffer]:
        for at in range(0, group.length, _PIECE):
            length = min(_PIECE, group.length - at)
            pieces = [
                _padded(store, _nowhere, f"{folder}/{member.pack}", member.bytes, at, length)
                for member in group.members
            ]
            yield encode(pieces, group.parity)[number]

    for number in range(group.parity):
        store.write(f"{folder}/{_block(group, number)}", block(number))
    store.write(f"{folder}/{group.attempt}-g{group.group:06d}{_MARK}", [text_of(group)])


def _nowhere(path: str) -> Iterable[Store]:
    return ()


def mended(store: Store, copies: Copies, path: str, at: int, length: int) -> Iterator[bytearray]:
    """What bytes of a pack may have been, by what the others of its group and the parity say; the likeliest first."""
    folder, _, pack = path.rpartition("/")
    group = _group(store, folder, pack)
    if group is None:
        return
    count = len(group.members)
    wanted = next(number for number, member in enumerate(group.members) if member.pack == pack)
    have: dict[int, bytes] = {}
    for number, member in enumerate(group.members):
        if number != wanted and (found := _try(store, copies, f"{folder}/{member.pack}", member.bytes, at, length)):
            have[number] = found
    for number in range(group.parity):
        if found := _try(store, copies, f"{folder}/{_block(group, number)}", group.length, at, length):
            have[count + number] = found
    # One of the others may be rotten in the same place: leave out none, then one, as far as parity reaches.
    for spared in range(len(have) - count + 1):
        for left_out in combinations(sorted(have), spared):
            used = {number: block for number, block in have.items() if number not in left_out}
            yield bytearray(repair(used, count, group.parity, length)[wanted])


def _group(store: Store, folder: str, pack: str) -> Group | None:
    attempt = pack.partition("-")[0]
    for name in store.list(folder):
        if name.startswith(f"{attempt}-g") and name.endswith(_MARK):
            path = f"{folder}/{name}"
            if store.size(path) > LARGEST_TEXT:
                continue
            try:
                group = parse(Group, store.read(path), f"{store.name}/{path}")
            except Damaged:
                continue  # no help from this one; the damage that asked for it is reported
            if any(member.pack == pack for member in group.members):
                return group
    return None


def _try(store: Store, copies: Copies, path: str, size: int, at: int, length: int) -> bytes | None:
    try:
        return bytes(_padded(store, copies, path, size, at, length))
    except (OSError, EOFError):
        return None


def _padded(store: Store, copies: Copies, path: str, size: int, at: int, length: int) -> bytearray:
    """Bytes of a file from the nearest copy, zeros after its end."""
    content = bytearray(length)
    inside = max(0, min(size, at + length) - at)
    if inside:
        into = memoryview(content)[:inside]
        for near in copies(path):
            try:
                near.read_into(path, at, into)
            except (OSError, EOFError):
                continue
            return content
        store.read_into(path, at, into)
    return content


def _block(group: Group, number: int) -> str:
    return f"{group.attempt}-g{group.group:06d}-{number}.parity"

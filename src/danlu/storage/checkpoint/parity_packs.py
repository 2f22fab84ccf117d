"""Parity over the packs of several writers: any few of them that are lost or rotten are worked out from the others.

    step-00000100/
        9f27ab01-g000000.parity.json        which packs make up group 0, and the parity blocks with their hashes
        9f27ab01-g000000.parity.copy.json   the same once more
        9f27ab01-g000000-0.parity           one block as long as the longest of them

Mending needs no trust in parity: what is worked out counts only if it has the crc32c that was taken from the training
tensor. The hashes here are for finding out in time that parity itself has rotted.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from danlu.spec.description import Description, Many
from danlu.storage.checkpoint.commit import folder_of
from danlu.storage.checkpoint.manifest import (
    LARGEST_TEXT,
    Attempt,
    Damaged,
    Pack,
    Sha256,
    Whole,
    check_root,
    parse,
    sealed,
    twin_of,
)
from danlu.storage.checkpoint.texts import OnMended, Open, whole_text
from danlu.storage.hashing import crc32c
from danlu.storage.parity import encode, repair
from danlu.storage.store import Buffer, Store

Copies = Callable[[str], Iterable[Store]]
OnLost = Callable[[str, str], None]
"""Told of a file and of what is wrong with it."""
MOST_MEMBERS = 128
MOST_BLOCKS = 50
PIECE = 16 << 20
_MARK, _TWIN = ".parity.json", ".parity.copy.json"


class Member(Description):
    """A pack of a group; beyond its end it counts as zeros."""

    pack: Pack
    bytes: Whole


class Block(Description):
    """A block of parity."""

    crc32c: Many[Annotated[int, Field(ge=0, lt=2**32)]]
    """Of every 16 MiB."""


class Group(Description):
    """Packs that are protected together."""

    kind: Literal["danlu parity"] = "danlu parity"
    format: Literal[1] = 1
    step: Whole
    attempt: Attempt
    group: Whole
    members: Annotated[Many[Member], Field(min_length=1, max_length=MOST_MEMBERS)]
    blocks: Annotated[Many[Block], Field(min_length=1, max_length=MOST_BLOCKS)]
    """Parity: as many packs may be lost."""
    root: Sha256
    """SHA-256 of this text with 64 zeros in place of this hash."""

    @property
    def length(self) -> int:
        """Bytes of a parity block."""
        return max(member.bytes for member in self.members)

    @property
    def path(self) -> str:
        """Where this description lies."""
        return _description(self.step, self.attempt, self.group)

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        pieces = -(-self.length // PIECE)
        if any(len(block.crc32c) != pieces for block in self.blocks):
            raise ValueError(f"blocks must have a crc32c for each of {pieces} pieces")
        return self


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


def write_parity(store: Store, step: int, attempt: str, group: int, members: Sequence[Member], parity: int) -> None:
    """Make the parity of a group whose packs are written; in the memory of one piece of each.

    From the store and no nearer copy: a buffer in memory may be filled again meanwhile, and parity that mixes two
    saves mends nothing.
    """
    folder, length = folder_of(step), max(member.bytes for member in members)
    sums: list[list[int]] = [[] for _ in range(parity)]

    def block(number: int) -> Iterator[Buffer]:
        for at in range(0, length, PIECE):
            wide = min(PIECE, length - at)
            pieces = [_padded(store, _nowhere, f"{folder}/{each.pack}", each.bytes, at, wide) for each in members]
            made = encode(pieces, parity)[number]
            sums[number].append(crc32c(made))
            yield made

    for number in range(parity):
        store.write(f"{folder}/{block_name(attempt, group, number)}", block(number))
    fields = {
        "step": step,
        "attempt": attempt,
        "group": group,
        "members": members,
        "blocks": [{"crc32c": each} for each in sums],
    }
    text, path = sealed(Group, fields), _description(step, attempt, group)
    store.write(twin_of(path), [text])
    store.write(path, [text])


def is_protected(store: Store, step: int) -> bool:
    """Whether a checkpoint has second copies of its texts, as all that have parity do."""
    return any(name.endswith(".copy.json") for name in store.list(folder_of(step)))


def groups_of(store: Store, step: int, attempt: str, on_mended: OnMended, on_lost: OnLost) -> Iterator[Group]:
    """What is protected together in a checkpoint. One whose description is gone, twin and all, cannot be told of."""
    folder = folder_of(step)
    for name in sorted({_first_name(name) for name in store.list(folder) if name.endswith((_MARK, _TWIN))}):
        if name.startswith(f"{attempt}-g"):
            path = f"{folder}/{name}"
            try:
                yield whole_text(store, path, LARGEST_TEXT, group_opener(path), on_mended)
            except (Damaged, OSError, EOFError) as error:
                on_lost(path, str(error))


def _first_name(name: str) -> str:
    return name.replace(_TWIN, _MARK)


def group_opener(path: str) -> Open[Group]:
    """What makes a group of a text: it must have its own root, and be the one that belongs in this file."""

    def opened(text: bytes, where: str) -> Group:
        group = parse(Group, text, where)
        check_root(text, group.root, where)
        if group.path != path:
            raise Damaged(f"{where} must be of {path}, but is of {group.path}")
        return group

    return opened


def rotten_blocks(store: Store, group: Group) -> list[str]:
    """What is wrong with the parity blocks that are not as they were written."""
    wrong: list[str] = []
    for number, block in enumerate(group.blocks):
        path = f"{folder_of(group.step)}/{block_name(group.attempt, group.group, number)}"
        try:
            if (size := store.size(path)) != group.length:
                raise EOFError(f"it must have {group.length} bytes, but has {size}")
            for piece, crc in enumerate(block.crc32c):
                at = piece * PIECE
                content = memoryview(bytearray(min(PIECE, group.length - at)))
                store.read_into(path, at, content)
                if (found := crc32c(content)) != crc:
                    raise EOFError(f"crc32c from byte {at} must be {crc:08x}, but is {found:08x}")
        except (OSError, EOFError) as error:
            wrong.append(f"{store.name}/{path} would be no help: {error}")
    return wrong


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
    for number in range(len(group.blocks)):
        block = f"{folder}/{block_name(group.attempt, group.group, number)}"
        if found := _try(store, copies, block, group.length, at, length):
            have[count + number] = found
    # One of the others may be rotten in the same place: leave out none, then one, as far as parity reaches.
    for spared in range(len(have) - count + 1):
        for left_out in combinations(sorted(have), spared):
            used = {number: block for number, block in have.items() if number not in left_out}
            yield bytearray(repair(used, count, len(group.blocks), length)[wanted])


def _group(store: Store, folder: str, pack: str) -> Group | None:
    step, attempt = int(folder.partition("-")[2]), pack.partition("-")[0]
    groups = groups_of(store, step, attempt, lambda line: None, lambda path, message: None)
    return next((group for group in groups if any(member.pack == pack for member in group.members)), None)


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


def _description(step: int, attempt: str, group: int) -> str:
    return f"{folder_of(step)}/{attempt}-g{group:06d}{_MARK}"


def block_name(attempt: str, group: int, number: int) -> str:
    """Name of a parity block."""
    return f"{attempt}-g{group:06d}-{number}.parity"

"""Parity over the packs of several writers: a few that are lost or corrupt are reconstructed from the others.

    step-00000100/
        9f27ab01-g000000.parity.json        which packs make up group 0, and the parity blocks with their hashes
        9f27ab01-g000000.parity.copy.json   the same once more
        9f27ab01-g000000-0.parity           one block as long as the longest of them

Repair does not trust parity: a reconstructed chunk is used only if it has the crc32c of the training tensor. The hashes
here are for detecting in time that parity itself is corrupt.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from danlu.spec.description import SpecModel, TupleOf
from danlu.storage.checkpoint.commit import step_folder
from danlu.storage.checkpoint.manifest import (
    MAX_METADATA_BYTES,
    AttemptId,
    CorruptCheckpointError,
    NonNegative,
    PackFileName,
    Sha256,
    parse_metadata,
    replica_path,
    to_sealed_json,
    verify_root_hash,
)
from danlu.storage.checkpoint.metadata_files import MetadataParser, OnRepair, read_metadata
from danlu.storage.checkpoint.reed_solomon import encode, reconstruct
from danlu.storage.store.base import Store
from danlu.storage.store.checksum import crc32c
from danlu.storage.store.safe_path import Buffer

ReplicaLookup = Callable[[str], Iterable[Store]]
OnLost = Callable[[str, str], None]
"""Called with a file and what is wrong with it."""
MAX_MEMBERS = 128
MAX_PARITY_BLOCKS = 50
CRC_BLOCK_BYTES = 16 << 20
_SUFFIX, _REPLICA_SUFFIX = ".parity.json", ".parity.copy.json"


class ParityMember(SpecModel):
    """A pack of a group; padded with zeros beyond its end."""

    pack: PackFileName
    bytes: NonNegative


class ParityBlock(SpecModel):
    """A block of parity."""

    crc32c: TupleOf[Annotated[int, Field(ge=0, lt=2**32)]]
    """Of every 16 MiB."""


class ParityGroup(SpecModel):
    """Packs that are protected together."""

    kind: Literal["danlu parity"] = "danlu parity"
    format: Literal[1] = 1
    step: NonNegative
    attempt: AttemptId
    group: NonNegative
    members: Annotated[TupleOf[ParityMember], Field(min_length=1, max_length=MAX_MEMBERS)]
    blocks: Annotated[TupleOf[ParityBlock], Field(min_length=1, max_length=MAX_PARITY_BLOCKS)]
    """Parity blocks: so many packs may be lost."""
    root: Sha256
    """SHA-256 of this file with 64 zeros in place of this hash."""

    @property
    def length(self) -> int:
        """Bytes of a parity block."""
        return max(member.bytes for member in self.members)

    @property
    def path(self) -> str:
        """Path of this description."""
        return _group_path(self.step, self.attempt, self.group)

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        pieces = -(-self.length // CRC_BLOCK_BYTES)
        if any(len(block.crc32c) != pieces for block in self.blocks):
            raise ValueError(f"blocks must have a crc32c for each of {pieces} pieces")
        return self


def group_writers(group: int, writers: int, size: int) -> range:
    """The writers of a group's packs: consecutive writers, which may share a host, are in different groups."""
    return range(group, writers, _groups(writers, size))


def parity_group_of_writer(writer: int, writers: int, size: int) -> int | None:
    """The group whose parity this writer writes, if any: the one before its own, if there are several."""
    groups = _groups(writers, size)
    return (writer - 1) % groups if writer < groups else None


def _groups(writers: int, size: int) -> int:
    """Groups of at most `size` packs."""
    return -(-writers // size)


def write_parity(
    store: Store, step: int, attempt: str, group: int, members: Sequence[ParityMember], parity: int
) -> None:
    """Write the parity of a group whose packs are written; in the memory of one block of each.

    Reads from the store and no nearer replica: a buffer in memory may be filled again meanwhile, and parity that mixes
    two saves repairs nothing.
    """
    folder, length = step_folder(step), max(member.bytes for member in members)
    sums: list[list[int]] = [[] for _ in range(parity)]

    def block(number: int) -> Iterator[Buffer]:
        for at in range(0, length, CRC_BLOCK_BYTES):
            width = min(CRC_BLOCK_BYTES, length - at)
            pieces = [
                _read_padded(store, _no_replicas, f"{folder}/{each.pack}", each.bytes, at, width) for each in members
            ]
            block_bytes = encode(pieces, parity)[number]
            sums[number].append(crc32c(block_bytes))
            yield block_bytes

    for number in range(parity):
        store.write(f"{folder}/{parity_block_name(attempt, group, number)}", block(number))
    fields = {
        "step": step,
        "attempt": attempt,
        "group": group,
        "members": members,
        "blocks": [{"crc32c": each} for each in sums],
    }
    text, path = to_sealed_json(ParityGroup, fields), _group_path(step, attempt, group)
    store.write(replica_path(path), [text])
    store.write(path, [text])


def has_parity(store: Store, step: int) -> bool:
    """Whether a checkpoint has replicas of its metadata files, as all that have parity do."""
    return any(name.endswith(".copy.json") for name in store.list(step_folder(step)))


def read_parity_groups(
    store: Store, step: int, attempt: str, on_repair: OnRepair, on_lost: OnLost
) -> Iterator[ParityGroup]:
    """The parity groups of a checkpoint. One whose description and replica are both gone is not found."""
    folder = step_folder(step)
    for name in sorted(
        {_primary_name(name) for name in store.list(folder) if name.endswith((_SUFFIX, _REPLICA_SUFFIX))}
    ):
        if name.startswith(f"{attempt}-g"):
            path = f"{folder}/{name}"
            try:
                yield read_metadata(store, path, MAX_METADATA_BYTES, parity_group_parser(path), on_repair)
            except (CorruptCheckpointError, OSError, EOFError) as error:
                on_lost(path, str(error))


def _primary_name(name: str) -> str:
    return name.replace(_REPLICA_SUFFIX, _SUFFIX)


def parity_group_parser(path: str) -> MetadataParser[ParityGroup]:
    """A parser for a group: it must have its own root hash, and belong in this file."""

    def parse(text: bytes, where: str) -> ParityGroup:
        group = parse_metadata(ParityGroup, text, where)
        verify_root_hash(text, group.root, where)
        if group.path != path:
            raise CorruptCheckpointError(f"{where} must be of {path}, but is of {group.path}")
        return group

    return parse


def find_corrupt_blocks(store: Store, group: ParityGroup) -> list[str]:
    """What is wrong with the parity blocks that are not as written."""
    wrong: list[str] = []
    for number, block in enumerate(group.blocks):
        path = f"{step_folder(group.step)}/{parity_block_name(group.attempt, group.group, number)}"
        try:
            if (size := store.size(path)) != group.length:
                raise EOFError(f"it must have {group.length} bytes, but has {size}")
            for piece, crc in enumerate(block.crc32c):
                at = piece * CRC_BLOCK_BYTES
                content = memoryview(bytearray(min(CRC_BLOCK_BYTES, group.length - at)))
                store.read_into(path, at, content)
                if (found := crc32c(content)) != crc:
                    raise EOFError(f"crc32c from byte {at} must be {crc:08x}, but is {found:08x}")
        except (OSError, EOFError) as error:
            wrong.append(f"{store.name}/{path}: parity block is corrupt: {error}")
    return wrong


def _no_replicas(path: str) -> Iterable[Store]:
    return ()


def reconstruct_candidates(
    store: Store, replicas: ReplicaLookup, path: str, at: int, length: int
) -> Iterator[bytearray]:
    """Candidates for bytes of a pack, computed from the others of its group and parity; the likeliest first."""
    folder, _, pack = path.rpartition("/")
    group = _group(store, folder, pack)
    if group is None:
        return
    count = len(group.members)
    wanted = next(number for number, member in enumerate(group.members) if member.pack == pack)
    known: dict[int, bytes] = {}
    for number, member in enumerate(group.members):
        if number != wanted and (
            found := _read_padded_or_none(store, replicas, f"{folder}/{member.pack}", member.bytes, at, length)
        ):
            known[number] = found
    for number in range(len(group.blocks)):
        block = f"{folder}/{parity_block_name(group.attempt, group.group, number)}"
        if found := _read_padded_or_none(store, replicas, block, group.length, at, length):
            known[count + number] = found
    # One of the others may be corrupt at the same offset: omit none, then one, as far as parity allows.
    for num_omitted in range(len(known) - count + 1):
        for omitted in combinations(sorted(known), num_omitted):
            used = {number: block for number, block in known.items() if number not in omitted}
            yield bytearray(reconstruct(used, count, len(group.blocks), length)[wanted])


def _group(store: Store, folder: str, pack: str) -> ParityGroup | None:
    step, attempt = int(folder.partition("-")[2]), pack.partition("-")[0]
    groups = read_parity_groups(store, step, attempt, lambda line: None, lambda path, message: None)
    return next((group for group in groups if any(member.pack == pack for member in group.members)), None)


def _read_padded_or_none(
    store: Store, replicas: ReplicaLookup, path: str, size: int, at: int, length: int
) -> bytes | None:
    try:
        return bytes(_read_padded(store, replicas, path, size, at, length))
    except (OSError, EOFError):
        return None


def _read_padded(store: Store, replicas: ReplicaLookup, path: str, size: int, at: int, length: int) -> bytearray:
    """Bytes of a file from the nearest replica, zeros after its end."""
    content = bytearray(length)
    inside = max(0, min(size, at + length) - at)
    if inside:
        into = memoryview(content)[:inside]
        for replica in replicas(path):
            try:
                replica.read_into(path, at, into)
            except (OSError, EOFError):
                continue
            return content
        store.read_into(path, at, into)
    return content


def _group_path(step: int, attempt: str, group: int) -> str:
    return f"{step_folder(step)}/{attempt}-g{group:06d}{_SUFFIX}"


def parity_block_name(attempt: str, group: int, number: int) -> str:
    """Name of a parity block."""
    return f"{attempt}-g{group:06d}-{number}.parity"

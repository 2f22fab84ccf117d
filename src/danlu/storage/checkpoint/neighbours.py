"""The memory of other hosts: one of them keeps a copy of this host's newest packs, and any rank reads what any holds.

Every host serves the folder in its memory where saves are staged; a process that died leaves what it had there, and the
next one on that host serves it again. Which host holds which pack is told through the book in which the ranks of a run
find each other, so that nobody keeps a list of all.
"""

import secrets
import socket
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from danlu.storage.checkpoint.commit import folder_of
from danlu.storage.local_store import LocalStore
from danlu.storage.peer_store import PeerServer, PeerStore
from danlu.storage.store import Buffer, Store

_TOKEN_BYTES = 32


class Book(Protocol):
    """Where ranks leave each other notes: a store of `torch.distributed`."""

    def set(self, key: str, value: str) -> None:
        """Write a note."""
        ...

    def get(self, key: str) -> bytes:
        """Read a note, once it is there."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all these notes are there."""
        ...


def hosts_of(local_ranks: Sequence[int], rank: int) -> tuple[int, int]:
    """This rank's host, by number, and how many there are; a host's first rank has local rank 0."""
    leaders = [other for other, local in enumerate(local_ranks) if local == 0]
    return bisect_right(leaders, rank) - 1, len(leaders)


def partner_of(host: int, hosts: int) -> int | None:
    """The host that keeps this one's copies: half of all hosts away, so in another rack where there are several."""
    return None if hosts < 2 else (host + hosts // 2) % hosts


def own_address(meeting_point: str) -> str:
    """This host's address on the network over which it reaches the meeting point of the run."""
    host, _, port = meeting_point.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing; the system chooses an interface
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


class Neighbours:
    """Other hosts, as one rank sees them."""

    def __init__(self, book: Book, staging: Path, host: int, hosts: int, address: str, *, leader: bool) -> None:
        """The leader of a host serves its memory; all ranks of all hosts make one of these at the same time."""
        self._book = book
        self._memory = LocalStore(staging)
        self._token = _shared_token(book, first=host == 0 and leader)
        self._server = PeerServer(self._memory, self._token, address) if leader else None
        if self._server is not None:
            book.set(f"host/{host}", self._server.address)
        self._host, self._partner = host, partner_of(host, hosts)
        self._stores: dict[str, PeerStore] = {}
        self._pushed = ""

    @property
    def partner(self) -> Store | None:
        """The memory that takes copies of this rank's packs."""
        return None if self._partner is None else self._store(self._book.get(f"host/{self._partner}").decode())

    def push(self, path: str, parts: Iterable[Buffer]) -> None:
        """Put a pack into the partner's memory, in place of the one before it."""
        partner = self.partner
        if partner is None:
            return
        partner.write(path, parts)
        if self._pushed and self._pushed != path:
            partner.remove(self._pushed.rpartition("/")[0] if _alone(partner, self._pushed) else self._pushed)
        self._pushed = path

    def announce(self, step: int) -> None:
        """Tell which packs of a step lie in this host's memory; all ranks meet before anyone looks."""
        if self._server is not None:
            for name in self._memory.list(folder_of(step)):
                if name.endswith(".pack"):
                    self._book.set(f"pack/{step}/{name}/{self._host % 2}", self._server.address)

    def holders(self, path: str) -> list[Store]:
        """Memories of other hosts that have said they hold a pack."""
        folder, _, name = path.rpartition("/")
        keys = [f"pack/{int(folder.removeprefix('step-'))}/{name}/{half}" for half in (0, 1)]
        mine = self._server.address if self._server is not None else ""
        found = [self._book.get(key).decode() for key in keys if self._book.check([key])]
        return [self._store(address) for address in found if address != mine]

    def close(self) -> None:
        """Serve no longer."""
        for store in self._stores.values():
            store.close()
        if self._server is not None:
            self._server.close()

    def _store(self, address: str) -> PeerStore:
        if address not in self._stores:
            self._stores[address] = PeerStore(address, self._token)
        return self._stores[address]


def _alone(store: Store, path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return store.list(folder) == [name]


def _shared_token(book: Book, *, first: bool) -> bytes:
    """The run's secret: made by one, read by all who can read the book."""
    if first:
        book.set("token", secrets.token_hex(_TOKEN_BYTES))
    return bytes.fromhex(book.get("token").decode())

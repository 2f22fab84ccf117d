"""Replicas in the memory of other hosts: one keeps a copy of this host's newest packs, and any rank can read them.

Every host serves its staging folder; a dead process leaves its files there, and the next one on that host serves them
again. Which host has which pack is published in the run's rendezvous store, so that no rank keeps a list of all.
"""

import secrets
import socket
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from danlu.storage.checkpoint.commit import step_folder
from danlu.storage.store.base import Store
from danlu.storage.store.local_store import LocalStore
from danlu.storage.store.peer_store import PeerServer, PeerStore
from danlu.storage.store.safe_path import Buffer

_TOKEN_BYTES = 32


class KVStore(Protocol):
    """Key-value store shared by all ranks: a store of `torch.distributed`."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""
        ...

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""
        ...

    def check(self, keys: list[str]) -> bool:
        """Whether all these keys exist."""
        ...


def host_index_and_count(local_ranks: Sequence[int], rank: int) -> tuple[int, int]:
    """Index of this rank's host, and the number of hosts; a host's first rank has local rank 0."""
    leaders = [other for other, local in enumerate(local_ranks) if local == 0]
    return bisect_right(leaders, rank) - 1, len(leaders)


def replica_host(host: int, hosts: int) -> int | None:
    """The host that keeps this one's copies: half of all hosts away, so in another rack if there are several."""
    return None if hosts < 2 else (host + hosts // 2) % hosts


def local_address(endpoint: str) -> str:
    """This host's address on the network over which it reaches the rendezvous endpoint."""
    host, _, port = endpoint.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing; the system chooses an interface
        probe.connect((host, int(port)))
        return str(probe.getsockname()[0])


class PeerReplicas:
    """The other hosts, as seen by one rank."""

    def __init__(self, kv_store: KVStore, staging: Path, host: int, hosts: int, address: str, *, leader: bool) -> None:
        """The leader of a host serves its memory; all ranks of all hosts construct this at the same time."""
        self._kv_store = kv_store
        self._memory = LocalStore(staging)
        self._token = _shared_token(kv_store, first=host == 0 and leader)
        self._server = PeerServer(self._memory, self._token, address) if leader else None
        if self._server is not None:
            kv_store.set(f"host/{host}", self._server.address)
        self._host, self._partner = host, replica_host(host, hosts)
        self._stores: dict[str, PeerStore] = {}
        self._pushed = ""

    @property
    def replica_store(self) -> Store | None:
        """The store that receives copies of this rank's packs."""
        return None if self._partner is None else self._store(self._kv_store.get(f"host/{self._partner}").decode())

    def push(self, path: str, parts: Iterable[Buffer]) -> None:
        """Write a pack to the partner's memory, and remove the previous one."""
        partner = self.replica_store
        if partner is None:
            return
        partner.write(path, parts)
        if self._pushed and self._pushed != path:
            partner.remove(self._pushed.rpartition("/")[0] if _is_only_file(partner, self._pushed) else self._pushed)
        self._pushed = path

    def announce_packs(self, step: int) -> None:
        """Publish which packs of a step are in this host's memory; needs a barrier before any rank looks."""
        if self._server is not None:
            for name in self._memory.list(step_folder(step)):
                if name.endswith(".pack"):
                    self._kv_store.set(f"pack/{step}/{name}/{self._host % 2}", self._server.address)

    def stores_with(self, path: str) -> list[Store]:
        """Stores of other hosts that announced a pack."""
        folder, _, name = path.rpartition("/")
        keys = [f"pack/{int(folder.removeprefix('step-'))}/{name}/{half}" for half in (0, 1)]
        mine = self._server.address if self._server is not None else ""
        found = [self._kv_store.get(key).decode() for key in keys if self._kv_store.check([key])]
        return [self._store(address) for address in found if address != mine]

    def close(self) -> None:
        """Close connections and stop serving."""
        for store in self._stores.values():
            store.close()
        if self._server is not None:
            self._server.close()

    def _store(self, address: str) -> PeerStore:
        if address not in self._stores:
            self._stores[address] = PeerStore(address, self._token)
        return self._stores[address]


def _is_only_file(store: Store, path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return store.list(folder) == [name]


def _shared_token(kv_store: KVStore, *, first: bool) -> bytes:
    """The run's secret: generated by one rank, readable by every process that reaches the key-value store."""
    if first:
        kv_store.set("token", secrets.token_hex(_TOKEN_BYTES))
    return bytes.fromhex(kv_store.get("token").decode())

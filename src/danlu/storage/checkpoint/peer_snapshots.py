"""Snapshots in the memory of other hosts: one host keeps copies for another, and whoever needs one finds it.

Which host has what is published in the run's rendezvous store, by what a snapshot is of: a rank whose host is lost
reads the copy that was sent away, or the snapshot of a rank that holds the same shards.
"""

import json
import threading
from collections.abc import Iterable
from itertools import product

from danlu.storage.checkpoint.peer_hosts import PeerHosts

_COPIES = "copies"
_BLOCK_BYTES = 64 << 20


class PeerSnapshots:
    """The snapshots of other hosts, and the copies that this rank sends to one of them."""

    def __init__(self, hosts: PeerHosts, rank: int) -> None:
        """`hosts` serve the folders of their ranks' snapshots."""
        self._hosts, self._rank = hosts, rank
        self._thread: threading.Thread | None = None
        self.error = ""
        """Why the newest copy did not arrive; empty if it did, or is under way."""

    @property
    def is_sending(self) -> bool:
        """Whether a copy is under way."""
        return self._thread is not None and self._thread.is_alive()

    def send(self, signature: bytes, number: int, snapshot: memoryview, keep: int) -> None:
        """Copy a snapshot to another host, in the background; the copy of number `keep` stays there, others go."""
        self.error = ""
        self._thread = threading.Thread(
            target=self._send, args=(signature, number, snapshot, keep), name="danlu-copies", daemon=True
        )
        self._thread.start()

    def _send(self, signature: bytes, number: int, snapshot: memoryview, keep: int) -> None:
        try:
            partner = self._hosts.partner
            assert partner is not None  # there are several hosts
            for name in partner.list(_COPIES):
                rank, _, copied = name.split("-")
                if int(rank) == self._rank and int(copied) != keep:
                    partner.remove(f"{_COPIES}/{name}")
            partner.write(f"{_COPIES}/{self._rank:06d}-{signature.hex()}-{number}", [snapshot])
        except (OSError, ValueError, RuntimeError) as error:  # of the run's store too: the other host may be gone
            self.error = str(error) or type(error).__name__

    def announce(self, files: Iterable[tuple[bytes, int, str]]) -> None:
        """Publish which snapshots are in this host's memory; needs a barrier before any rank looks.

        `files` are those of the host's ranks, whatever their numbers are now: signature, number, and name.
        """
        if not self._hosts.is_leader:
            return
        found: dict[str, dict[int, str]] = {}
        half = self._hosts.host % 2
        for signature, number, name in files:
            found.setdefault(f"own/{signature.hex()}/{half}", {})[number] = name
        for name in self._hosts.memory.list(_COPIES):
            _, of, copied = name.split("-")
            found.setdefault(f"copy/{of}/{half}", {})[int(copied)] = f"{_COPIES}/{name}"
        for key, names in found.items():
            self._hosts.kv_store.set(key, json.dumps([self._hosts.address, names]))

    def find(self, signature: bytes) -> dict[int, tuple[str, str]]:
        """Announced snapshots of these shards by number: the host that has one, and the file.

        Many hosts may have some, if the shards have replicas; of each kind, two are remembered.
        """
        found: dict[int, tuple[str, str]] = {}
        for kind, half in product(("copy", "own"), range(2)):
            key = f"{kind}/{signature.hex()}/{half}"
            if self._hosts.kv_store.check([key]):
                address, files = json.loads(self._hosts.kv_store.get(key))
                found |= {int(number): (str(address), str(path)) for number, path in files.items()}
        return found

    def read_into(self, place: tuple[str, str], into: memoryview) -> None:
        """Read a snapshot that was found; raises `OSError`."""
        address, path = place
        store = self._hosts.store(address)
        size = min(store.size(path), len(into))
        for at in range(0, size, _BLOCK_BYTES):
            store.read_into(path, at, into[at : min(at + _BLOCK_BYTES, size)])

    def close(self) -> None:
        """Stop serving, and end what is under way."""
        self._hosts.close()
        if self._thread is not None:
            self._thread.join()

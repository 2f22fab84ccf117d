"""Replicas in the memory of other hosts: one keeps a copy of this host's newest packs, and any rank can read them.

Every host serves its staging folder; a dead process leaves its files there, and the next one on that host serves them
again. Which host has which pack is published in the run's rendezvous store, so that no rank keeps a list of all.
"""

from collections.abc import Iterable

from danlu.storage.checkpoint.commit import step_folder
from danlu.storage.checkpoint.peer_hosts import PeerHosts
from danlu.storage.store.base import Store
from danlu.storage.store.safe_path import Buffer


class PeerReplicas:
    """Packs in the memory of other hosts, as seen by one rank."""

    def __init__(self, hosts: PeerHosts) -> None:
        """`hosts` serve their staging folders."""
        self._hosts = hosts
        self._pushed = ""

    @property
    def replica_store(self) -> Store | None:
        """The store that receives copies of this rank's packs."""
        return self._hosts.partner

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
        hosts = self._hosts
        if hosts.is_leader:
            for name in hosts.memory.list(step_folder(step)):
                if name.endswith(".pack"):
                    hosts.kv_store.set(f"pack/{step}/{name}/{hosts.host % 2}", hosts.address)

    def stores_with(self, path: str) -> list[Store]:
        """Stores of other hosts that announced a pack."""
        folder, _, name = path.rpartition("/")
        kv_store = self._hosts.kv_store
        keys = [f"pack/{int(folder.removeprefix('step-'))}/{name}/{half}" for half in (0, 1)]
        mine = self._hosts.address if self._hosts.is_leader else ""
        found = [kv_store.get(key).decode() for key in keys if kv_store.check([key])]
        return [self._hosts.store(address) for address in found if address != mine]

    def close(self) -> None:
        """Close connections and stop serving."""
        self._hosts.close()


def _is_only_file(store: Store, path: str) -> bool:
    folder, _, name = path.rpartition("/")
    return store.list(folder) == [name]

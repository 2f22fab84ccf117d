"""Between the loop and the snapshots: when to take one, and how a state is restored from them."""

import struct
from collections.abc import Callable
from math import isfinite, nan
from pathlib import Path
from typing import Self

from danlu.comm.world import World
from danlu.framework.replica_vote import ReplicaVote
from danlu.framework.state import TrainState
from danlu.parallel.replica_shards import is_sharded_over_replicas
from danlu.spec.resilience import ResilienceConfig
from danlu.storage.checkpoint.memory_snapshots import SLOTS, RankSnapshots
from danlu.storage.checkpoint.peer_snapshots import PeerSnapshots
from danlu.storage.store.checksum import crc32c


class StateSnapshots:
    """The newest states of this rank in its host's memory, and now and then in that of another."""

    def __init__(
        self,
        snapshots: RankSnapshots,
        world: World,
        config: ResilienceConfig,
        peers: PeerSnapshots | None,
        vote: ReplicaVote | None,
        warn: Callable[[str], None],
    ) -> None:
        self._snapshots, self._world, self._config, self._peers, self._warn = snapshots, world, config, peers, warn
        self._vote = vote
        self._gradients = 0
        """Checksum of what this rank contributed to the norms of all gradients so far."""
        self._sent = self._arrived = 0
        """Numbers of the newest snapshots that were sent to another host, and that have arrived from all ranks."""
        self._is_late = False

    @classmethod
    def open(
        cls,
        folder: Path,
        state: TrainState,
        world: World,
        config: ResilienceConfig,
        peers: PeerSnapshots | None,
        vote: ReplicaVote | None,
        warn: Callable[[str], None],
    ) -> Self | None:
        """For a state such as this; None on all ranks if a host of any has no memory for them.

        Called by all ranks together.
        """
        snapshots, error = None, None
        slots = SLOTS + 2 if peers is not None and config.peers else SLOTS
        try:
            snapshots = RankSnapshots(folder, world.rank, state.tensors(), slots)
        except OSError as found:
            error = found
        if world.any_rank(error is not None):
            if snapshots is not None:
                snapshots.close()
            if peers is not None:
                peers.close()
            warn(
                f"no snapshots of the state are kept in memory ({error or 'another rank has none'}): a fault costs "
                "the steps since the last checkpoint; free memory of /dev/shm, or set `resilience.snapshots` to 0"
            )
            return None
        assert snapshots is not None
        return cls(snapshots, world, config, peers, vote, warn)

    def take_if_due(self, state: TrainState, local_square: float) -> None:
        """Keep the state as it is now, every so many steps, if replicas agree about it.

        They must agree about their gradients too: one that is wrong changes the norm, by which all of them clip, or
        skip the step, and their states would be equal and wrong.
        """
        finite = local_square if isfinite(local_square) else nan  # there are many ways not to be a number
        self._gradients = crc32c(struct.pack("<d", finite), self._gradients)
        if state.step % self._config.snapshots:
            return
        self._snapshots.take(state.tensors(), state.scalars())
        if self._vote is not None:
            unlike = state.model_tensors().keys() - {f"model.{name}" for name, _ in state.named_parameters()}
            unlike |= {name for name, tensor in state.tensors().items() if is_sharded_over_replicas(tensor)}
            if wrong := self._vote.check(self._snapshots.checksum(besides=unlike) ^ self._gradients, state.step):
                self._snapshots.drop_newest()  # what all ranks go back to is the one before, which was voted for
                raise RuntimeError(wrong)  # none of Danlu's own errors: a run that meets one of those ends
        if self._peers is not None and self._sends and (not self._sent or state.step % self._config.peers == 0):
            self._send(self._peers)

    @property
    def _sends(self) -> bool:
        """Whether copies are sent to another host: only then are there slots for those that are kept."""
        return self._peers is not None and self._config.peers > 0

    def _send(self, peers: PeerSnapshots) -> None:
        """Send the newest snapshot to another host, unless any rank still sends the one before.

        All ranks send the same ones: a state is of use only if every rank has its part of it.
        """
        late, failed = self._world.any_rank_each([peers.is_sending, bool(peers.error)])
        if late:
            if not self._is_late and self._world.rank == 0:
                self._warn(
                    f"copying the state to another host takes longer than {self._config.peers} steps: copies are left "
                    "out, and a lost host costs more steps; set `resilience.peers` to more"
                )
            self._is_late = True
            return
        if peers.error:
            self._warn(f"the state was not copied to another host: {peers.error}")
        if self._sent and not failed:
            self._arrived = self._sent
        self._sent = self._snapshots.taken
        self._snapshots.kept = (self._arrived, self._sent)
        peers.send(self._snapshots.signature, self._sent, self._snapshots.newest(), keep=self._arrived)

    def restore(self, state: TrainState) -> bool:
        """Go back to the newest state that every rank can have; whether there is one. Called by all ranks together."""
        scalars = self._snapshots.restore(state.tensors(), self._world, self._peers)
        if self._snapshots.fetch_error:
            self._warn(f"a snapshot in the memory of another host was not read, {self._snapshots.fetch_error}")
        if scalars is None:
            return False
        state.restore_scalars(scalars)
        if self._sends:
            self._arrived = self._snapshots.taken  # it may be in other hosts' memory: stays until a newer one is
            self._snapshots.kept = (self._arrived,)
        return True

    def close(self) -> None:
        """Let go of the memory, which stays for whoever comes next."""
        if self._peers is not None:
            self._peers.close()
        self._snapshots.close()

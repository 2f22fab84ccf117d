"""Between the loop and the snapshots: when to take one, and how a state is restored from them."""

from collections.abc import Callable
from pathlib import Path
from typing import Self

from danlu.comm.world import World
from danlu.framework.state import TrainState
from danlu.storage.checkpoint.memory_snapshots import RankSnapshots


class StateSnapshots:
    """The newest states of this rank in its host's memory."""

    def __init__(self, snapshots: RankSnapshots, every: int) -> None:
        self._snapshots, self._every = snapshots, every

    @classmethod
    def open(
        cls, folder: Path, state: TrainState, world: World, every: int, warn: Callable[[str], None]
    ) -> Self | None:
        """For a state such as this, every so many steps; None on all ranks if a host of any has no memory for them.

        Called by all ranks together.
        """
        snapshots, error = None, None
        try:
            snapshots = RankSnapshots(folder, world.rank, state.tensors())
        except OSError as found:
            error = found
        if world.any_rank(error is not None):
            if snapshots is not None:
                snapshots.close()
            warn(
                f"no snapshots of the state are kept in memory ({error or 'another rank has none'}): a fault costs "
                "the steps since the last checkpoint; free memory of /dev/shm, or set `resilience.snapshots` to 0"
            )
            return None
        assert snapshots is not None
        return cls(snapshots, every)

    def take_if_due(self, state: TrainState) -> None:
        """Keep the state as it is now, every so many steps."""
        if state.step % self._every == 0:
            self._snapshots.take(state.tensors(), state.scalars())

    def restore(self, state: TrainState, world: World) -> bool:
        """Go back to the newest state that every rank has; whether there is one. Called by all ranks together."""
        scalars = self._snapshots.restore(state.tensors(), world)
        if scalars is None:
            return False
        state.restore_scalars(scalars)
        return True

    def close(self) -> None:
        """Let go of the memory, which stays for whoever comes next."""
        self._snapshots.close()

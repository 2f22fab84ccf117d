"""The checkpoints of one run: all ranks save and load together, with what each holds.

A save is a copy into host memory, for which the training waits, and an upload to the store, for which it does not.
A store that fails, fills up or is slow costs a checkpoint and an event, never the run.
"""

import errno
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from danlu.comm.world import World
from danlu.storage.checkpoint.async_saver import STAGING_BUFFERS, AsyncSaver, RunningSave, SavePolicy, SaveResult
from danlu.storage.checkpoint.checkpoint_dir import CheckpointDir
from danlu.storage.checkpoint.commit import CheckpointSaveError, step_folder
from danlu.storage.checkpoint.host_memory import reclaim_dead_runs, staging_folder, store_hash
from danlu.storage.checkpoint.local_shards import LocalShard, assign_writers, local_shards, write_set_words
from danlu.storage.checkpoint.manifest import CorruptCheckpointError
from danlu.storage.checkpoint.peer_hosts import KVStore, PeerHosts
from danlu.storage.checkpoint.peer_replicas import PeerReplicas
from danlu.storage.checkpoint.reader import CheckpointReader, CheckpointUnavailableError
from danlu.storage.checkpoint.restore import fill_tensors
from danlu.storage.checkpoint.scrub import Scrubber
from danlu.storage.checkpoint.staging import PackPlan
from danlu.storage.store.base import Store, open_store

SAVE_TIMEOUT = 600.0
"""Seconds a writer waits for the leaves of others, and a run at its end for its last save."""
_BUSY_BIT, _NO_FAILURE = 1 << 32, -1
_POLL = 0.02
_TIMEOUT_GRACE = 10.0


@dataclass(frozen=True)
class LoadVerification:
    """Proof that tensors are bit for bit what was saved, by fingerprints that do not depend on the layout."""

    step: int
    saved_layout: Mapping[str, int]
    """Size of every axis when it was saved."""
    tensors_verified: int
    """Tensors that were compared; none differs."""
    tensors_saved: int
    """Tensors in the checkpoint."""
    bytes: int


class CheckpointEngine:
    """The checkpoints in one store.

    `save`, `async_save`, `wait_for_saves`, `load` and `close` are called by all ranks together.
    """

    def __init__(
        self,
        store: Store,
        keep: int,
        world: World,
        *,
        staging: Path,
        layout: Mapping[str, int] | None = None,
        timeout: float = SAVE_TIMEOUT,
        policy: SavePolicy | None = None,
    ) -> None:
        """The ranks of `world` save and load together; `staging` is a folder in this host's memory."""
        self.store = store
        self.checkpoint_dir = CheckpointDir(store, keep)
        self.layout = dict(layout or {})
        self.timeout = timeout
        self.repairs: list[str] = []
        """What was found corrupt while loading, and read from a replica or parity."""
        self.world = world
        """All ranks that save and load together."""
        self.bytes_by_store: Mapping[str, int] = {}
        """Bytes of the last load on this rank, by the store they came from."""
        self._scrubber: Scrubber | None = None
        self._staging = staging
        self._saver = AsyncSaver(store, keep, staging, self.world.rank, timeout, policy or SavePolicy())

    def latest_step(self) -> int | None:
        """The newest complete and finite checkpoint, or None, as seen by rank 0: another rank's file system may lag."""
        newest = self.world.broadcast_int(lambda: max(self.checkpoint_dir.resumable_steps(), default=-1))
        return None if newest < 0 else newest

    def step_before(self, at_most: int) -> int | None:
        """The newest such checkpoint of step `at_most` or earlier, the oldest if all are later, None if there is none.

        As seen by rank 0.
        """

        def chosen() -> int:
            steps = self.checkpoint_dir.resumable_steps()
            return max((step for step in steps if step <= at_most), default=min(steps, default=-1))

        step = self.world.broadcast_int(chosen)
        return None if step < 0 else step

    def discard_after(self, step: int) -> None:
        """Delete every later checkpoint, which the run no longer continues; no save may be running.

        Raises `CheckpointSaveError` on all ranks if the store fails.
        """
        failure = ""
        if self.world.rank == 0:
            try:
                self._saver.checkpoint_dir.remove_after(step)
            except OSError as error:
                failure = f"{type(error).__name__}: {error}"
        if self.world.any_rank(bool(failure)):
            raise CheckpointSaveError(
                f"{self.store.name}: checkpoints after step {step} must be deleted, because the run went back to it, "
                f"but could not be{f': {failure}' if failure else ''}; resume when the store works"
            )
        self._saver.forget_after(step)

    def allocate_staging(self, tensors: Mapping[str, Tensor], *, first_on_host: bool = True) -> int:
        """Allocate the staging memory, so that the first save is as fast as the others; returns the bytes of a save.

        Load first: this discards copies that an earlier process left in memory. What other dead runs left on this host
        is freed by one rank, with a warning, after `RESUME_GRACE_SECONDS`; at once if there is not enough memory.
        """
        plan = PackPlan.from_shards(self._local_shards(tensors))
        if first_on_host:
            self._saver.warnings += map(str, reclaim_dead_runs(self._staging))
        try:
            self._saver.buffers.allocate(plan.bytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            self._saver.warnings += map(str, reclaim_dead_runs(self._staging, older_than=0.0))
            self._saver.buffers.allocate(plan.bytes)
        return plan.bytes

    def save(self, step: int, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> SaveResult:
        """Write a checkpoint and wait until it is complete on all ranks; `CheckpointSaveError` if that fails."""
        self.wait_for_saves()
        earlier = self.pop_results()
        self.async_save(step, tensors, scalars)
        self.wait_for_saves()
        (result,) = self.pop_results()
        for each in earlier:
            self._saver.add_result(each)
        if self.world.any_rank(bool(result.error)):
            raise CheckpointSaveError(result.error or f"{result.path} could not be saved by another rank")
        return result

    def async_save(
        self, step: int, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any], *, overlap: bool = False
    ) -> bool:
        """Copy the state into host memory and write it in the background; False if no staging buffer is free.

        With `overlap` the copy runs in the background too: call `wait_for_staging` before a tensor changes.
        """
        began = time.perf_counter()
        self.wait_for_staging()
        agreed = self._agree_on_attempt(local_shards(tensors))
        if agreed is None:
            seconds = time.perf_counter() - began
            failure = f"skipped: all {STAGING_BUFFERS} staging buffers are still uploading on some rank"
            self._saver.add_result(SaveResult(step, "", seconds, seconds, 0, failure))
            return False
        attempt, mine = agreed
        plan = PackPlan.from_shards(mine)
        root = {"scalars": dict(scalars), "layout": self.layout, "written": time.time()}
        buffer = self._saver.buffers.acquire(plan.bytes)
        save = RunningSave(step, attempt, self.world.rank, self.world.size, plan, root, began, buffer)
        self._saver.start(save, tensors)
        if not overlap:
            self.wait_for_staging()
        save.stall = time.perf_counter() - began
        return True

    def wait_for_staging(self) -> float:
        """Wait until tensors may change again; returns the seconds waited."""
        return self._saver.wait_for_staging()

    def pop_results(self) -> list[SaveResult]:
        """Saves that ended since the last call."""
        return self._saver.pop_results()

    def wait_for_saves(self) -> None:
        """Wait until no rank has a running save. One that failed on any rank is given up on all."""
        self.wait_for_staging()
        deadline = time.monotonic() + self.timeout
        while True:
            late = time.monotonic() > deadline
            busy, failed, late = self.world.any_rank_each(
                [self._saver.busy, bool(self._saver.first_failed_attempt), late]
            )
            if failed:
                self._saver.cancel_attempts(
                    _attempts(word for (word,) in self.world.all_gather_ints([self._failed_attempt()]))
                )
            if late:
                self._saver.cancel_attempts()
            if not busy:
                break
            if self.world.any_rank(time.monotonic() > deadline + _TIMEOUT_GRACE):
                raise CheckpointSaveError(f"{self.store.name} did not finish a save within {self.timeout:g} s")
            time.sleep(_POLL)
        self._purge_stale(min(verified for (verified,) in self.world.all_gather_ints([self._saver.verified_step])))
        self._saver.wait_for_purge()
        self.world.any_rank(False)  # a barrier: old checkpoints are gone for every rank

    def start_scrubbing(self, seconds: float) -> None:
        """From now on, every so many seconds, read this rank's share of kept checkpoints again in idle time."""
        busy, report = (lambda: self._saver.busy), (lambda line: self._saver.warnings.append(line))
        self._scrubber = Scrubber(self.checkpoint_dir, self.world.rank, self.world.size, seconds, busy, report)
        self._scrubber.start()

    @property
    def policy(self) -> SavePolicy:
        """What saves may cost, and what they must survive."""
        return self._saver.policy

    @property
    def has_peer_replicas(self) -> bool:
        """Whether another host's memory keeps a copy of this host's last save."""
        return self._saver.peer_replicas is not None

    def enable_peer_replicas(self, kv_store: KVStore, local_rank: int, endpoint: str) -> None:
        """From now on, keep copies in another host's memory and read from any.

        `endpoint` is the `host:port` of the run's rendezvous: copies are sent over the same network.
        """
        hosts = PeerHosts.find(self.world, kv_store, self._staging, local_rank, endpoint)
        if hosts is None:
            self._saver.warnings.append(
                "`checkpoint.peers` asks for copies in another host's memory, but there is only one host"
            )
            return
        self._saver.peer_replicas = PeerReplicas(hosts)

    def pop_warnings(self) -> list[str]:
        """Warnings since the last call, besides how saves ended."""
        warnings, self._saver.warnings = self._saver.warnings, []
        return warnings

    def load(self, step: int, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], LoadVerification]:
        """Fill `tensors` in place, whatever layout wrote them; returns the scalars and the verification.

        Every chunk is verified against the hash taken when it was saved. Raises `CorruptCheckpointError` on all ranks
        if one is corrupt on any, and `CheckpointUnavailableError` if the store failed: a retry may succeed.
        """
        mine = self._local_shards(tensors)
        if self._saver.peer_replicas is not None:
            self._saver.peer_replicas.announce_packs(step)
            self.world.any_rank(False)  # a barrier: all ranks have announced before any rank looks
        corrupt, unavailable = "", ""
        try:
            reader = CheckpointReader(self.store, step, self._saver.replicas)
            sums = fill_tensors(reader, tensors, mine)
            self.repairs += reader.repairs
            self.bytes_by_store = reader.bytes_by_store
        except (CorruptCheckpointError, EOFError) as error:  # the other ranks wait: they must be informed
            corrupt = str(error)
        except OSError as error:
            unavailable = str(error)
        any_corrupt, any_unavailable = self.world.any_rank_each([bool(corrupt), bool(unavailable)])
        where = f"{self.store.name}/{step_folder(step)}"
        if any_corrupt:
            raise CorruptCheckpointError(corrupt or f"{where} is corrupt where another rank read it")
        if any_unavailable:
            raise CheckpointUnavailableError(unavailable or f"{where} cannot be read by another rank")
        proof = self._verify_fingerprints(reader, tensors, sums)
        if not reader.repairs:
            self._saver.verified_step = step
        return dict(reader.manifest.scalars), proof

    def load_full(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Fill full tensors in place, in a process that is no rank; only what is requested is read.

        Verified like a load: `CorruptCheckpointError` if a tensor is not the one that was saved.
        """
        reader = CheckpointReader(self.store, step)
        sums = fill_tensors(reader, tensors, local_shards(tensors))
        saved = reader.manifest.tensors
        self._raise_on_mismatch(
            reader, [name for name in tensors if sums.get(name, 0) != saved[name].fingerprint], len(tensors)
        )

    def close(self) -> None:
        """Wait for running saves, stop the background threads and free the memory."""
        if self._scrubber is not None:
            self._scrubber.close()
        try:
            self.wait_for_saves()
        finally:
            self._saver.abort()

    def abort(self) -> None:
        """Free the memory at once, without the other ranks; a running save is given up."""
        if self._scrubber is not None:
            self._scrubber.close()
        self._saver.cancel_attempts()
        self._saver.abort()

    def _agree_on_attempt(self, mine: Sequence[LocalShard]) -> tuple[str, list[LocalShard]] | None:
        """The attempt's name, and the shards with their writers; None to skip this save."""
        drawn = random.SystemRandom().getrandbits(32) | (_BUSY_BIT if self._saver.buffers.exhausted else 0)
        words = self.world.all_gather_ints(
            [drawn, self._failed_attempt(), self._saver.verified_step, *write_set_words(mine)]
        )
        self._saver.cancel_attempts(_attempts(failure for _, failure, *_ in words))
        self._purge_stale(min(verified for _, _, verified, *_ in words))
        if any(word & _BUSY_BIT for word, *_ in words):
            return None
        held = (held for _, _, _, *held in words[: self.world.rank])
        return f"{words[0][0] & (_BUSY_BIT - 1):08x}", assign_writers(mine, held)

    def _purge_stale(self, verified: int) -> None:
        """Delete older checkpoints, now that every rank has verified its pack of this one."""
        if self.world.rank == 0 and verified >= 0:
            self._saver.purge_stale(verified)

    def _failed_attempt(self) -> int:
        """An attempt that failed here, as a number for the other ranks."""
        return int(self._saver.first_failed_attempt, 16) if self._saver.first_failed_attempt else _NO_FAILURE

    def _local_shards(self, tensors: Mapping[str, Tensor]) -> list[LocalShard]:
        """The shards of this rank; called by all ranks."""
        mine = local_shards(tensors)
        return assign_writers(mine, self.world.all_gather_ints(write_set_words(mine))[: self.world.rank])

    def _verify_fingerprints(
        self, reader: CheckpointReader, tensors: Mapping[str, Tensor], sums: Mapping[str, int]
    ) -> LoadVerification:
        """Add up the fingerprints of all ranks and compare them with the manifest's."""
        saved = reader.manifest.tensors
        held = self.world.any_rank_each([name in tensors for name in saved])
        found = [word % 2**64 for word in self.world.all_reduce_ints([sums.get(name, 0) for name in saved])]
        triples = zip(saved.items(), found, held, strict=True)
        differing = [name for (name, tensor), total, asked in triples if asked and total != tensor.fingerprint]
        self._raise_on_mismatch(reader, differing, sum(held))
        return LoadVerification(
            reader.manifest.step, reader.manifest.layout, sum(held), len(held), reader.manifest.bytes
        )

    def _raise_on_mismatch(self, reader: CheckpointReader, differing: Sequence[str], of: int) -> None:
        """Raise `CorruptCheckpointError` if tensors differ from those saved, although every chunk is intact."""
        if differing:
            raise CorruptCheckpointError(
                f"{self.store.name}/{reader.folder}: {', '.join(differing[:5])} must have the fingerprints that were "
                f"saved, but {len(differing)} of {of} tensors differ on the {self.world.size} ranks now"
            )


def _attempts(words: Iterable[int]) -> set[str]:
    return {f"{word:08x}" for word in words if word != _NO_FAILURE}


def open_checkpoint_engine(
    where: str | Path,
    keep: int,
    world: World,
    layout: Mapping[str, int] | None = None,
    policy: SavePolicy | None = None,
    options: Mapping[str, str] | None = None,
) -> CheckpointEngine:
    """The checkpoints in a folder or object store, with their own staging folder in this host's memory."""
    name = str(where) if "://" in str(where) else str(Path(where).resolve())
    staging = staging_folder(name)
    return CheckpointEngine(open_store(name, options), keep, world, staging=staging, layout=layout, policy=policy)


def local_copy_path(root: str, where: str) -> Path:
    """Folder for copies of this store's saves on a host's own disk, below `root`."""
    return Path(root).expanduser().resolve() / store_hash(where)

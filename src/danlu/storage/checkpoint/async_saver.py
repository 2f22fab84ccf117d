"""The background part of a save: copy into host memory, write, commit, protect; and how each save ended."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from danlu.storage.checkpoint.checkpoint_dir import CheckpointDir
from danlu.storage.checkpoint.commit import CheckpointSaveError, commit, pack_name, step_folder, wait_for_leaf
from danlu.storage.checkpoint.copying import pack_is_intact
from danlu.storage.checkpoint.manifest import (
    MANIFEST_FILE,
    Chunk,
    CorruptCheckpointError,
    Leaf,
    parse_manifest,
    replica_path,
)
from danlu.storage.checkpoint.pack_summary import split_buffer, summarize_pack
from danlu.storage.checkpoint.parity_groups import ParityMember, group_writers, parity_group_of_writer, write_parity
from danlu.storage.checkpoint.peer_replicas import PeerReplicas
from danlu.storage.checkpoint.reader import iter_chunks
from danlu.storage.checkpoint.staging import PackPlan, snapshot
from danlu.storage.checkpoint.staging_buffers import StagingBuffer, StagingBufferPool
from danlu.storage.store.base import Store
from danlu.storage.store.local_store import LocalStore
from danlu.storage.store.retrying_store import RetryingStore

_POLL_SECONDS = 1.0
STAGING_BUFFERS = 2
"""Buffers in host memory: one is filled while the other is uploaded."""


@dataclass(frozen=True)
class SaveResult:
    """How a save ended on this rank."""

    step: int
    path: str
    stall: float
    """Seconds the training waited."""
    seconds: float
    """From the request to the commit."""
    bytes: int
    """Written by this rank."""
    error: str = ""
    """Why it was not committed; empty if it was."""
    post_commit_error: str = ""
    """What went wrong after the commit, as a phrase that follows "but"."""


@dataclass(frozen=True)
class SavePolicy:
    """What saves may cost, and what they must survive."""

    parity: int = 0
    """So many packs of every `parity_group_size` may be lost or corrupt, and can still be read."""
    parity_group_size: int = 8
    retries: int = 0
    """Retries of failed calls to the store."""
    bandwidth: float = 0.0
    """Bytes per second that this rank may write; 0 is no limit."""
    local_copy_folder: Path | None = None
    """A folder on this host's own disk for a copy of the newest packs."""


@dataclass
class RunningSave:
    """One running save of this rank."""

    step: int
    attempt: str
    rank: int
    world_size: int
    plan: PackPlan
    manifest_fields: Mapping[str, Any]
    """Fields of the manifest that a tree node has not."""
    started_at: float
    buffer: StagingBuffer
    stall: float = 0.0
    chunks: Sequence[Sequence[Chunk]] = ()
    seconds: float = 0.0
    """From the request to the commit."""


class AsyncSaver:
    """Runs one save after the other in the background of the training."""

    def __init__(self, store: Store, keep: int, staging: Path, rank: int, timeout: float, policy: SavePolicy) -> None:
        self.warnings: list[str] = []
        """Warnings to report, besides how saves ended."""
        self._closing = False
        self.store = RetryingStore(
            store, policy.retries, policy.bandwidth, lambda: self._closing, lambda line: self.warnings.append(line)
        )
        self.checkpoint_dir = CheckpointDir(self.store, keep)
        self.timeout = timeout
        self.policy = policy
        self.buffers = StagingBufferPool(staging, rank, STAGING_BUFFERS, owner=store.name)
        self.host_memory = LocalStore(staging)
        """This host's memory, where the newest saves of its ranks can be read."""
        self.local_copy = LocalStore(policy.local_copy_folder) if policy.local_copy_folder is not None else None
        """This host's own disk, with a copy of them."""
        self.peer_replicas: PeerReplicas | None = None
        """Other hosts' memory, with copies too."""
        self._staging = staging
        self._pools = [
            ThreadPoolExecutor(1, thread_name_prefix=f"danlu-{name}") for name in ("snapshot", "store", "summary")
        ]
        self._snapshot_pool, self._store_pool, self._summary_pool = self._pools
        self._copying: Future[None] | None = None
        self._outcomes: list[SaveResult] = []
        self._in_flight: set[str] = set()
        self._given_up: set[str] = set()
        self._failed: set[str] = set()
        self._cleared = False
        """Whether leftovers of an earlier process were removed."""
        self._retired = -1
        self._retiring: Future[None] | None = None
        self.verified_step = -1
        """Newest step whose pack of this rank is verified: read back after it was written, or loaded."""
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether a save is running."""
        with self._lock:
            return bool(self._in_flight)

    def start(self, save: RunningSave, tensors: Mapping[str, Tensor]) -> None:
        """Begin to copy; call `wait_for_staging` before a tensor changes."""
        with self._lock:
            self._in_flight.add(save.attempt)
        self._copying = self._snapshot_pool.submit(self._snapshot, save, tensors)

    def wait_for_staging(self) -> float:
        """Wait until tensors may change again; returns the seconds waited."""
        began = time.perf_counter()
        if self._copying is not None:
            copying, self._copying = self._copying, None
            copying.result()
        return time.perf_counter() - began

    def add_result(self, outcome: SaveResult) -> None:
        """Record how a save ended."""
        with self._lock:
            self._outcomes.append(outcome)

    def pop_results(self) -> list[SaveResult]:
        """Saves that ended since the last call."""
        with self._lock:
            ended, self._outcomes = self._outcomes, []
        return ended

    @property
    def first_failed_attempt(self) -> str:
        """An attempt that failed here while other ranks may still wait for it; empty if there is none."""
        with self._lock:
            return min(self._failed, default="")

    def cancel_attempts(self, attempts: Iterable[str] | None = None) -> None:
        """Stop waiting for these attempts, or for all: a rank failed to write its leaf. Other saves continue."""
        with self._lock:
            gone = set(self._in_flight if attempts is None else attempts)
            self._given_up |= gone
            self._failed -= gone

    def replicas(self, path: str) -> Iterator[Store]:
        """Stores nearer than the shared one that have a file, the nearest first."""
        for store in (
            self.host_memory,
            *(self.peer_replicas.stores_with(path) if self.peer_replicas else ()),
            self.local_copy,
        ):
            try:
                if store is not None and store.size(path):
                    yield store
            except FileNotFoundError:
                continue
            except OSError as error:
                line = f"{store.name} is not read from: {type(error).__name__}: {error}"
                if line not in self.warnings:
                    self.warnings.append(line)

    def abort(self) -> None:
        """Stop the threads and free the memory; a running save is given up."""
        self._closing = True
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        if self.peer_replicas is not None:
            self.peer_replicas.close()  # before the memory that it serves is freed
        self.buffers.close()

    def _snapshot(self, save: RunningSave, tensors: Mapping[str, Tensor]) -> None:
        try:
            save.buffer.unpublish()
            save.chunks = snapshot(save.plan, tensors, save.buffer.view)
            save.buffer.publish(self._staging / step_folder(save.step) / pack_name(save.attempt, save.rank))
        except OSError as error:  # this host's memory is a store too: a failure costs a checkpoint, not the run
            self._finish(save, f"{type(error).__name__}: {error}")
            return
        except BaseException as error:
            self._finish(save, f"{type(error).__name__}: {error}")
            raise
        self._store_pool.submit(self._save_to_store, save)

    def _save_to_store(self, save: RunningSave) -> None:
        """The background part of a save after the snapshot; records how it ended."""
        try:
            post_commit_error = self._write_commit_and_protect(save)
        except Exception as error:  # any failure is an event, not the end of the run
            self._finish(save, f"{type(error).__name__}: {error}")
        else:
            self._finish(save, "", post_commit_error)

    def _write_commit_and_protect(self, save: RunningSave) -> str:
        """Write, commit, read back and protect the checkpoint; returns what went wrong after the commit."""
        pack = pack_name(save.attempt, save.rank)
        if save.rank == 0:  # not before the snapshot: a slow or dead store must not delay the training
            self.checkpoint_dir.refuse_or_quarantine(save.step)
            if not self._cleared:
                self.checkpoint_dir.remove_leftovers(save.step, save.attempt)
                self._cleared = True
        summarizing = self._summary_pool.submit(summarize_pack, save.plan, save.chunks, save.buffer.view)
        try:
            if save.plan.bytes:
                self.store.write(f"{step_folder(save.step)}/{pack}", split_buffer(save.buffer.view, save.plan.bytes))
        finally:
            summary = summarizing.result()  # it reads the buffer, which is released after this
        leaf = Leaf(
            step=save.step,
            attempt=save.attempt,
            writer=save.rank,
            pack=pack,
            bytes=save.plan.bytes,
            finite=summary.finite,
            tensors=summary.tensors,
        )
        text = commit(
            self.store,
            leaf,
            save.world_size,
            save.manifest_fields,
            self.timeout,
            self._cancel_check(save),
            replicas=bool(self.policy.parity),
        )
        save.seconds = time.perf_counter() - save.started_at
        return self._verify_and_protect(save, leaf, text)

    def _verify_and_protect(self, save: RunningSave, leaf: Leaf, manifest: bytes | None) -> str:
        """Runs after the commit: read-back, parity, replicas; returns what went wrong. The checkpoint stays valid."""
        if manifest is not None and not parse_manifest(manifest, step_folder(save.step)).finite:
            self.checkpoint_dir.quarantine(save.step)
            raise CheckpointSaveError("it has non-finite elements, and was quarantined")
        errors, what = [], "could not be verified after writing, so older ones are kept"
        try:
            self._verify_or_rewrite(save, leaf)
            self.verified_step = save.step
            what = "has no parity for some of its files"
            if self.policy.parity:
                if manifest is not None:
                    self.store.write(f"{step_folder(save.step)}/{replica_path(MANIFEST_FILE)}", [manifest])
                self._write_parity(save)
        except (OSError, EOFError, CorruptCheckpointError, CheckpointSaveError) as error:
            errors.append(f"{what}: {type(error).__name__}: {error}")
        return "; ".join(errors + self._write_replicas(save, leaf))

    def _write_replicas(self, save: RunningSave, leaf: Leaf) -> list[str]:
        """Copy this rank's pack to the host's own disk and to another host's memory; returns what went wrong."""
        path, content, errors = (
            f"{step_folder(save.step)}/{leaf.pack}",
            split_buffer(save.buffer.view, leaf.bytes),
            [],
        )
        if not leaf.bytes:
            return []
        try:
            if self.local_copy is not None:
                self.local_copy.write(path, content)
                self._purge_local_copies(save)
        except OSError as error:
            errors.append(f"has no copy on this host's disk: {type(error).__name__}: {error}")
        try:
            if self.peer_replicas is not None:
                self.peer_replicas.push(path, content)
        except (OSError, EOFError, RuntimeError) as error:  # the ranks' key-value store raises RuntimeError
            errors.append(f"has no copy in another host's memory: {type(error).__name__}: {error}")
        return errors

    def _purge_local_copies(self, save: RunningSave) -> None:
        """Remove this rank's older packs from the host's disk, and those of ranks that no longer exist."""
        assert self.local_copy is not None
        for folder in self.local_copy.list():
            if folder < step_folder(save.step):
                for name in self.local_copy.list(folder):
                    writer = name.removesuffix(".pack").rpartition("-")[2]
                    if writer.isdecimal() and (int(writer) == save.rank or int(writer) >= save.world_size):
                        self.local_copy.remove(f"{folder}/{name}")

    def _verify_or_rewrite(self, save: RunningSave, leaf: Leaf) -> None:
        """Verify that the store has what was staged; a wrong pack is written once more from memory. Else raises."""
        path = f"{step_folder(save.step)}/{leaf.pack}"
        chunks = sorted(iter_chunks(leaf), key=lambda stored: stored.chunk.at)
        if not leaf.bytes or pack_is_intact(self.store, path, leaf, chunks):
            return
        self.warnings.append(f"{self.store.name}/{path} was not what had been written; it was written again")
        self.store.write(path, split_buffer(save.buffer.view, leaf.bytes))
        if not pack_is_intact(self.store, path, leaf, chunks):
            raise CorruptCheckpointError(
                f"{self.store.name}/{path} was read back as something else than was written, twice"
            )

    def purge_stale(self, verified: int) -> None:
        """In the background, delete what is older than the newest `keep` checkpoints up to this verified step."""
        if verified > self._retired:
            self._retired = verified
            self._retiring = self._store_pool.submit(self._purge_stale, verified)

    def forget_after(self, step: int) -> None:
        """Count no later step as verified: those that come now are other ones."""
        self.verified_step, self._retired = min(self.verified_step, step), min(self._retired, step)

    def wait_for_purge(self) -> None:
        """Wait for running deletions, up to the timeout."""
        if self._retiring is not None:
            wait([self._retiring], timeout=self.timeout)

    def _purge_stale(self, verified: int) -> None:
        try:
            self.checkpoint_dir.purge_stale(verified)
        except OSError as error:
            self.warnings.append(f"older checkpoints could not be deleted: {type(error).__name__}: {error}")

    def _write_parity(self, save: RunningSave) -> None:
        """Write the parity of the group that is assigned to this rank, if any."""
        group = parity_group_of_writer(save.rank, save.world_size, self.policy.parity_group_size)
        if group is None:
            return
        leaves = [
            wait_for_leaf(self.store, save.step, save.attempt, writer, self.timeout, self._cancel_check(save))
            for writer in group_writers(group, save.world_size, self.policy.parity_group_size)
        ]
        members = tuple(ParityMember(pack=leaf.pack, bytes=leaf.bytes) for leaf in leaves if leaf.bytes)
        for leaf in leaves:
            self._wait_until_pack_intact(save, leaf)
        if members:
            write_parity(self.store, save.step, save.attempt, group, members, self.policy.parity)

    def _wait_until_pack_intact(self, save: RunningSave, leaf: Leaf) -> None:
        """Wait until a pack in the store is what was staged: parity of anything else repairs nothing.

        Its own rank reads it back too, and writes it again if it is not.
        """
        path, chunks = (
            f"{step_folder(save.step)}/{leaf.pack}",
            sorted(iter_chunks(leaf), key=lambda each: each.chunk.at),
        )
        deadline = time.monotonic() + self.timeout
        while leaf.bytes and not pack_is_intact(self.store, path, leaf, chunks):
            if self._closing or time.monotonic() > deadline:
                raise CorruptCheckpointError(f"{self.store.name}/{path} is not what was written")
            time.sleep(_POLL_SECONDS)

    def _cancel_check(self, save: RunningSave) -> Callable[[], bool]:
        return lambda: save.attempt in self._given_up

    def _finish(self, save: RunningSave, failure: str, post_commit_error: str = "") -> None:
        seconds = save.seconds or time.perf_counter() - save.started_at
        path = f"{self.store.name}/{step_folder(save.step)}"
        self.buffers.release(save.buffer)
        with self._lock:
            self._outcomes.append(
                SaveResult(save.step, path, save.stall, seconds, save.plan.bytes, failure, post_commit_error)
            )
            self._in_flight.discard(save.attempt)
            if failure:
                self._failed.add(save.attempt)

"""The background of a save: copy into host memory, write, commit, protect; and how each save ended."""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from danlu.storage.checkpoint.commit import SaveFailed, await_leaf, commit, folder_of, pack_name
from danlu.storage.checkpoint.copying import pack_is_right
from danlu.storage.checkpoint.drain import parts, weigh
from danlu.storage.checkpoint.manifest import MANIFEST, Chunk, Damaged, Leaf, open_manifest, twin_of
from danlu.storage.checkpoint.neighbours import Neighbours
from danlu.storage.checkpoint.parity_packs import Member, group_kept_by, write_parity, writers_of
from danlu.storage.checkpoint.reader import chunks_of
from danlu.storage.checkpoint.shelf import Shelf
from danlu.storage.checkpoint.slots import Slot, Slots
from danlu.storage.checkpoint.staging import PackPlan, stage
from danlu.storage.local_store import LocalStore
from danlu.storage.persistent_store import PersistentStore
from danlu.storage.store import Store

_PAUSE = 1.0
SLOTS = 2
"""Buffers in host memory: one is filled while the other drains."""


@dataclass(frozen=True)
class Outcome:
    """How a save ended on this rank."""

    step: int
    path: str
    stall: float
    """Seconds the training waited."""
    seconds: float
    """From the wish until it counted."""
    bytes: int
    """That this rank wrote."""
    failure: str = ""
    """Why it did not come about; empty if it did."""
    trouble: str = ""
    """What went wrong once it counted, in words that follow "but"."""


@dataclass(frozen=True)
class Policy:
    """What saves may cost, and what they are to survive."""

    parity: int = 0
    """Of every `group` packs so many may be lost or rotten, and are still read."""
    group: int = 8
    retries: int = 0
    """Further tries of what the store refuses."""
    bandwidth: float = 0.0
    """Bytes a second that this rank may write; 0 is no limit."""
    near: Path | None = None
    """A folder on this host's own disk for a copy of the newest packs."""


@dataclass
class Save:
    """One save under way on this rank."""

    step: int
    attempt: str
    rank: int
    world: int
    plan: PackPlan
    root: Mapping[str, Any]
    """What the manifest has beside its tree."""
    began: float
    slot: Slot
    stall: float = 0.0
    chunks: Sequence[Sequence[Chunk]] = ()
    seconds: float = 0.0
    """Until it counted."""


class Saver:
    """Takes one save after the other off the training's hands."""

    def __init__(self, store: Store, keep: int, staging: Path, rank: int, patience: float, policy: Policy) -> None:
        self.notices: list[str] = []
        """What is to be told, beside how saves ended."""
        self._closing = False
        self.store = PersistentStore(
            store, policy.retries, policy.bandwidth, lambda: self._closing, lambda line: self.notices.append(line)
        )
        self.shelf = Shelf(self.store, keep)
        self.patience = patience
        self.policy = policy
        self.slots = Slots(staging, rank, SLOTS)
        self.memory = LocalStore(staging)
        """This host's memory, where the newest saves of its ranks can be read."""
        self.near = LocalStore(policy.near) if policy.near is not None else None
        """This host's own disk, with a copy of them."""
        self.neighbours: Neighbours | None = None
        """Other hosts' memory, with copies too."""
        self._staging = staging
        self._pools = [
            ThreadPoolExecutor(1, thread_name_prefix=f"danlu-{name}") for name in ("stage", "drain", "weigh")
        ]
        self._stager, self._drainer, self._weigher = self._pools
        self._copying: Future[None] | None = None
        self._outcomes: list[Outcome] = []
        self._under_way: set[str] = set()
        self._given_up: set[str] = set()
        self._failed: set[str] = set()
        self._cleared = False
        """Whether what a process before this one may have left is gone."""
        self._retired = -1
        self._retiring: Future[None] | None = None
        self.proven = -1
        """Newest step whose part of this rank is known to be whole: read back after it was written, or loaded."""
        self._lock = threading.Lock()

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        with self._lock:
            return bool(self._under_way)

    def start(self, save: Save, tensors: Mapping[str, Tensor]) -> None:
        """Begin to copy; `settle` before a tensor changes."""
        with self._lock:
            self._under_way.add(save.attempt)
        self._copying = self._stager.submit(self._stage, save, tensors)

    def settle(self) -> float:
        """Wait until tensors may change again; the seconds it took."""
        began = time.perf_counter()
        if self._copying is not None:
            copying, self._copying = self._copying, None
            copying.result()
        return time.perf_counter() - began

    def tell(self, outcome: Outcome) -> None:
        """Note how a save ended."""
        with self._lock:
            self._outcomes.append(outcome)

    def outcomes(self) -> list[Outcome]:
        """Saves that ended since this was last asked."""
        with self._lock:
            ended, self._outcomes = self._outcomes, []
        return ended

    @property
    def failed(self) -> str:
        """An attempt that failed here and that other ranks may still be waiting for; empty if there is none."""
        with self._lock:
            return min(self._failed, default="")

    def give_up(self, attempts: Iterable[str] | None = None) -> None:
        """Wait for these no longer, or for none: a rank is without its leaf. Other saves under way go on."""
        with self._lock:
            gone = set(self._under_way if attempts is None else attempts)
            self._given_up |= gone
            self._failed -= gone

    def copies(self, path: str) -> Iterator[Store]:
        """Stores nearer than the shared one that hold a file, the nearest first."""
        for store in (self.memory, *(self.neighbours.holders(path) if self.neighbours else ()), self.near):
            try:
                if store is not None and store.size(path):
                    yield store
            except FileNotFoundError:
                continue
            except OSError as error:
                line = f"{store.name} is left out of what is read from: {type(error).__name__}: {error}"
                if line not in self.notices:
                    self.notices.append(line)

    def close(self) -> None:
        """End the threads and give the memory back."""
        self._closing = True
        for pool in self._pools:
            pool.shutdown(wait=False, cancel_futures=True)
        self.slots.close()
        if self.neighbours is not None:
            self.neighbours.close()

    def _stage(self, save: Save, tensors: Mapping[str, Tensor]) -> None:
        try:
            save.slot.withdraw()
            save.chunks = stage(save.plan, tensors, save.slot.view)
            save.slot.publish(self._staging / folder_of(save.step) / pack_name(save.attempt, save.rank))
        except OSError as error:  # this host's memory is a store too: it costs a checkpoint, not the run
            self._ended(save, f"{type(error).__name__}: {error}")
            return
        except BaseException as error:
            self._ended(save, f"{type(error).__name__}: {error}")
            raise
        self._drainer.submit(self._drain, save)

    def _drain(self, save: Save) -> None:
        try:
            trouble = self._persist(save)
        except Exception as error:  # whatever it is, it is an event and not the end of the run
            self._ended(save, f"{type(error).__name__}: {error}")
        else:
            self._ended(save, "", trouble)

    def _persist(self, save: Save) -> str:
        """Write the checkpoint; what went wrong after it counted."""
        pack = pack_name(save.attempt, save.rank)
        if save.rank == 0:
            self._make_room(save)
        weighing = self._weigher.submit(weigh, save.plan, save.chunks, save.slot.view)
        try:
            if save.plan.bytes:
                self.store.write(f"{folder_of(save.step)}/{pack}", parts(save.slot.view, save.plan.bytes))
        finally:
            weighed = weighing.result()  # it reads the buffer, which is given back after this
        leaf = Leaf(
            step=save.step,
            attempt=save.attempt,
            writer=save.rank,
            pack=pack,
            bytes=save.plan.bytes,
            finite=weighed.finite,
            tensors=weighed.tensors,
        )
        twins = bool(self.policy.parity)
        text = commit(self.store, leaf, save.world, save.root, self.patience, self._stopped(save), twins=twins)
        save.seconds = time.perf_counter() - save.began
        return self._afterwards(save, leaf, text)

    def _afterwards(self, save: Save, leaf: Leaf, manifest: bytes | None) -> str:
        """What is due once a checkpoint counts; what of it went wrong: the checkpoint is there all the same."""
        if manifest is not None and not open_manifest(manifest, folder_of(save.step)).finite:
            self.shelf.set_aside(save.step)
            raise SaveFailed("it has numbers that are not finite, and is set aside")
        troubles, what = [], "is not proven to be whole, so that older ones are kept"
        try:
            self._read_back(save, leaf)
            self.proven = save.step
            what = "has no parity for some of its files"
            if self.policy.parity:
                if manifest is not None:
                    self.store.write(f"{folder_of(save.step)}/{twin_of(MANIFEST)}", [manifest])
                self._protect(save)
        except (OSError, EOFError, Damaged, SaveFailed) as error:
            troubles.append(f"{what}: {type(error).__name__}: {error}")
        return "; ".join(troubles + self._copy_nearby(save, leaf))

    def _copy_nearby(self, save: Save, leaf: Leaf) -> list[str]:
        """Keep this rank's part on the host's own disk and in another host's memory; what went wrong."""
        path, content, troubles = f"{folder_of(save.step)}/{leaf.pack}", parts(save.slot.view, leaf.bytes), []
        if not leaf.bytes:
            return []
        try:
            if self.near is not None:
                self.near.write(path, content)
                self._clear_near(save)
        except OSError as error:
            troubles.append(f"has no copy on this host's disk: {type(error).__name__}: {error}")
        try:
            if self.neighbours is not None:
                self.neighbours.push(path, content)
        except (OSError, EOFError, RuntimeError) as error:  # the book of the ranks raises RuntimeErrors of its own
            troubles.append(f"has no copy in another host's memory: {type(error).__name__}: {error}")
        return troubles

    def _clear_near(self, save: Save) -> None:
        """Take this rank's older packs off the host's disk, and those of ranks that are no more."""
        assert self.near is not None
        for folder in self.near.list():
            if folder < folder_of(save.step):
                for name in self.near.list(folder):
                    writer = name.removesuffix(".pack").rpartition("-")[2]
                    if writer.isdecimal() and (int(writer) == save.rank or int(writer) >= save.world):
                        self.near.remove(f"{folder}/{name}")

    def _read_back(self, save: Save, leaf: Leaf) -> None:
        """See that the store has what was staged; what it has not is written once more from memory. Else raises."""
        path = f"{folder_of(save.step)}/{leaf.pack}"
        chunks = sorted(chunks_of(leaf), key=lambda stored: stored.chunk.at)
        if not leaf.bytes or pack_is_right(self.store, path, leaf, chunks):
            return
        self.notices.append(f"{self.store.name}/{path} was not what had been written there; it was written again")
        self.store.write(path, parts(save.slot.view, leaf.bytes))
        if not pack_is_right(self.store, path, leaf, chunks):
            raise Damaged(f"{self.store.name}/{path} is read back as something else than was written, twice")

    def retire(self, proven: int) -> None:
        """In the background, delete what checkpoints up to this step, proven by every rank, make needless."""
        if proven > self._retired:
            self._retired = proven
            self._retiring = self._drainer.submit(self._retire, proven)

    def finish_retiring(self) -> None:
        """Wait for what is being deleted, with patience but not for ever."""
        if self._retiring is not None:
            wait([self._retiring], timeout=self.patience)

    def _retire(self, proven: int) -> None:
        try:
            self.shelf.retire(proven)
        except OSError as error:
            self.notices.append(f"older checkpoints could not be deleted: {type(error).__name__}: {error}")

    def _make_room(self, save: Save) -> None:
        """See that the step is free. Here and not before the copy: a store that is slow or gone must not be felt."""
        self.shelf.make_way(save.step)
        if not self._cleared:
            self.shelf.clear(save.step, save.attempt)
            self._cleared = True

    def _protect(self, save: Save) -> None:
        """Write the parity of the group that is this rank's to keep, if one is."""
        group = group_kept_by(save.rank, save.world, self.policy.group)
        if group is None:
            return
        leaves = [
            await_leaf(self.store, save.step, save.attempt, writer, self.patience, self._stopped(save))
            for writer in writers_of(group, save.world, self.policy.group)
        ]
        members = tuple(Member(pack=leaf.pack, bytes=leaf.bytes) for leaf in leaves if leaf.bytes)
        for leaf in leaves:
            self._await_right(save, leaf)
        if members:
            write_parity(self.store, save.step, save.attempt, group, members, self.policy.parity)

    def _await_right(self, save: Save, leaf: Leaf) -> None:
        """Wait until a pack in the store is what was staged: parity of anything else mends nothing.

        Its own rank reads it back too, and writes it again if it is not.
        """
        path, chunks = f"{folder_of(save.step)}/{leaf.pack}", sorted(chunks_of(leaf), key=lambda each: each.chunk.at)
        deadline = time.monotonic() + self.patience
        while leaf.bytes and not pack_is_right(self.store, path, leaf, chunks):
            if self._closing or time.monotonic() > deadline:
                raise Damaged(f"{self.store.name}/{path} is not what was written there")
            time.sleep(_PAUSE)

    def _stopped(self, save: Save) -> Callable[[], bool]:
        return lambda: save.attempt in self._given_up

    def _ended(self, save: Save, failure: str, trouble: str = "") -> None:
        seconds = save.seconds or time.perf_counter() - save.began
        path = f"{self.store.name}/{folder_of(save.step)}"
        self.slots.give_back(save.slot)
        with self._lock:
            self._outcomes.append(Outcome(save.step, path, save.stall, seconds, save.plan.bytes, failure, trouble))
            self._under_way.discard(save.attempt)
            if failure:
                self._failed.add(save.attempt)

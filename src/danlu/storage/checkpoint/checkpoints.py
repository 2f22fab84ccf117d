"""The checkpoints of one run: all ranks save and load together, with what each holds.

A save is a copy into host memory, for which the training waits, and a drain into the store, for which it does not.
A store that fails, fills up or is slow costs a checkpoint and an event, never the run.
"""

import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from danlu.storage.checkpoint.commit import SaveFailed, commit, folder_of, pack_name
from danlu.storage.checkpoint.drain import parts, weigh
from danlu.storage.checkpoint.manifest import Chunk, Damaged, Leaf, open_manifest
from danlu.storage.checkpoint.pieces import Piece, pieces, plain_set
from danlu.storage.checkpoint.reader import Reader
from danlu.storage.checkpoint.restore import fill, sums_of
from danlu.storage.checkpoint.shelf import Shelf
from danlu.storage.checkpoint.staging import PackPlan, Slot, stage
from danlu.storage.store import Store, open_store

SLOTS = 2
"""Buffers in host memory: one is filled while the other drains."""
PATIENCE = 600.0
"""Seconds a writer waits for the leaves of others, and a run at its end for its last save."""
_BUSY, _NONE = 1 << 32, -1
_POLL = 0.02
_LAST_CHANCE = 10.0


@dataclass(frozen=True)
class Outcome:
    """How a save ended on this rank."""

    step: int
    path: str
    stall: float
    """Seconds the training waited."""
    seconds: float
    """From the wish to the last byte."""
    bytes: int
    """That this rank wrote."""
    failure: str = ""
    """Why it did not come about; empty if it did."""
    trouble: str = ""
    """What went wrong once it counted: older ones that could not be deleted."""


@dataclass(frozen=True)
class Proof:
    """That tensors hold, bit for bit, what was saved: by fingerprints that do not depend on the layout."""

    step: int
    was: Mapping[str, int]
    """Ranks on every axis when it was saved."""
    tensors: int
    bytes: int
    differing: Sequence[str]


@dataclass
class _Save:
    """One save under way on this rank."""

    step: int
    attempt: str
    scalars: Mapping[str, Any]
    plan: PackPlan
    slot: Slot
    began: float
    stall: float = 0.0
    chunks: Sequence[Sequence[Chunk]] = ()


class Checkpoints:
    """The checkpoints in one store. `save`, `begin` and `load` are called by all ranks together."""

    def __init__(
        self,
        store: Store,
        keep: int,
        device: torch.device,
        *,
        staging: Path,
        layout: Mapping[str, int] | None = None,
        patience: float = PATIENCE,
    ) -> None:
        """`device` is where small agreements between ranks are made, `staging` a folder in this host's memory."""
        self.store = store
        self.shelf = Shelf(store, keep)
        self.device = device
        self.layout = dict(layout or {})
        self.patience = patience
        self._staging = staging
        self._slots: list[Slot] = []
        self._free: list[Slot] = []
        self._lock = threading.Lock()
        self._copier = ThreadPoolExecutor(1, thread_name_prefix="danlu-stage")
        self._drainer = ThreadPoolExecutor(1, thread_name_prefix="danlu-drain")
        self._copying: Future[None] | None = None
        self._weigher = ThreadPoolExecutor(1, thread_name_prefix="danlu-weigh")
        self._outcomes: list[Outcome] = []
        self._under_way: set[str] = set()
        self._given_up: set[str] = set()
        self._cleared = False
        """Whether what a process before this one may have left is gone."""
        self._failed: set[str] = set()
        """Attempts that failed here and that other ranks may still be waiting for."""

    def latest(self) -> int | None:
        """The newest complete and finite checkpoint, or None; rank 0 looks, as another rank's file system may lag."""
        newest = self._from_rank_0(lambda: max(self.shelf.steps(), default=-1))
        return None if newest < 0 else newest

    def prepare(self, tensors: Mapping[str, Tensor]) -> int:
        """Take the memory that saves are copied into, so that the first is as quick as the others; bytes of a save."""
        plan = PackPlan.of(pieces(tensors, self._plain_replica(tensors)))
        while len(self._slots) < SLOTS:
            self._free.append(self._new_slot(plan.bytes))
        return plan.bytes

    def save(self, step: int, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> Outcome:
        """Write a checkpoint; it is complete when this returns, on all ranks. Raises `SaveFailed` if it is not."""
        self.wait()
        self.begin(step, tensors, scalars)
        self.wait()
        with self._lock:
            outcome = next(each for each in reversed(self._outcomes) if each.step == step)
            self._outcomes.remove(outcome)
        if self._any(bool(outcome.failure)):
            raise SaveFailed(outcome.failure or f"{outcome.path} could not be saved by another rank")
        return outcome

    def begin(
        self, step: int, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any], *, overlap: bool = False
    ) -> bool:
        """Copy the state into host memory and write it in the background; False if all buffers still drain.

        With `overlap` the copy goes on in the background too: call `settle` before a tensor changes.
        """
        began = time.perf_counter()
        self.settle()
        agreed = self._agree(step, tensors)
        if agreed is None:
            self._outcomes.append(_left_out(step, time.perf_counter() - began))
            return False
        attempt, plain_replica = agreed
        plan = PackPlan.of(pieces(tensors, plain_replica))
        save = _Save(step, attempt, scalars, plan, self._slot(plan.bytes), began)
        with self._lock:
            self._under_way.add(attempt)
        self._copying = self._copier.submit(self._stage, save, tensors)
        if not overlap:
            self.settle()
        save.stall = time.perf_counter() - began
        return True

    def settle(self) -> float:
        """Wait until tensors may change again; the seconds it took."""
        began = time.perf_counter()
        if self._copying is not None:
            copying, self._copying = self._copying, None
            copying.result()
        return time.perf_counter() - began

    def outcomes(self) -> list[Outcome]:
        """Saves that ended since this was last asked."""
        with self._lock:
            ended, self._outcomes = self._outcomes, []
        return ended

    def wait(self) -> None:
        """Wait until no rank has a save under way; all ranks call it. One that failed on any is given up on all."""
        self.settle()
        deadline = time.monotonic() + self.patience
        while True:
            with self._lock:
                busy, failed = bool(self._under_way), self._failed
            late = time.monotonic() > deadline
            anywhere = self._any_of([busy, bool(failed), late])
            if not anywhere[0]:
                return
            if anywhere[1]:
                self._give_up(_attempts(word for (word,) in self._gather([self._failure()])))
            if anywhere[2]:
                self._give_up(set(self._under_way))
            if anywhere[2] and time.monotonic() > deadline + _LAST_CHANCE:
                raise SaveFailed(f"{self.store.name} must take a save within {self.patience:g} s, but did not")
            time.sleep(_POLL)

    def load(
        self, step: int, tensors: Mapping[str, Tensor], on_bytes: Callable[[int], None] = lambda done: None
    ) -> tuple[dict[str, Any], Proof]:
        """Fill `tensors` in place, whatever layout wrote them; the scalars, and the proof that bits are equal.

        Every chunk read is checked against the hash taken when it was saved. Raises `Damaged` on all ranks if one
        is not right on any.
        """
        mine = pieces(tensors, self._plain_replica(tensors))
        failure = ""
        try:
            reader = Reader(self.store, step)
            fill(reader, tensors, mine, on_bytes)
        except (Damaged, OSError, EOFError) as error:  # the others wait: they must hear of it
            failure = str(error)
        if self._any(bool(failure)):
            raise Damaged(failure or f"{self.store.name}/{folder_of(step)} is damaged where another rank read it")
        return dict(reader.manifest.scalars), self._prove(reader, tensors, mine)

    def read(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Fill whole tensors in place, in a process that is no rank; only what is asked for is read."""
        fill(Reader(self.store, step), tensors, pieces(tensors, 0), lambda done: None)

    def close(self) -> None:
        """End the background threads and give the memory back; saves under way are waited for. All ranks call it."""
        try:
            self.wait()
        finally:
            for pool in (self._copier, self._drainer, self._weigher):
                pool.shutdown(wait=False, cancel_futures=True)
        for slot in self._slots:
            slot.close()
        self._slots, self._free = [], []

    # --- what runs in the background

    def _stage(self, save: _Save, tensors: Mapping[str, Tensor]) -> None:
        try:
            save.chunks = stage(save.plan, tensors, save.slot.view)
        except BaseException as error:
            self._ended(save, f"{type(error).__name__}: {error}")
            raise
        self._drainer.submit(self._drain, save)

    def _drain(self, save: _Save) -> None:
        try:
            trouble = self._persist(save)
        except Exception as error:  # whatever it is, it is an event and not the end of the run
            self._ended(save, f"{type(error).__name__}: {error}")
        else:
            self._ended(save, "", trouble)

    def _persist(self, save: _Save) -> str:
        """Write the checkpoint; what went wrong after it counted."""
        rank, world = _rank(), _world()
        pack = pack_name(save.attempt, rank)
        if rank == 0:
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
            writer=rank,
            pack=pack,
            bytes=save.plan.bytes,
            finite=weighed.finite,
            tensors=weighed.tensors,
        )
        root = {"scalars": dict(save.scalars), "layout": self.layout, "written": time.time()}
        text = commit(self.store, leaf, world, root, self.patience, lambda: save.attempt in self._given_up)
        if text is not None:
            try:
                self.shelf.added(open_manifest(text, pack))
            except OSError as error:  # the checkpoint is there all the same
                return f"{type(error).__name__}: {error}"
        return ""

    def _make_room(self, save: _Save) -> None:
        """See that the step is free. Here and not before the copy: a store that is slow or gone must not be felt."""
        self.shelf.make_way(save.step)
        if not self._cleared:
            self.shelf.clear(save.step, save.attempt)
            self._cleared = True

    def _ended(self, save: _Save, failure: str, trouble: str = "") -> None:
        seconds = time.perf_counter() - save.began
        path = f"{self.store.name}/{folder_of(save.step)}"
        with self._lock:
            self._outcomes.append(Outcome(save.step, path, save.stall, seconds, save.plan.bytes, failure, trouble))
            self._free.append(save.slot)
            self._under_way.discard(save.attempt)
            if failure:
                self._failed.add(save.attempt)

    def _failure(self) -> int:
        """An attempt that failed here, as a number for the other ranks; `_NONE` if there is none."""
        with self._lock:
            return int(min(self._failed), 16) if self._failed else _NONE

    def _give_up(self, attempts: set[str]) -> None:
        """Wait for these no longer: a rank is without its leaf. Other saves under way go on."""
        with self._lock:
            self._given_up |= attempts
            self._failed -= attempts

    # --- what ranks agree on

    def _agree(self, step: int, tensors: Mapping[str, Tensor]) -> tuple[str, int] | None:
        """The attempt's name and this rank's number among holders of the same plain tensors; None to leave it out."""
        with self._lock:
            busy = _BUSY if len(self._slots) == SLOTS and not self._free else 0
        drawn = random.SystemRandom().getrandbits(32) | busy
        words = self._gather([plain_set(tensors), drawn, self._failure()])
        self._give_up(_attempts(failure for _, _, failure in words))
        if any(word & _BUSY for _, word, _ in words):
            return None
        return f"{words[0][1] & (_BUSY - 1):08x}", [word for word, _, _ in words[: _rank()]].count(words[_rank()][0])

    def _plain_replica(self, tensors: Mapping[str, Tensor]) -> int:
        words = [word for (word,) in self._gather([plain_set(tensors)])]
        return words[: _rank()].count(words[_rank()])

    def _prove(self, reader: Reader, tensors: Mapping[str, Tensor], mine: Sequence[Piece]) -> Proof:
        """Add up the fingerprints of all ranks and hold them against the manifest's."""
        manifest = reader.manifest
        sums = sums_of(tensors, mine)
        held = self._any_of([name in tensors for name in manifest.tensors])
        signed = [_signed(sums.get(name, 0)) for name in manifest.tensors]
        total = torch.tensor(signed, dtype=torch.int64, device=self.device)
        if _world() > 1:
            dist.all_reduce(total)
        pairs = zip(manifest.tensors.items(), total.tolist(), held, strict=True)
        differing = [name for (name, saved), found, asked in pairs if asked and found % 2**64 != saved.fingerprint]
        if differing:
            raise Damaged(
                f"{self.store.name}/{reader.folder}: {', '.join(differing[:5])} must have the fingerprints that were "
                f"saved, but {len(differing)} of {len(manifest.tensors)} tensors differ on the {_world()} ranks now"
            )
        return Proof(manifest.step, manifest.layout, sum(held), manifest.bytes, differing)

    def _slot(self, size: int) -> Slot:
        """A free buffer of at least this size."""
        with self._lock:
            slot = self._free.pop() if self._free else None
        if slot is not None and slot.size >= size:
            return slot
        if slot is not None:
            self._slots.remove(slot)
            slot.close()
        return self._new_slot(size)

    def _new_slot(self, size: int) -> Slot:
        taken = {slot.path for slot in self._slots}
        paths = (self._staging / f"{_rank():06d}-{number}" for number in range(SLOTS))
        slot = Slot(next(path for path in paths if path not in taken), size)
        self._slots.append(slot)
        return slot

    def _from_rank_0(self, answer: Callable[[], int]) -> int:
        """What rank 0 answers, on every rank."""
        told = torch.tensor(answer() if _rank() == 0 else 0, device=self.device)
        if _world() > 1:
            dist.broadcast(told, src=0)
        return int(told)

    def _any(self, mine: bool) -> bool:
        """Whether it is so on any rank."""
        return self._any_of([mine])[0]

    def _any_of(self, mine: Sequence[bool]) -> list[bool]:
        flags = torch.tensor(mine, dtype=torch.int32, device=self.device)
        if _world() > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX)
        return [bool(flag) for flag in flags.tolist()]

    def _gather(self, words: list[int]) -> list[list[int]]:
        mine = torch.tensor(words, dtype=torch.int64, device=self.device)
        if _world() == 1:
            return [words]
        everyone = torch.empty(_world() * len(words), dtype=torch.int64, device=self.device)
        dist.all_gather_single(everyone, mine)
        return everyone.reshape(-1, len(words)).tolist()


def _left_out(step: int, seconds: float) -> Outcome:
    return Outcome(step, "", seconds, seconds, 0, f"{SLOTS} earlier saves are still being written on some rank")


def _attempts(words: Iterable[int]) -> set[str]:
    return {f"{word:08x}" for word in words if word != _NONE}


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def open_checkpoints(
    where: str | Path, keep: int, device: torch.device, layout: Mapping[str, int] | None = None
) -> Checkpoints:
    """The checkpoints in a folder or object store, with a staging folder of their own in this host's memory."""
    name = str(where) if "://" in str(where) else str(Path(where).resolve())
    return Checkpoints(open_store(name), keep, device, staging=staging_folder(name), layout=layout)


def staging_folder(where: str) -> Path:
    """Where the buffers of this store's saves lie: in memory, found again by the next process that saves there."""
    memory = Path("/dev/shm")
    root = memory if memory.is_dir() else Path(tempfile.gettempdir())
    return root / f"danlu-{os.getuid()}" / blake2b(where.encode(), digest_size=8).hexdigest()

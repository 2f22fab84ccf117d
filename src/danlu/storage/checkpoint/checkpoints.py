"""The checkpoints of one run: all ranks save and load together, with what each holds.

A save is a copy into host memory, for which the training waits, and a drain into the store, for which it does not.
A store that fails, fills up or is slow costs a checkpoint and an event, never the run.
"""

import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu.storage.checkpoint.commit import SaveFailed, folder_of
from danlu.storage.checkpoint.manifest import Damaged
from danlu.storage.checkpoint.neighbours import Book, Neighbours, hosts_of, own_address
from danlu.storage.checkpoint.pieces import Piece, assigned, pieces_of, words_of
from danlu.storage.checkpoint.ranks import Ranks
from danlu.storage.checkpoint.reader import Reader, Unreadable
from danlu.storage.checkpoint.restore import fill
from danlu.storage.checkpoint.saver import SLOTS, Outcome, Policy, Save, Saver
from danlu.storage.checkpoint.scrub import Scrubber
from danlu.storage.checkpoint.shelf import Shelf
from danlu.storage.checkpoint.staging import PackPlan
from danlu.storage.store import Store, open_store

PATIENCE = 600.0
"""Seconds a writer waits for the leaves of others, and a run at its end for its last save."""
_BUSY, _NONE = 1 << 32, -1
_POLL = 0.02
_LAST_CHANCE = 10.0


@dataclass(frozen=True)
class Proof:
    """That tensors hold, bit for bit, what was saved: by fingerprints that do not depend on the layout."""

    step: int
    was: Mapping[str, int]
    """Ranks on every axis when it was saved."""
    tensors: int
    """Tensors that were compared; none differs."""
    saved: int
    """Tensors in the checkpoint."""
    bytes: int


class Checkpoints:
    """The checkpoints in one store. `save`, `begin`, `wait`, `load` and `close` are called by all ranks together."""

    def __init__(
        self,
        store: Store,
        keep: int,
        device: torch.device,
        *,
        staging: Path,
        layout: Mapping[str, int] | None = None,
        patience: float = PATIENCE,
        policy: Policy | None = None,
    ) -> None:
        """`device` is where small agreements between ranks are made, `staging` a folder in this host's memory."""
        self.store = store
        self.shelf = Shelf(store, keep)
        self.layout = dict(layout or {})
        self.patience = patience
        self.mended: list[str] = []
        """What was found damaged in one place while loading, and taken from another."""
        self.ranks = Ranks(device)
        """All that save and load together."""
        self.read_from: Mapping[str, int] = {}
        """Bytes of the last load on this rank, by the store they came from."""
        self._scrubber: Scrubber | None = None
        self._staging = staging
        self._saver = Saver(store, keep, staging, self.ranks.rank, patience, policy or Policy())

    def latest(self) -> int | None:
        """The newest complete and finite checkpoint, or None; rank 0 looks, as another rank's file system may lag."""
        newest = self.ranks.from_first(lambda: max(self.shelf.steps(), default=-1))
        return None if newest < 0 else newest

    def prepare(self, tensors: Mapping[str, Tensor]) -> int:
        """Take the memory that saves are copied into, so that the first is as quick as the others; bytes of a save.

        Load first: copies that a process before this one left in memory are given up for it.
        """
        plan = PackPlan.of(self._pieces(tensors))
        self._saver.slots.make(plan.bytes)
        return plan.bytes

    def save(self, step: int, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> Outcome:
        """Write a checkpoint; it is complete when this returns, on all ranks. Raises `SaveFailed` if it is not."""
        self.wait()
        earlier = self.outcomes()
        self.begin(step, tensors, scalars)
        self.wait()
        (outcome,) = self.outcomes()
        for each in earlier:
            self._saver.tell(each)
        if self.ranks.any(bool(outcome.failure)):
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
        agreed = self._agree(pieces_of(tensors))
        if agreed is None:
            seconds = time.perf_counter() - began
            failure = f"{SLOTS} earlier saves are still being written on some rank"
            self._saver.tell(Outcome(step, "", seconds, seconds, 0, failure))
            return False
        attempt, mine = agreed
        plan = PackPlan.of(mine)
        root = {"scalars": dict(scalars), "layout": self.layout, "written": time.time()}
        slot = self._saver.slots.take(plan.bytes)
        save = Save(step, attempt, self.ranks.rank, self.ranks.world, plan, root, began, slot)
        self._saver.start(save, tensors)
        if not overlap:
            self.settle()
        save.stall = time.perf_counter() - began
        return True

    def settle(self) -> float:
        """Wait until tensors may change again; the seconds it took."""
        return self._saver.settle()

    def outcomes(self) -> list[Outcome]:
        """Saves that ended since this was last asked."""
        return self._saver.outcomes()

    def wait(self) -> None:
        """Wait until no rank has a save under way. One that failed on any is given up on all."""
        self.settle()
        deadline = time.monotonic() + self.patience
        while True:
            late = time.monotonic() > deadline
            busy, failed, late = self.ranks.any_of([self._saver.busy, bool(self._saver.failed), late])
            if failed:
                self._saver.give_up(_attempts(word for (word,) in self.ranks.gather([self._failure()])))
            if late:
                self._saver.give_up()
            if not busy:
                break
            if self.ranks.any(time.monotonic() > deadline + _LAST_CHANCE):
                raise SaveFailed(f"{self.store.name} must take a save within {self.patience:g} s, but did not")
            time.sleep(_POLL)
        self._retire(min(proven for (proven,) in self.ranks.gather([self._saver.proven])))
        self._saver.finish_retiring()
        self.ranks.any(False)  # old ones are gone for every rank

    def scrub(self, seconds: float) -> None:
        """From now on, once in so many seconds, read this rank's share of kept checkpoints again in idle time."""
        busy, tell = (lambda: self._saver.busy), (lambda line: self._saver.notices.append(line))
        self._scrubber = Scrubber(self.shelf, self.ranks.rank, self.ranks.world, seconds, busy, tell)
        self._scrubber.start()

    @property
    def policy(self) -> Policy:
        """What saves may cost, and what they are to survive."""
        return self._saver.policy

    @property
    def has_neighbours(self) -> bool:
        """Whether another host's memory keeps a copy of what this one saved last."""
        return self._saver.neighbours is not None

    def meet_neighbours(self, book: Book, local_rank: int, meeting_point: str) -> None:
        """From now on, keep copies in another host's memory and read from any.

        `meeting_point` is `host:port` where the ranks of the run met: over that network copies go, too.
        """
        host, hosts = hosts_of([local for (local,) in self.ranks.gather([local_rank])], self.ranks.rank)
        if hosts < 2:
            self._saver.notices.append(
                "`checkpoint.peers` asks for copies in another host's memory, but this is the only"
            )
            return
        address = own_address(meeting_point)
        self._saver.neighbours = Neighbours(book, self._staging, host, hosts, address, leader=local_rank == 0)

    def notices(self) -> list[str]:
        """What there is to tell since this was last asked, beside how saves ended."""
        told, self._saver.notices = self._saver.notices, []
        return told

    def load(
        self, step: int, tensors: Mapping[str, Tensor], on_bytes: Callable[[int], None] = lambda done: None
    ) -> tuple[dict[str, Any], Proof]:
        """Fill `tensors` in place, whatever layout wrote them; the scalars, and the proof that bits are equal.

        Every chunk read is checked against the hash taken when it was saved. Raises `Damaged` on all ranks if one
        is not right on any, and `Unreadable` if the store could not be asked: it may be another time.
        """
        mine = self._pieces(tensors)
        if self._saver.neighbours is not None:
            self._saver.neighbours.announce(step)
            self.ranks.any(False)  # all have told before anyone asks
        damaged, unread = "", ""
        try:
            reader = Reader(self.store, step, self._saver.copies)
            sums = fill(reader, tensors, mine, on_bytes)
            self.mended += reader.mended
            self.read_from = reader.read_from
        except (Damaged, EOFError) as error:  # the others wait: they must hear of it
            damaged = str(error)
        except OSError as error:
            unread = str(error)
        any_damaged, any_unread = self.ranks.any_of([bool(damaged), bool(unread)])
        where = f"{self.store.name}/{folder_of(step)}"
        if any_damaged:
            raise Damaged(damaged or f"{where} is damaged where another rank read it")
        if any_unread:
            raise Unreadable(unread or f"{where} cannot be read by another rank")
        proof = self._prove(reader, tensors, sums)
        if not reader.mended:
            self._saver.proven = step
        return dict(reader.manifest.scalars), proof

    def read(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Fill whole tensors in place, in a process that is no rank; only what is asked for is read."""
        fill(Reader(self.store, step), tensors, pieces_of(tensors), lambda done: None)

    def close(self) -> None:
        """Wait for saves under way, end the background threads and give the memory back."""
        if self._scrubber is not None:
            self._scrubber.close()
        try:
            self.wait()
        finally:
            self._saver.close()

    def _agree(self, mine: Sequence[Piece]) -> tuple[str, list[Piece]] | None:
        """The attempt's name, and the pieces with their writers; None to leave this save out."""
        drawn = random.SystemRandom().getrandbits(32) | (_BUSY if self._saver.slots.exhausted else 0)
        words = self.ranks.gather([drawn, self._failure(), self._saver.proven, *words_of(mine)])
        self._saver.give_up(_attempts(failure for _, failure, *_ in words))
        self._retire(min(proven for _, _, proven, *_ in words))
        if any(word & _BUSY for word, *_ in words):
            return None
        held = (held for _, _, _, *held in words[: self.ranks.rank])
        return f"{words[0][0] & (_BUSY - 1):08x}", assigned(mine, held)

    def _retire(self, proven: int) -> None:
        """Let older checkpoints go, now that every rank has read back its part of this one."""
        if self.ranks.rank == 0 and proven >= 0:
            self._saver.retire(proven)

    def _failure(self) -> int:
        """An attempt that failed here, as a number for the other ranks."""
        return int(self._saver.failed, 16) if self._saver.failed else _NONE

    def _pieces(self, tensors: Mapping[str, Tensor]) -> list[Piece]:
        """What this rank holds; all ranks ask."""
        mine = pieces_of(tensors)
        return assigned(mine, self.ranks.gather(words_of(mine))[: self.ranks.rank])

    def _prove(self, reader: Reader, tensors: Mapping[str, Tensor], sums: Mapping[str, int]) -> Proof:
        """Add up the fingerprints of all ranks and hold them against the manifest's."""
        saved = reader.manifest.tensors
        held = self.ranks.any_of([name in tensors for name in saved])
        found = self.ranks.sums([sums.get(name, 0) for name in saved])
        triples = zip(saved.items(), found, held, strict=True)
        differing = [name for (name, tensor), total, asked in triples if asked and total != tensor.fingerprint]
        if differing:
            raise Damaged(
                f"{self.store.name}/{reader.folder}: {', '.join(differing[:5])} must have the fingerprints that were "
                f"saved, but {len(differing)} of {sum(held)} tensors differ on the {self.ranks.world} ranks now"
            )
        return Proof(reader.manifest.step, reader.manifest.layout, sum(held), len(held), reader.manifest.bytes)


def _attempts(words: Iterable[int]) -> set[str]:
    return {f"{word:08x}" for word in words if word != _NONE}


def open_checkpoints(
    where: str | Path,
    keep: int,
    device: torch.device,
    layout: Mapping[str, int] | None = None,
    policy: Policy | None = None,
    options: Mapping[str, str] | None = None,
) -> Checkpoints:
    """The checkpoints in a folder or object store, with a staging folder of their own in this host's memory."""
    name = str(where) if "://" in str(where) else str(Path(where).resolve())
    staging = staging_folder(name)
    return Checkpoints(open_store(name, options), keep, device, staging=staging, layout=layout, policy=policy)


def staging_folder(where: str) -> Path:
    """Where the buffers of this store's saves lie: in memory, found again by the next process that saves there."""
    memory = Path("/dev/shm")
    root = memory if memory.is_dir() else Path(tempfile.gettempdir())
    return root / f"danlu-{os.getuid()}" / _short(where)


def near_folder(root: str, where: str) -> Path:
    """Where copies of this store's saves lie on a host's own disk, below `root`."""
    return Path(root).expanduser().resolve() / _short(where)


def _short(where: str) -> str:
    return blake2b(where.encode(), digest_size=8).hexdigest()

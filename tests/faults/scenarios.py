"""Saves worth crashing: one to three writers, retention, a second try after a kill, a checkpoint set aside."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from history import History, Killed, Recorder, Turns
from made_checkpoints import KEEP, Content, attempt_of, content, write

from danlu.comm.world import World
from danlu.storage.checkpoint import commit
from danlu.storage.checkpoint.checkpoint_dir import CheckpointDir
from danlu.storage.checkpoint.engine import CheckpointEngine
from danlu.storage.checkpoint.manifest import Manifest
from danlu.storage.store.local_store import LocalStore


@dataclass
class Scenario:
    """What was done to a disk, and what every attempt was meant to hold."""

    name: str
    history: History
    saved: dict[tuple[int, str], Content] = field(default_factory=dict)
    large: bool = False
    """Megabytes a state: fewer of them are made."""

    def expected(self, step: int, attempt: str) -> Content:
        return self.saved[step, attempt]


class Run:
    """One process after the other that saves by hand into one folder, every call written down."""

    def __init__(self, name: str, folder: Path, keep: int = KEEP) -> None:
        folder.mkdir(parents=True)
        self.scenario = Scenario(name, History(folder))
        self.folder, self.keep = folder, keep
        self._attempts = 0

    def save(self, step: int, writers: int = 1, seed: int = 0, left: int | None = None, finite: bool = True) -> None:
        """A new process saves; it is killed after `left` calls, if given."""
        self._attempts += 1
        attempt = attempt_of(1000 * seed + self._attempts)
        tensors = content(step, attempt, finite=finite)
        self.scenario.saved[step, attempt] = tensors
        history, turns = self.scenario.history, Turns(seed)
        calls = Recorder(history, left, turns.take)
        ended: list[BaseException | Manifest | None] = []

        def one(writer: int) -> None:
            turns.enter()
            ready.wait()
            try:
                store = LocalStore(self.folder / "run", calls)
                shelf = CheckpointDir(store, self.keep)
                if writer == 0:
                    shelf.refuse_or_quarantine(step)
                    shelf.remove_leftovers(step, attempt)
                manifest = write(store, step, attempt, tensors, writer, writers)
                if manifest is not None:
                    history.mark("saved" if finite else "set aside", step)
                    self._retain(shelf, manifest)
                ended.append(manifest)
            except BaseException as error:
                ended.append(error)
            finally:
                turns.leave()

        ready = threading.Barrier(writers)
        threads = [threading.Thread(target=one, args=(writer,)) for writer in range(writers)]
        with patch.multiple(commit, _FIRST_WAIT=0.0, _LONGEST_WAIT=0.0):  # whose turn it is, the lot decides
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for error in ended:
            if isinstance(error, BaseException) and not isinstance(error, Killed):
                raise error

    def _retain(self, shelf: CheckpointDir, manifest: Manifest) -> None:
        listed = [step for step in shelf.resumable_steps() if step != manifest.step]
        for old in listed[: max(0, len(listed) + 1 - self.keep)]:
            self.scenario.history.mark("dropping", old)
        if manifest.finite:
            shelf.purge_stale(manifest.step)
        else:
            shelf.quarantine(manifest.step)

    def quarantine(self, step: int) -> None:
        """A checkpoint turns out not to be good."""
        self.scenario.history.mark("dropping", step)
        CheckpointDir(LocalStore(self.folder / "run", Recorder(self.scenario.history)), self.keep).quarantine(step)

    def calls_of(self, act: Callable[["Run"], None]) -> int:
        """How many calls something makes."""
        before = len(self.scenario.history.ops)
        act(self)
        return len(self.scenario.history.ops) - before


def by_hand(folder: Path, seeds: range) -> Iterator[Scenario]:
    """Scenarios without torch."""
    for writers in (1, 2, 3):
        for seed in seeds if writers > 1 else seeds[:1]:
            run = Run(f"{writers} writers, order {seed}, three saves, the oldest goes", folder / f"w{writers}-{seed}")
            for step in (10, 20, 30):
                run.save(step, writers, seed)
            yield run.scenario
    run = Run("a save that is not finite, and one set aside later", folder / "aside")
    run.save(10, 2)
    run.save(20, 2, finite=False)
    run.save(20, 2)
    run.quarantine(20)
    run.save(20, 1)
    yield run.scenario


def tried_again(folder: Path, every: int, writers: int = 2) -> Iterator[Scenario]:
    """A process is killed at its nth call, for all n; the next one saves the same step and goes on."""
    probe = Run("", folder / "probe")
    probe.save(10, writers)
    probe.save(20, writers)
    calls = probe.calls_of(lambda run: run.save(30, writers))
    for left in range(1, calls, every):
        run = Run(f"killed at call {left} of the third save, then again", folder / f"again-{left}")
        run.save(10, writers)
        run.save(20, writers)
        run.save(30, writers, left=left)
        if 30 not in CheckpointDir(LocalStore(folder / f"again-{left}" / "run"), KEEP).resumable_steps():
            run.save(30, writers)
        run.save(40, writers)
        yield run.scenario


def by_class(folder: Path, megabytes: int = 0) -> Scenario:
    """The real `CheckpointEngine` of one rank: background saves, retention; large packs bypass the page cache."""
    name = f"Checkpoints, {megabytes} MiB past the page cache" if megabytes else "Checkpoints, one rank"
    folder.mkdir(parents=True)
    scenario = Scenario(name, History(folder), large=bool(megabytes))
    store = LocalStore(folder / "run", Recorder(scenario.history))
    checkpoints = CheckpointEngine(store, KEEP, World.adopt(), staging=folder / "staging")
    plain = CheckpointDir(LocalStore(folder / "run"), KEEP)
    try:
        for step in (10, 20, 30, 40):
            tensors = dict(content(step, "00000000", rows=megabytes << 10 or 6, columns=256 if megabytes else 5))
            if step > 20:
                scenario.history.mark("dropping", step - 20)
            live = {each: torch.from_numpy(np.array(array)) for each, array in tensors.items()}
            checkpoints.async_save(step, live, {"step": step}, overlap=step % 20 == 0)
            checkpoints.wait_for_saves()
            outcome = checkpoints.pop_results()[0]
            assert not outcome.error, outcome.error
            scenario.history.mark("saved", step)
            manifest = plain.manifest_or_none(step)
            assert manifest is not None
            scenario.saved[step, manifest.attempt] = tensors
    finally:
        checkpoints.close()
    return scenario

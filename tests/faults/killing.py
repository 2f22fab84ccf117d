"""A process that saves in a loop and is killed at any moment, again and again, on one folder.

torch is imported once, in the parent; a child is a fork of it, so that a kill costs milliseconds and not seconds.
"""

import os
import random
import select
import signal
import struct
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from made_checkpoints import Content, Wrong, check

from danlu.comm.world import World
from danlu.storage.checkpoint.checkpoint_dir import CheckpointDir
from danlu.storage.checkpoint.engine import CheckpointEngine
from danlu.storage.store.local_store import LocalStore

KEEP = 2
_WORD = struct.Struct("<q")


@dataclass
class Kills:
    """What came of it."""

    kills: int = 0
    saves: int = 0
    """That were reported as complete before a kill."""
    cut_short: int = 0
    """Kills that fell into a save: something of an unfinished one was on the disk."""
    most_files: int = 0
    """Files below the folder at any time: leftovers must not add up."""


def expected(step: int, _attempt: str = "") -> Content:
    """The state at a step; it depends on nothing else, as that of a training run."""
    draw = np.random.default_rng(step)
    return {
        "weight": draw.standard_normal((64, 65), dtype=np.float32),
        "bias": draw.standard_normal(65, dtype=np.float32),
        "step": np.array(step, np.float32),
    }


def kill_many(folder: Path, staging: Path, kills: int, seed: int, on_kill: Callable[[], None] = lambda: None) -> Kills:
    """Start, kill after a while drawn by lot, look; so many times. `Wrong` if what must not be is."""
    draw, told, newest, pace = random.Random(seed), Kills(), 0, 0.02
    store = LocalStore(folder)
    while told.kills < kills:
        reported = _one_life(folder, staging, draw.uniform(0.0, 2 * pace))
        # Two or three saves a life, however slow the machine: kills then fall into all parts of a save.
        pace *= 1.25 if len(reported) < 2 else 0.9 if len(reported) > 3 else 1.0
        told.kills += 1
        told.saves += len(reported)
        newest = max([newest, *reported])
        check(store, expected, [newest] if newest else [], KEEP)
        names = [path.name for path in folder.rglob("*") if path.is_file()]
        told.cut_short += any("unfinished" in name for name in names) or bool(_without_manifest(store))
        told.most_files = max(told.most_files, len(names))
        on_kill()
    return told


def _without_manifest(store: LocalStore) -> list[int]:
    shelf = CheckpointDir(store, KEEP)
    return sorted(set(shelf.steps_with_folder()) - set(shelf.committed_steps()))


def _one_life(folder: Path, staging: Path, seconds: float) -> list[int]:
    """Steps that one child reported as saved before it was killed, `seconds` after its first sign of life."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _save_for_ever(folder, staging, writing)
    os.close(writing)
    try:
        if not select.select([reading], [], [], 60)[0]:
            raise Wrong("a new process must be able to go on within 60 s, but does not")
        time.sleep(seconds)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with os.fdopen(reading, "rb") as pipe:
        words = pipe.read()
    steps = [word for (word,) in _WORD.iter_unpack(words[: len(words) // _WORD.size * _WORD.size])]
    if not steps or -1 in steps:
        raise Wrong(f"a process failed to load or to save in {folder}; what it printed is above")
    return steps[1:]


def _save_for_ever(folder: Path, staging: Path, pipe: int) -> None:
    """The child: go on from the newest checkpoint, hold it against what it must be, and save without end."""
    try:
        checkpoints = CheckpointEngine(LocalStore(folder), KEEP, World.adopt(), staging=staging)
        step = checkpoints.latest_step() or 0
        if step:
            tensors = {name: torch.from_numpy(np.zeros_like(array)) for name, array in expected(step).items()}
            checkpoints.load(step, tensors)
            for name, array in expected(step).items():
                if tensors[name].numpy().tobytes() != array.tobytes():
                    raise Wrong(f"{name} of step {step} was loaded, but is not what was saved")
        os.write(pipe, _WORD.pack(0))
        while True:
            step += 1
            live = {name: torch.from_numpy(np.array(array)) for name, array in expected(step).items()}
            checkpoints.async_save(step, live, {"step": step}, overlap=step % 2 == 0)
            checkpoints.wait_for_saves()
            (outcome,) = checkpoints.pop_results()
            if outcome.error:
                raise Wrong(f"step {step}: {outcome.error}")
            os.write(pipe, _WORD.pack(step))
    except BaseException:
        traceback.print_exc()
        os.write(pipe, _WORD.pack(-1))
    finally:
        os._exit(1)  # a fork must not run the parent's clean-up

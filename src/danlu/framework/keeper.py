"""Between the loop and the checkpoints: when to save, what to tell, and where to go on from."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from danlu.framework.state import TrainState
from danlu.spec.event import Event, Rehearsed, Resumed, Saved, Warned
from danlu.spec.recipe import Checkpoint
from danlu.storage.checkpoint.checkpoints import Checkpoints, Proof
from danlu.storage.checkpoint.commit import SaveFailed
from danlu.storage.checkpoint.manifest import Damaged
from danlu.storage.checkpoint.reader import Unreadable
from danlu.storage.checkpoint.rehearsal import rehearse
from danlu.storage.checkpoint.saver import Outcome

PAUSES = (2.0, 10.0)
"""Seconds between tries to read a checkpoint whose store fails."""


@dataclass
class Keeper:
    """Saves a run's state when it is time to, and brings it back."""

    checkpoints: Checkpoints
    settings: Checkpoint
    rank: int
    world: int
    write: Callable[[Event], None]
    failures: int = field(default=0, init=False)
    """Saves in a row that did not come about."""
    newest: int | None = field(default=None, init=False)
    """Newest step that is known to be saved."""

    def resume(self, state: TrainState) -> bool:
        """Go on from the newest checkpoint that is whole; a damaged one is set aside, and the one before it taken."""
        while (step := self.checkpoints.latest()) is not None:
            try:
                scalars, proof = self._load(step, state)
            except Damaged as error:
                self._warn(f"{error}; it is set aside, and the checkpoint before it is taken")
                if self.rank == 0:
                    self.checkpoints.shelf.set_aside(step)
                continue
            state.restore(scalars)
            self.newest = step
            for line in self.checkpoints.mended:
                self._warn(line)
            self.checkpoints.mended.clear()
            now = {axis: degree for axis, degree in self.checkpoints.layout.items() if degree > 1}
            was = {axis: degree for axis, degree in proof.was.items() if degree > 1}
            self.write(
                Resumed(
                    time=time.time(), step=step, was=was, now=now, tensors=proof.tensors, saved=proof.saved,
                    bytes=proof.bytes, samples=state.cursor,
                )
            )  # fmt: skip
            return True
        return False

    def _load(self, step: int, state: TrainState) -> tuple[dict[str, Any], Proof]:
        """Load a checkpoint; a store that fails is asked again, since it says nothing about what it holds."""
        for pause in (*PAUSES, None):
            try:
                return self.checkpoints.load(step, state.tensors())
            except Unreadable as error:
                if pause is None:
                    raise Unreadable(f"{error}; resume when the store answers: step {step} may be whole") from None
                self._warn(f"{error}; trying again in {pause:g} s")
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def rehearse(self, state: TrainState, *, first_on_host: bool, between_failures: float | None) -> None:
        """Before the first step, see that saves can be made, and tell what they cost; raises `NotReady` if not."""
        found = rehearse(self.checkpoints, state.tensors(), first_on_host=first_on_host)
        self.write(
            Rehearsed(
                time=time.time(), bytes=found.bytes, seconds=found.seconds, stall=found.stall, free=found.free,
                bandwidth=found.bandwidth, memory=found.memory,
                interval=None if between_failures is None else found.interval(between_failures),
            )
        )  # fmt: skip

    def maybe_save(self, state: TrainState, last: bool) -> bool:
        """Save every so many steps in the background; at the end or a stop, and wait for it. Whether it was time to."""
        self._tell()
        every = self.settings.every
        if last:
            self._save_last(state)
        elif every and state.step % every == 0:
            self.checkpoints.begin(state.step, _steady(state), state.scalars(), overlap=True)
            self._tell()
        else:
            return False
        return True

    @property
    def hopeless(self) -> bool:
        """Whether so many saves in a row have failed that the run is to stop."""
        return 0 < self.settings.stop_after <= self.failures

    def settle(self) -> None:
        """Wait until the state may change: what is being copied must not."""
        self.checkpoints.settle()

    def close(self) -> None:
        """Wait for what is under way, and tell how it ended."""
        self.checkpoints.close()
        self._tell()

    def _save_last(self, state: TrainState) -> None:
        self.checkpoints.wait()
        self._tell()
        try:
            self._ended(self.checkpoints.save(state.step, state.tensors(), state.scalars()))
        except SaveFailed as error:
            raise SaveFailed(f"{error}; what was trained after step {self.newest or 0} is not saved") from None

    def _tell(self) -> None:
        for outcome in self.checkpoints.outcomes():
            self._ended(outcome)
        for notice in self.checkpoints.notices():
            self._warn(notice)

    def _ended(self, outcome: Outcome) -> None:
        if outcome.failure:
            since = f"the newest is of step {self.newest}" if self.newest else "there is none yet"
            self.failures += 1
            row = f"; {self.failures} in a row have failed" if self.failures > 1 else ""
            limit = f", the run stops after {self.settings.stop_after}" if row and self.settings.stop_after else ""
            message = f"the checkpoint of step {outcome.step} did not come about: {outcome.failure}; {since}"
            self._warn(f"{message}{row}{limit}")
            return
        self.failures = 0
        if outcome.trouble:
            self._warn(f"step {outcome.step} is saved, but {outcome.trouble}")
        self.newest = outcome.step
        name = outcome.path.rpartition("/")[2]
        self.write(Saved(time=time.time(), step=outcome.step, path=name, seconds=outcome.seconds, stall=outcome.stall))

    def _warn(self, message: str) -> None:
        """An event from rank 0; a line in its log from any other."""
        if self.rank == 0:
            self.write(Warned(time=time.time(), rank=0, message=message))
        else:
            sys.stderr.write(f"rank {self.rank}: {message}\n")


def _steady(state: TrainState) -> dict[str, Tensor]:
    """The state's tensors; buffers, which a forward may change while the copy goes on, as they are now."""
    steady = {f"model.{name}" for name, _ in state.named_parameters()}
    return {
        name: tensor if name in steady or name.startswith("optimizer.") else tensor.clone()
        for name, tensor in state.tensors().items()
    }

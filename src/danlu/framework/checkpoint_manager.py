"""Between the loop and the checkpoints: when to save, what to report, and where to resume from."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from danlu.framework.stages import EventSink
from danlu.framework.state import TrainState
from danlu.spec.event import PreflightEvent, ResumeEvent, SaveEvent
from danlu.spec.recipe import CheckpointConfig
from danlu.storage.checkpoint.async_saver import SaveResult
from danlu.storage.checkpoint.commit import CheckpointSaveError
from danlu.storage.checkpoint.engine import CheckpointEngine, LoadVerification
from danlu.storage.checkpoint.manifest import CorruptCheckpointError
from danlu.storage.checkpoint.preflight import probe_save_cost
from danlu.storage.checkpoint.reader import CheckpointUnavailableError

LOAD_RETRY_DELAYS = (2.0, 10.0)
"""Seconds between tries to read a checkpoint whose store fails."""


@dataclass
class CheckpointManager:
    """Saves a run's state when it is time to, and restores it."""

    checkpoints: CheckpointEngine
    settings: CheckpointConfig
    rank: int
    events: EventSink
    consecutive_failures: int = field(default=0, init=False)
    """Saves in a row that failed."""
    last_saved_step: int | None = field(default=None, init=False)
    """Newest step that is known to be saved."""

    def resume(self, state: TrainState) -> bool:
        """Resume from the newest intact checkpoint; a corrupt one is quarantined. Whether there was one."""
        found = self._restore_first(state, self.checkpoints.latest_step)
        if found is None:
            return False
        step, verified = found
        now = {axis: degree for axis, degree in self.checkpoints.layout.items() if degree > 1}
        was = {axis: degree for axis, degree in verified.saved_layout.items() if degree > 1}
        self.events.write(
            ResumeEvent(
                time=time.time(), step=step, was=was, now=now, tensors=verified.tensors_verified,
                saved=verified.tensors_saved, bytes=verified.bytes, samples=state.cursor,
            )
        )  # fmt: skip
        return True

    def rewind(self, state: TrainState, at_most: int) -> int | None:
        """Restore the newest checkpoint of step `at_most` or earlier, else the oldest; its step, None if there is none.

        Later ones are deleted: the run leaves their branch. A process that ends before that is done resumes on it, and
        comes to the same spike and to this rewind again.
        """
        self.checkpoints.wait_for_saves()
        self._record_finished_saves()
        found = self._restore_first(state, lambda: self.checkpoints.step_before(at_most))
        if found is None:
            return None
        self.checkpoints.discard_after(found[0])
        return found[0]

    def _restore_first(
        self, state: TrainState, choose: Callable[[], int | None]
    ) -> tuple[int, LoadVerification] | None:
        """Restore the chosen checkpoint; a corrupt one is quarantined, and the next choice is used."""
        while (step := choose()) is not None:
            try:
                scalars, verified = self._load(step, state)
            except CorruptCheckpointError as error:
                self.events.warn(f"{error}; it is quarantined, and the previous checkpoint is used")
                if self.rank == 0:
                    self.checkpoints.checkpoint_dir.quarantine(step)
                continue
            state.restore_scalars(scalars)
            self.last_saved_step = step
            for line in self.checkpoints.repairs:
                self.events.warn(line)
            self.checkpoints.repairs.clear()
            return step, verified
        return None

    def _load(self, step: int, state: TrainState) -> tuple[dict[str, Any], LoadVerification]:
        """Load a checkpoint; a store that fails is retried, since that says nothing about what it holds."""
        for pause in (*LOAD_RETRY_DELAYS, None):
            try:
                return self.checkpoints.load(step, state.tensors())
            except CheckpointUnavailableError as error:
                if pause is None:
                    raise CheckpointUnavailableError(
                        f"{error}; resume when the store is reachable: step {step} may be intact"
                    ) from None
                self.events.warn(f"{error}; trying again in {pause:g} s")
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")

    def preflight(self, state: TrainState, *, first_on_host: bool, between_failures: float | None) -> None:
        """Check before the first step that saves work, and report their cost; raises `PreflightError` if not."""
        found = probe_save_cost(self.checkpoints, state.tensors(), first_on_host=first_on_host)
        self.events.write(
            PreflightEvent(
                time=time.time(), bytes=found.bytes, seconds=found.seconds, stall=found.stall, free=found.free_bytes,
                bandwidth=found.bandwidth, memory=found.host_memory_bytes,
                interval=None if between_failures is None else found.optimal_interval(between_failures),
            )
        )  # fmt: skip

    def save_if_due(self, state: TrainState, last: bool) -> bool:
        """Save every so many steps in the background, and the last step before returning; whether it was time to."""
        self._record_finished_saves()
        every = self.settings.every
        if last:
            self._save_last(state)
        elif every and state.step % every == 0:
            self.checkpoints.async_save(state.step, _tensors_with_cloned_buffers(state), state.scalars(), overlap=True)
            self._record_finished_saves()
        else:
            return False
        return True

    def save_if_lost(self, state: TrainState, last: bool) -> None:
        """After the state was restored from memory: save it if that was due, and was lost with the ranks."""
        self.last_saved_step = self.checkpoints.latest_step()
        if self.last_saved_step is None or self.last_saved_step < state.step:
            self.save_if_due(state, last)

    @property
    def too_many_failures(self) -> bool:
        """Whether so many saves in a row have failed that the run is to stop."""
        return 0 < self.settings.stop_after <= self.consecutive_failures

    def wait_for_staging(self) -> None:
        """Return when no tensor of the state is being copied any more."""
        self.checkpoints.wait_for_staging()

    def close(self) -> None:
        """Wait for saves in flight, and report their results."""
        self.checkpoints.close()
        self._record_finished_saves()

    def abort(self) -> None:
        """Give up saves in flight and free their memory, without the other ranks."""
        self.checkpoints.abort()

    def _save_last(self, state: TrainState) -> None:
        self.checkpoints.wait_for_saves()
        self._record_finished_saves()
        try:
            self._record_save(self.checkpoints.save(state.step, state.tensors(), state.scalars()))
        except CheckpointSaveError as error:
            raise CheckpointSaveError(f"{error}; steps after {self.last_saved_step or 0} are not saved") from None

    def _record_finished_saves(self) -> None:
        for result in self.checkpoints.pop_results():
            self._record_save(result)
        for notice in self.checkpoints.pop_warnings():
            self.events.warn(notice)

    def _record_save(self, result: SaveResult) -> None:
        if result.error:
            since = f"the newest is of step {self.last_saved_step}" if self.last_saved_step else "there is none yet"
            self.consecutive_failures += 1
            row = f"; {self.consecutive_failures} in a row have failed" if self.consecutive_failures > 1 else ""
            limit = f", the run stops after {self.settings.stop_after}" if row and self.settings.stop_after else ""
            message = f"saving the checkpoint of step {result.step} failed: {result.error}; {since}"
            self.events.warn(f"{message}{row}{limit}")
            return
        self.consecutive_failures = 0
        if result.post_commit_error:
            self.events.warn(f"step {result.step} is saved, but {result.post_commit_error}")
        self.last_saved_step = result.step
        name = result.path.rpartition("/")[2]
        self.events.write(
            SaveEvent(time=time.time(), step=result.step, path=name, seconds=result.seconds, stall=result.stall)
        )


def _tensors_with_cloned_buffers(state: TrainState) -> dict[str, Tensor]:
    """The state's tensors; buffers, which a forward may change while the copy goes on, as they are now."""
    steady = {f"model.{name}" for name, _ in state.named_parameters()}
    return {
        name: tensor if name in steady or name.startswith(("optimizer.", "ema.")) else tensor.clone()
        for name, tensor in state.tensors().items()
    }

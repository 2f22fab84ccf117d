"""What the training loop asks of its stages, and stages that do nothing."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor, nn

from danlu.comm.mesh import ParallelMesh
from danlu.framework.batch_loader import BatchSource
from danlu.framework.state import TrainState
from danlu.framework.step_metrics import StepMetrics
from danlu.parallel.batch import Batch
from danlu.spec.event import EvaluationEvent, Event


class DataStage(BatchSource, Protocol):
    """Batches of a data set that may grow while the run reads it; `TrainData` is the one of a run."""

    def pop_warnings(self) -> list[str]:
        """What the user should know about the data and was not told yet."""
        ...

    def refresh(self, cursor: int) -> None:
        """Read what was appended meanwhile, from sample `cursor` on; called by all ranks together."""
        ...


class CheckpointStage(Protocol):
    """Saves the state in the background; `CheckpointManager` is the one of a run."""

    @property
    def too_many_failures(self) -> bool:
        """Whether so many saves in a row have failed on this rank that the run should stop."""
        ...

    def wait_for_staging(self) -> None:
        """Return when no tensor of the state is being copied any more."""
        ...

    def save_if_due(self, state: TrainState, last: bool) -> bool:
        """Save if it is time to, and at the end; whether it was."""
        ...

    def rewind(self, state: TrainState, at_most: int) -> int | None:
        """Restore the newest checkpoint of step `at_most` or earlier, and drop later ones; its step, None if none is.

        Called by all ranks together.
        """
        ...


class EvaluationStage(Protocol):
    """Loss on held-out data; `Evaluation` is the one of a run."""

    def run_if_due(self, state: TrainState) -> EvaluationEvent | None:
        """Evaluate if it is time to; called by all ranks together, between two steps."""
        ...


class EventSink(Protocol):
    """Where the events of a rank go; `RankEvents` is the one of a run."""

    def write(self, event: Event) -> None:
        """Write one event of the run."""
        ...

    def warn(self, message: str) -> None:
        """Warn the user, naming this rank."""
        ...


class SnapshotStage(Protocol):
    """Keeps the newest states where they outlive this process; `StateSnapshots` is the one of a run."""

    def take_if_due(self, state: TrainState, local_square: float) -> None:
        """Keep the state as it is now, if it is time to; `local_square` is of the gradient that led to it."""
        ...


class ProgressStage(Protocol):
    """Hears where in a step this rank is; `FlightRecorder` is the one of a run."""

    def enter_phase(self, phase: str, step: int) -> None:
        """This rank is now at `phase` of the step after `step`."""
        ...

    def begin_world(self) -> None:
        """What was heard so far was of another world."""
        ...


class MetricsStage(Protocol):
    """`compute_step_metrics`, or what stands for it where tensors have no values."""

    def __call__(
        self, modules: Iterable[nn.Module], mesh: ParallelMesh, loss: Tensor, memory: int, stop: bool
    ) -> StepMetrics:
        """Metrics of one step over all ranks."""
        ...


@dataclass(frozen=True)
class FixedData:
    """Batches of data that nobody appends to."""

    batches: BatchSource

    def at(self, cursor: int) -> Batch:
        """The batch whose first sample is number `cursor`."""
        return self.batches.at(cursor)

    def pop_warnings(self) -> list[str]:
        """None."""
        return []

    def refresh(self, cursor: int) -> None:
        """Nothing changes."""


class NoCheckpoints:
    """Saves nothing."""

    too_many_failures = False

    def wait_for_staging(self) -> None:
        """Nothing is copied."""

    def save_if_due(self, state: TrainState, last: bool) -> bool:
        """Never."""
        return False

    def rewind(self, state: TrainState, at_most: int) -> int | None:
        """There is nothing to go back to."""
        return None


class NoEvaluation:
    """Evaluates nothing."""

    def run_if_due(self, state: TrainState) -> EvaluationEvent | None:
        """Never."""
        return None


class NoSnapshots:
    """Keeps nothing."""

    def take_if_due(self, state: TrainState, local_square: float) -> None:
        """Never."""


class NoProgress:
    """Tells nobody."""

    def enter_phase(self, phase: str, step: int) -> None:
        """Ignore it."""

    def begin_world(self) -> None:
        """Ignore it."""


class IgnoreEvents:
    """Drops all events."""

    def write(self, event: Event) -> None:
        """Drop it."""

    def warn(self, message: str) -> None:
        """Drop it."""

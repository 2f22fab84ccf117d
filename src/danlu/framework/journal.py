"""What happens in a run, written where people and programs look: JSON lines and TensorBoard."""

from types import TracebackType
from typing import Self

from tensorboardX import SummaryWriter

from danlu.spec.event import Event, StepReport
from danlu.spec.run import RunFolder


class Journal:
    """Appends events to the run's folder. Rank 0 keeps it; figures are global, so the others have nothing to add."""

    def __init__(self, run: RunFolder) -> None:
        self._events = run.events.open("a")
        self._tensorboard = SummaryWriter(str(run.tensorboard))

    def write(self, event: Event) -> None:
        """Add an event; it can be read by others when this returns."""
        self._events.write(event.model_dump_json() + "\n")
        self._events.flush()
        if isinstance(event, StepReport):
            self._chart(event)

    def _chart(self, report: StepReport) -> None:
        scalars = {
            "loss": report.loss,
            "gradient norm": report.norm,
            "learning rate": report.learning_rate,
            "tokens per second": report.tokens / report.seconds,
            "memory": report.memory,
        }
        if report.imbalance is not None:
            scalars["expert imbalance"] = report.imbalance
        for name, value in scalars.items():
            self._tensorboard.add_scalar(name, value, report.step, walltime=report.time)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tensorboard.close()
        self._events.close()

"""What happens in a run, written where people and programs look: JSON lines and TensorBoard."""

from pathlib import Path
from types import TracebackType
from typing import Self

from tensorboardX import SummaryWriter

from danlu.spec.event import Event, StepReport
from danlu.spec.run import RunFolder


class Journal:
    """Appends events to the run's folder. Rank 0 keeps it; figures are global, so the others have nothing to add."""

    def __init__(self, run: RunFolder, step: int = 0) -> None:
        """Go on behind what is there; charts of steps after `step`, which a resumed run takes again, are dropped."""
        _drop_unfinished_line(run.events)
        self._events = run.events.open("a", encoding="utf-8")
        self._tensorboard = SummaryWriter(str(run.tensorboard), purge_step=step + 1 if step else None)

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


def _drop_unfinished_line(events: Path) -> None:
    """Cut off the half line that a killed process left: it is no event, and would spoil the next one."""
    if events.exists():
        whole = events.read_bytes()
        with events.open("r+b") as file:
            file.truncate(whole.rfind(b"\n") + 1)

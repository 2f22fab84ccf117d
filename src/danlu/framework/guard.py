"""Whether a step is taken: all ranks decide alike, from figures that all of them share."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any

PATIENCE = 10
"""Steps in a row with a loss or norm that is not finite before a run is given up."""


class DivergedError(RuntimeError):
    """Loss or gradient stayed infinite or not a number."""


class Judge:
    """Says whether a step is taken; gives up after too many in a row that were not."""

    def __init__(self, patience: int = PATIENCE) -> None:
        self.patience = patience
        self.skipped = 0

    def commit(self, loss: float, norm: float) -> bool:
        """Whether loss and norm are finite, and the step may be taken."""
        finite = isfinite(loss) and isfinite(norm)
        self.skipped = 0 if finite else self.skipped + 1
        return finite

    def check(self, loss: float, norm: float, step: int) -> None:
        """Raise `DivergedError` if too many steps in a row were not taken, up to step number `step`."""
        if self.skipped >= self.patience:
            raise DivergedError(
                f"loss {loss} and gradient norm {norm} must be finite, but were not for {self.skipped} steps "
                f"up to step {step} on all ranks; lower the learning rate, or resume from an earlier checkpoint"
            )


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Turn the first interrupt or termination into a wish to stop after the step; a second one ends at once."""
    asked: list[int] = []

    def ask(number: int, _frame: Any) -> None:
        asked.append(number)
        for each, handler in before.items():
            signal.signal(each, handler)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, ask)
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

"""Whether to apply a step: all ranks decide alike, from global metrics. And the stop signal."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import isfinite
from typing import Any

MAX_NONFINITE_STEPS = 10
"""Consecutive steps with a non-finite loss or norm before a run ends."""


class DivergedError(RuntimeError):
    """Loss or gradient norm stayed non-finite."""


class NonFiniteGuard:
    """Skips steps with a non-finite loss or norm; raises after too many in a row."""

    def __init__(self, patience: int = MAX_NONFINITE_STEPS) -> None:
        self.patience = patience
        self.consecutive_skips = 0

    def accept_step(self, loss: float, norm: float, overflow: bool = False) -> bool:
        """Whether loss and norm are finite, so that the step may be applied.

        Where it may be an `overflow` of fp16, a step that is not finite is skipped without being counted.
        """
        finite = isfinite(loss) and isfinite(norm)
        if finite:
            self.consecutive_skips = 0
        elif not overflow:
            self.consecutive_skips += 1
        return finite

    def raise_if_diverged(self, loss: float, norm: float, step: int) -> None:
        """Raise `DivergedError` if too many steps in a row, up to `step`, were skipped."""
        if self.consecutive_skips >= self.patience:
            raise DivergedError(
                f"loss {loss} and gradient norm {norm} must be finite, but were not for {self.consecutive_skips} steps "
                f"up to step {step} on all ranks; lower the learning rate, or resume from an earlier checkpoint"
            )


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Turn the first SIGINT or SIGTERM into a request to stop after the current step; a second one ends at once."""
    requests: list[int] = []

    def request_stop(number: int, _frame: Any) -> None:
        requests.append(number)
        for each, handler in before.items():
            signal.signal(each, handler)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, request_stop)
    try:
        yield lambda: bool(requests)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

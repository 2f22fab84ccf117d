"""Whether a step's loss or gradient norm is beyond what the run itself has shown: arithmetic over global metrics.

Each metric is compared with the median of its last few accepted values. How far values usually lie from that median is
known from the last `window` accepted steps, by the median and the MAD of those distances, which a few outliers do not
move. A step is a spike if it lies more than `threshold` robust standard deviations above what is expected. Only what is
above counts: a loss that falls is no problem.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import exp, inf, isfinite, log
from typing import Literal

from danlu.spec.spikes import TREND_STEPS, SpikeConfig

SIGMAS_PER_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
MIN_LOSS_SIGMA = 0.002
"""Smallest standard deviation assumed of the loss, as a share of its level: one that repeats itself has none."""
MIN_LOG_NORM_SIGMA = 0.2
"""The same of the norm's logarithm: odd batches have several times the usual norm, and clipping takes care of them."""
MOST_LOG_LIMIT = 69.0
"""Of a limit's logarithm: no norm of a fp32 gradient is usual beyond 10^30, and an event's figures end there."""
SMALLEST_NORM = 1e-30
"""In place of a norm of 0, which has no logarithm."""


@dataclass(frozen=True)
class Spike:
    """A metric that was beyond the run's own statistics."""

    metric: Literal["loss", "norm"]
    value: float
    expected: float
    """The value that the last steps let expect."""
    limit: float
    """The largest value that is no spike."""
    sigmas: float
    """How far the value is above the expected one, in robust standard deviations; infinite if it is not finite."""


class SpikeDetector:
    """Learns from accepted steps what loss and norm are usual, and finds what is not.

    Every rank has the same metrics and so the same statistics: the ranks agree without a message.
    """

    def __init__(self, config: SpikeConfig) -> None:
        self.threshold = config.threshold
        self._loss = _Residuals(config)
        self._log_norm = _Residuals(config)

    def find(self, loss: float, norm: float) -> Spike | None:
        """The metric that is furthest beyond its limit; None if neither is, or too few steps were accepted to tell."""
        usual_loss, usual_log_norm = self._loss.usual(), self._log_norm.usual()
        if usual_loss is None or usual_log_norm is None:
            return None
        center, sigma = usual_loss
        sigma = max(sigma, MIN_LOSS_SIGMA * abs(center))
        by_loss = Spike("loss", loss, center, center + self.threshold * sigma, _sigmas(loss, center, sigma))
        center, sigma = usual_log_norm
        sigma = max(sigma, MIN_LOG_NORM_SIGMA)
        sigmas = _sigmas(_log(norm), center, sigma)
        limit = exp(min(center + self.threshold * sigma, MOST_LOG_LIMIT))
        by_norm = Spike("norm", norm, exp(center), limit, sigmas)
        worst = max(by_loss, by_norm, key=lambda spike: spike.sigmas)
        return worst if worst.sigmas > self.threshold else None

    def accept(self, loss: float, norm: float) -> None:
        """Learn from a step that is usual; both values are finite."""
        self._loss.append(loss)
        self._log_norm.append(_log(norm))

    def dump(self) -> dict[str, list[float]]:
        """What it has learned, for `restore`."""
        return {"loss": list(self._loss.values), "log_norm": list(self._log_norm.values)}

    def restore(self, learned: Mapping[str, Iterable[float]]) -> None:
        """Know what `dump` returned and nothing else; nothing at all if it is empty."""
        self._loss.refill(learned.get("loss", ()))
        self._log_norm.refill(learned.get("log_norm", ()))


class _Residuals:
    """The last values of a metric, and how far each was from the median of those before it."""

    def __init__(self, config: SpikeConfig) -> None:
        self.values: deque[float] = deque(maxlen=TREND_STEPS + config.window)
        """As many as it takes to compute every residual again."""
        self._enough = config.steps_to_learn
        self._residuals: deque[float] = deque(maxlen=config.window)
        self._sorted: list[float] = []

    def append(self, value: float) -> None:
        """Add the value of an accepted step."""
        if len(self.values) >= TREND_STEPS:
            if len(self._residuals) == self._residuals.maxlen:
                del self._sorted[bisect_left(self._sorted, self._residuals[0])]
            residual = value - self._level()
            self._residuals.append(residual)
            insort(self._sorted, residual)
        self.values.append(value)

    def usual(self) -> tuple[float, float] | None:
        """The value to expect next and its robust standard deviation; None as long as too few values are known."""
        if len(self.values) < self._enough:
            return None
        middle = _median(self._sorted)
        deviations = sorted(abs(residual - middle) for residual in self._sorted)
        return self._level() + middle, SIGMAS_PER_MAD * _median(deviations)

    def refill(self, values: Iterable[float]) -> None:
        """Know these values and no others."""
        self.values.clear()
        self._residuals.clear()
        self._sorted.clear()
        for value in values:
            self.append(value)

    def _level(self) -> float:
        """The median of the last values."""
        last = len(self.values)
        return _median(sorted(self.values[number] for number in range(last - TREND_STEPS, last)))


def _median(ordered: list[float]) -> float:
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def _sigmas(value: float, center: float, sigma: float) -> float:
    return (value - center) / sigma if isfinite(value) else inf


def _log(norm: float) -> float:
    return log(max(norm, SMALLEST_NORM)) if isfinite(norm) else inf

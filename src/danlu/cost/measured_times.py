"""Measured times, interpolated between and extrapolated beyond the measured sizes."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from math import exp, log
from typing import NamedTuple

from danlu.spec.cluster import Chip, CollectiveAlgorithm, CollectiveCurve, CollectiveOp, OperatorName, TimingCurve


class InterpolatedCurve:
    """Seconds by size: linear between and beyond the measured points on logarithmic scales.

    Beyond the last point time grows at least linearly and at most with the power `steepest` of the size: 2 for
    operators, as attention does with the length, 1 for traffic. Below the first it falls at most linearly.
    """

    def __init__(self, curve: TimingCurve, steepest: float = 2.0) -> None:
        self._sizes = [log(size) for size in curve.sizes]
        self._seconds = [log(seconds) for seconds in curve.seconds]
        steps = zip(self._sizes, self._sizes[1:], self._seconds, self._seconds[1:], strict=False)
        slopes = [(after - before) / (right - left) for left, right, before, after in steps]
        self._slopes = [min(1.0, max(0.0, slopes[0])), *slopes, min(steepest, max(1.0, slopes[-1]))]

    def seconds_at(self, size: float) -> float:
        """Seconds at a size; 0 for an empty one."""
        if size <= 0:
            return 0.0
        log_size = log(size)
        after = bisect_right(self._sizes, log_size)
        anchor = max(0, after - 1)
        return exp(self._seconds[anchor] + self._slopes[after] * (log_size - self._sizes[anchor]))


class OperatorTimes:
    """Measured times of the operators of one chip in one precision."""

    def __init__(self, curves: Mapping[OperatorName, TimingCurve]) -> None:
        self._lines = {operator: InterpolatedCurve(curve) for operator, curve in curves.items()}

    def seconds(self, operator: OperatorName, size: float, times: float = 1.0) -> float:
        """Seconds of `times` runs of an operator of this size each."""
        return times * self._lines[operator].seconds_at(size)


def measured_operators(chip: Chip, dtype: str) -> OperatorTimes | None:
    """The operators of a chip in a precision, if all of them were measured."""
    curves = chip.operators.get(dtype)  # type: ignore[call-overload]
    return OperatorTimes(curves) if curves else None


class FastestCollective(NamedTuple):
    """How a collective runs fastest, and how long that takes."""

    seconds: float
    algorithm: CollectiveAlgorithm


class CollectiveTimes:
    """Measured times of the collectives of one network level."""

    def __init__(self, measured: Iterable[CollectiveCurve]) -> None:
        self._lines: dict[CollectiveOp, dict[int, list[tuple[CollectiveAlgorithm, InterpolatedCurve]]]] = {}
        for collective in measured:
            of_size = self._lines.setdefault(collective.operation, {}).setdefault(collective.ranks, [])
            of_size.append((collective.algorithm, InterpolatedCurve(collective, steepest=1.0)))

    def seconds(self, operation: CollectiveOp, ranks: int, size: float) -> float | None:
        """Seconds in a group of this many ranks, by the fastest algorithm; None if nothing was measured."""
        found = self.fastest(operation, ranks, size)
        return found.seconds if found else None

    def fastest(self, operation: CollectiveOp, ranks: int, size: float) -> FastestCollective | None:
        """The fastest algorithm in a group of this many ranks, from the measured group closest in size.

        A group of another size sends another share of the buffer: (n − 1) / n.
        """
        lines = self._lines.get(operation)
        if not lines:
            return None
        closest = min(lines, key=lambda measured: abs(log(measured / ranks)))
        share = (1 - 1 / ranks) / (1 - 1 / closest) if operation != "p2p" else 1.0
        return min(FastestCollective(share * line.seconds_at(size), name) for name, line in lines[closest])

"""Times that were measured on the machine itself, between and beyond the sizes at which they were."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from math import exp, log

from danlu.spec.cluster import Chip, Collective, Curve, Operation, Operator


class Line:
    """Seconds by size: straight between the measured points on logarithmic scales, and beyond them.

    Beyond the last point time grows at least with the size and at most with the power `steepest` of it: 2 for
    operators, as attention does with the length, 1 for traffic. Below the first it falls at most with the size.
    """

    def __init__(self, curve: Curve, steepest: float = 2.0) -> None:
        self._sizes = [log(size) for size in curve.sizes]
        self._seconds = [log(seconds) for seconds in curve.seconds]
        steps = zip(self._sizes, self._sizes[1:], self._seconds, self._seconds[1:], strict=False)
        slopes = [(after - before) / (right - left) for left, right, before, after in steps]
        self._slopes = [min(1.0, max(0.0, slopes[0])), *slopes, min(steepest, max(1.0, slopes[-1]))]

    def at(self, size: float) -> float:
        """Seconds at a size; nothing takes nothing."""
        if size <= 0:
            return 0.0
        place = log(size)
        after = bisect_right(self._sizes, place)
        anchor = max(0, after - 1)
        return exp(self._seconds[anchor] + self._slopes[after] * (place - self._sizes[anchor]))


class OperatorTimes:
    """What the operators of one chip were measured to take in one precision."""

    def __init__(self, curves: Mapping[Operator, Curve]) -> None:
        self._lines = {operator: Line(curve) for operator, curve in curves.items()}

    def of(self, operator: Operator, size: float, times: float = 1.0) -> float:
        """Seconds of `times` runs of an operator of this size each."""
        return times * self._lines[operator].at(size)


def operator_times(chip: Chip, dtype: str) -> OperatorTimes | None:
    """The operators of a chip in a precision, if all of them were measured."""
    curves = chip.operators.get(dtype)  # type: ignore[call-overload]
    return OperatorTimes(curves) if curves else None


class CollectiveTimes:
    """What the operations of one level of the network were measured to take."""

    def __init__(self, measured: Iterable[Collective]) -> None:
        self._lines: dict[Operation, list[tuple[int, Line]]] = {}
        for collective in measured:
            self._lines.setdefault(collective.operation, []).append((collective.ranks, Line(collective, steepest=1.0)))

    def of(self, operation: Operation, ranks: int, size: float) -> float | None:
        """Seconds in a group of so many ranks, from the measured group closest in size; None if there is none.

        A group of another size sends another share of the buffer: (n − 1) / n of it.
        """
        lines = self._lines.get(operation)
        if not lines:
            return None
        closest, line = min(lines, key=lambda entry: abs(log(entry[0] / ranks)))
        share = (1 - 1 / ranks) / (1 - 1 / closest) if operation != "p2p" else 1.0
        return share * line.at(size)

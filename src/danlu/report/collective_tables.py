"""The algorithms of collectives by measured time: which is fastest at which sizes, and by how much."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from rich.table import Table

from danlu.cost.measured_times import CollectiveTimes
from danlu.report.formatting import size
from danlu.spec.cluster import Cluster, CollectiveCurve, NetworkLevel


@dataclass(frozen=True)
class AlgorithmChoiceRow:
    """The fastest algorithm of a collective in groups of one kind, over some sizes in a row."""

    level: str
    """The outermost level of the network that the groups cross."""
    ranks: int
    operation: str
    smallest: float
    """Bytes of the buffer, of the sizes that were measured."""
    largest: float
    algorithm: str
    seconds: float
    """At the largest of these sizes."""
    others: dict[str, float]
    """The other algorithms' time there, over this one's."""


def algorithm_choices(cluster: Cluster) -> list[AlgorithmChoiceRow]:
    """What `danlu comm tune` found: the fastest algorithm of every collective, by size."""
    return [row for level in cluster.levels for row in _of_level(level)]


def _of_level(level: NetworkLevel) -> Iterator[AlgorithmChoiceRow]:
    named = [curve for curve in level.collectives if curve.algorithm != "default"]
    kinds = list(dict.fromkeys((curve.ranks, curve.operation) for curve in named))
    for ranks, operation in kinds:
        curves = [curve for curve in named if (curve.ranks, curve.operation) == (ranks, operation)]
        sizes = sorted({each for curve in curves for each in curve.sizes})
        times = CollectiveTimes(curves)
        fastest = [(each, times.fastest(operation, ranks, each)) for each in sizes]
        found = [(each, best) for each, best in fastest if best is not None]
        for algorithm, run in groupby(found, key=lambda entry: entry[1].algorithm):
            sizes_of_run = [each for each, _ in run]
            others = _seconds(curves, sizes_of_run[-1])
            mine = others.pop(algorithm)
            yield AlgorithmChoiceRow(
                level=level.name,
                ranks=ranks,
                operation=operation,
                smallest=sizes_of_run[0],
                largest=sizes_of_run[-1],
                algorithm=algorithm,
                seconds=mine,
                others={name: seconds / mine for name, seconds in others.items()},
            )


def _seconds(curves: Sequence[CollectiveCurve], of_size: float) -> dict[str, float]:
    found: dict[str, float] = {}
    for curve in curves:
        seconds = CollectiveTimes([curve]).seconds(curve.operation, curve.ranks, of_size)
        assert seconds is not None
        found[curve.algorithm] = seconds
    return found


def choices_table(rows: Sequence[AlgorithmChoiceRow]) -> Table:
    """For a terminal; a collective's sizes from small to large."""
    table = Table("level", "ranks", "collective", "buffer", "runs by")
    table.add_column("takes", justify="right")
    table.add_column("because")
    last: tuple[str, int, str] | None = None
    for row in rows:
        key = row.level, row.ranks, row.operation
        names = (row.level, str(row.ranks), row.operation.replace("_", "-")) if key != last else ("", "", "")
        span = size(row.largest) if row.smallest == row.largest else f"{size(row.smallest)} to {size(row.largest)}"
        because = ", ".join(f"{name} takes {times:.2f} ×" for name, times in row.others.items())
        table.add_row(*names, span, row.algorithm, _time(row.seconds), because or "there is no other")
        last = key
    return table


def choices_json(rows: Sequence[AlgorithmChoiceRow]) -> list[dict[str, Any]]:
    """For machines."""
    return [asdict(row) for row in rows]


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"

"""`danlu ops`: the operators of a recipe, what computes them, and how long each implementation takes."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from danlu.report.formatting import MISSING
from danlu.spec.operator_table import OperatorTable, RoutedOperator


@dataclass(frozen=True)
class ImplementationRow:
    """One implementation of one operator of a recipe."""

    operator: RoutedOperator
    implementation: str
    about: str
    runs: bool
    """It is the one that runs."""
    why: str
    """Why it runs, or why it does not."""
    seconds: float | None = None
    """Of all calls in a step of a rank."""
    gain: float | None = None
    """How many times faster it is than the operators of torch."""


def implementations_table(rows: Sequence[ImplementationRow]) -> Table:
    """All implementations, those that run first in bold."""
    measured = any(row.seconds is not None for row in rows)
    table = Table("operator", "implementation", "runs", "why")
    if measured:
        table.add_column("per step", justify="right")
        table.add_column("× torch", justify="right")
    last = ""
    for row in rows:
        figures = [
            MISSING if row.seconds is None else _milliseconds(row.seconds),
            MISSING if row.gain is None else f"{row.gain:.2f}",
        ]
        table.add_row(
            row.operator if row.operator != last else "",
            row.implementation,
            "yes" if row.runs else "",
            row.why,
            *(figures if measured else []),
            style="bold" if row.runs else "dim",
        )
        last = row.operator
    return table


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def calls_table(table: OperatorTable) -> Table:
    """Every measured call of the recipe."""
    names = list(dict.fromkeys(name for call in table.calls for name in call.seconds))
    made = Table("operator", "shape")
    for column in (*(f"{name}, one call" for name in names), "calls"):
        made.add_column(column, justify="right")
    for call in table.calls:
        if call.calls:
            times = [_milliseconds(call.seconds[name]) if name in call.seconds else MISSING for name in names]
            made.add_row(
                f"{call.operator}{' backward' if call.backward else ''}", call.inputs[0], *times, f"{call.calls:,}"
            )
    return made

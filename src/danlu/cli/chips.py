"""`danlu chips`: the supported chips, and which of them are available here."""

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from danlu.cli.json_output import print_json
from danlu.report.formatting import MISSING, size
from danlu.report.terminal import Console

if TYPE_CHECKING:
    from danlu.chips import ChipDescriptor


def chips(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the chips this installation supports, and why some cannot be used here."""
    from danlu.chips import list_chips as declared

    rows = [_figures(chip) for chip in declared().values()]
    if as_json:
        print_json(rows)
        return
    # A pipe has no width: without this rich would cut the columns at 80.
    console = Console() if Console().is_terminal else Console(width=160)
    console.print(_table(rows))


def _figures(chip: "ChipDescriptor") -> dict[str, Any]:
    available = chip.runtime.is_available()
    return {
        "name": chip.name,
        "available": available,
        "why_not": chip.runtime.unavailable_reason(),
        "devices": chip.runtime.device_count(),
        "backend": chip.backend,
        "memory": chip.runtime.memory_total() if available else None,
    }


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table()
    for column in ("chip", "available", "devices", "collectives", "memory"):
        right = column in ("devices", "memory")
        table.add_column(column, justify="right" if right else "left", no_wrap=column != "available")
    for row in rows:
        available = "[green]yes[/]" if row["available"] else f"no: {row['why_not']}"
        table.add_row(row["name"], available, str(row["devices"]), row["backend"] or MISSING, size(row["memory"]))
    return table

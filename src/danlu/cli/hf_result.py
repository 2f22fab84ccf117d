"""Shared by `danlu import hf` and `danlu export hf`: the progress bar, the comparison with transformers, the table."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from danlu.cli.json_output import print_json
from danlu.cost import count_parameters
from danlu.report.formatting import count
from danlu.report.terminal import Console
from danlu.spec.model import Model

if TYPE_CHECKING:
    from danlu.framework.decoder.decoder import Decoder
    from danlu.framework.hf.layout import LayoutCheck

Tolerance = Annotated[
    float | None, typer.Option(min=0.0, help="Largest accepted difference of logits in fp32; default: 1e-4.")
]
Compare = Annotated[bool, typer.Option("--compare/--no-compare", help="Compare logits with transformers at the end.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]

_NOT_COMPARED = "the comparison with transformers was not made"


@contextmanager
def weights_progress() -> Iterator[Callable[[int, int], None]]:
    """A transient progress bar over the bytes of weights, on standard error."""
    columns = (TextColumn("weights"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("weights", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def compare_and_report(
    figures: dict[str, Any],
    model: Model,
    hf: Path,
    make: "Callable[[], Decoder]",
    tolerance: float | None,
    wanted: bool,
    as_json: bool,
    layout: "list[LayoutCheck] | None" = None,
) -> int:
    """Compare logits if requested and possible, print the result, and return the exit code.

    `layout` is what loaders need of the folder: it is printed too, and what is wrong there fails as well.
    """
    from danlu.framework.hf.compare import LOGIT_TOLERANCE

    tolerance = LOGIT_TOLERANCE if tolerance is None else tolerance
    figures |= {"model": model.name, "parameters": count_parameters(model), "tolerance": tolerance}
    figures |= _comparison(model, hf, make) if wanted else {"compared": False}
    if not wanted:
        typer.echo(f"{_NOT_COMPARED}, because of --no-compare", err=True)
    same = not figures["compared"] or figures["max_difference"] <= tolerance
    wrong = [check.name for check in layout or [] if check.state == "wrong"]
    if as_json:
        listed = {"layout": [vars(check) for check in layout]} if layout is not None else {}
        print_json(figures | listed | {"good": same and not wrong})
    else:
        Console().print(_table(figures))
        if layout is not None:
            Console().print(_layout_table(layout))
    if wrong:
        typer.echo(f"loaders would fail or misread {', '.join(wrong)}: do not use it", err=True)
    if not same:
        largest = figures["max_difference"]
        typer.echo(f"logits must differ by at most {tolerance:g}, but do by {largest:.2e}: do not use it", err=True)
    return 0 if same and not wrong else 1


def _comparison(model: Model, hf: Path, make: "Callable[[], Decoder]") -> dict[str, Any]:
    from danlu.framework.hf.compare import compare_logits

    try:
        import transformers
    except ImportError:
        typer.echo(f"{_NOT_COMPARED}, because it is not installed: pip install 'danlu[hf]'", err=True)
        return {"compared": False}
    # Of its terminal output only errors are useful here.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    found = compare_logits(hf, model, make)
    return {
        "compared": True,
        "transformers": transformers.__version__,
        "tokens": found.tokens,
        "max_difference": found.max_difference,
        "top1_agreement": found.top1_agreement,
    }


def _table(figures: dict[str, Any]) -> Table:
    table = Table(title=figures["folder"], show_header=False, title_justify="left")
    rows = {
        "architecture": figures["architecture"],
        "parameters": count(figures["parameters"]),
    }
    if figures["compared"]:
        rows |= {
            "compared with": f"transformers {figures['transformers']}, {figures['tokens']:,} random tokens, fp32",
            "max |Δ| of logits": f"{figures['max_difference']:.2e} (tolerance {figures['tolerance']:g})",
            "top-1 agreement": f"{figures['top1_agreement']:.2%}",
        }
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


_STATE_STYLES = {"ok": "green", "missing": "yellow", "wrong": "red", "note": "dim"}


def _layout_table(layout: "list[LayoutCheck]") -> Table:
    """What loaders need, one row each."""
    table = Table(title="what transformers and vLLM read", title_justify="left", show_header=False)
    for check in layout:
        table.add_row(check.name, Text(check.state, _STATE_STYLES[check.state]), Text(check.detail))
    return table

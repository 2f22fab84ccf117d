"""Progress bars of the planner's searches, on stderr."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from danlu.planner import PlanRequest, SearchResult, search
from danlu.planner.deadline import DeadlineProgress
from danlu.planner.pricing import PlanPricer
from danlu.planner.ties import TIE_WIDTH
from danlu.report.terminal import Console


def _bar() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def search_with_progress(
    request: PlanRequest,
    shown: int,
    *,
    within: float = inf,
    tie_width: float = TIE_WIDTH,
    pricer: PlanPricer | None = None,
) -> SearchResult:
    """Search with a bar that shows how much of the proof is done."""
    with _bar() as bar:
        task = bar.add_task(f"{request.chips:,} chips", total=1.0)

        def report_progress(share: float, opened: int) -> None:
            words = "listing layouts" if share == 0 else "proving the best"
            bar.update(task, completed=min(1.0, share), description=f"{request.chips:,} chips, {words}: {opened:,}")

        return search(request, shown, report_progress, within, tie_width=tie_width, pricer=pricer)


@contextmanager
def deadline_bar() -> Iterator[DeadlineProgress]:
    """A bar over numbers of nodes; searches meanwhile show none, since there can be only one."""
    with _bar() as bar:
        task = bar.add_task("", total=None)

        def report_progress(chips: int, place: int, numbers: int) -> None:
            words = f"{chips:,} chips, {place + 1:,} of {numbers:,} numbers of nodes"
            bar.update(task, completed=place, total=numbers, description=words)

        yield report_progress

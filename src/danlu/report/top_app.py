"""The terminal application of `danlu top`; needs textual."""

from typing import ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import DataTable, Footer, RichLog, Static

from danlu.report import formatting
from danlu.report.live_view import LiveRun, RankRow, event_line, headline
from danlu.resilience.straggler_watch import SLOW_SHARE

REFRESH_SECONDS = 0.5
LOOK_SECONDS = 0.1
COLUMNS = ("rank", "place", "process", "step", "phase", "for", "others wait for it", "is in")


class TopApp(App[None]):
    """A headline, the ranks of this host, and what happened."""

    CSS = """
    #headline { height: 3; padding: 0 1; }
    #ranks { height: 2fr; }
    #events { height: 1fr; border-top: solid $panel; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("w", "toggle_order", "who is waited for first"),
    ]

    def __init__(self, live: LiveRun) -> None:
        super().__init__()
        self.live = live
        self.by_waiting = False
        self._rows: list[RankRow] = []

    def compose(self) -> ComposeResult:
        """The parts of the screen, from above."""
        yield Static(id="headline")
        yield DataTable(id="ranks", cursor_type="row", zebra_stripes=True)
        yield RichLog(id="events", wrap=True)
        yield Footer()

    def on_mount(self) -> None:
        """Draw, and look at the run now and then."""
        self.query_one(DataTable).add_columns(*COLUMNS)
        self.set_interval(LOOK_SECONDS, self._look)
        self.set_interval(REFRESH_SECONDS, self._draw)
        self._look()
        self._draw()

    def action_toggle_order(self) -> None:
        """Order the ranks by how long the others wait for them, or by number."""
        self.by_waiting = not self.by_waiting
        self._draw()

    def _look(self) -> None:
        self._rows = self.live.rows()

    def _draw(self) -> None:
        for event in self.live.poll():
            if (line := event_line(event)) is not None:
                self.query_one(RichLog).write(line)
        self.query_one("#headline", Static).update(headline(self.live.run.name, self.live.history))
        table = self.query_one(DataTable)
        table.clear()
        for row in sorted(self._rows, key=lambda row: -row.share) if self.by_waiting else self._rows:
            table.add_row(*_cells(row))


def _cells(row: RankRow) -> list[Text]:
    style = "red" if row.process != "runs" or row.share > SLOW_SHARE else ""
    words = (
        f"{row.rank:,}",
        row.place,
        row.process,
        f"{row.step:,}",
        row.phase,
        formatting.duration(row.seconds),
        f"{row.share:.0%}",
        row.collective,
    )
    return [Text(word, style=style) for word in words]

"""Read events as they are written: every call returns the new ones since the last."""

import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from danlu.spec import Event, Problem
from danlu.spec.event import parse_event, parse_events, unknown_kind
from danlu.spec.problem import problem_at

MAX_PROBLEMS = 200
"""Invalid lines after which reading stops."""
_READ_BYTES = 1 << 20
"""Bytes per read; longer than any event."""
_PARSED_TOGETHER = 1000
"""Lines that are parsed at once: faster than one by one, but for invalid ones, whose errors are all collected first."""
_WARNING_STARTS = (b'{"kind":"warning"', b'{"kind": "warning"')
"""How the line of a warning starts, as Danlu writes it and as other programs do."""


@contextmanager
def _without_gc() -> Iterator[None]:
    """Pause the garbage collector, which would walk a million new events again and again: half of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class EventTail:
    """Reads a growing `events.jsonl` from where it stopped; a line still being written waits for the next call.

    An invalid line does not stop the reader, because the run continues all the same: it is recorded in `problems`
    for the report. A line of a kind that only a newer Danlu knows is skipped and counted in `unknown`. With
    `most_warnings`, warnings beyond so many are not parsed but counted in `warnings_left_out`.
    """

    def __init__(self, path: Path, most_warnings: int | None = None) -> None:
        self.path = path
        self.most_warnings = most_warnings
        self.problems: list[Problem] = []
        self.unknown: Counter[str] = Counter()
        self.warnings_left_out = 0
        self._warnings = 0
        self._offset = 0
        self._line = 0

    def poll(self) -> list[Event]:
        """Every complete event written since the last call; none while the file does not exist."""
        if not self.path.is_file():
            return []
        events: list[Event] = []
        with _without_gc(), self.path.open("rb") as file:
            file.seek(self._offset)
            while len(self.problems) <= MAX_PROBLEMS and (fresh := file.read(_READ_BYTES)):
                complete = fresh[: fresh.rfind(b"\n") + 1]
                if not complete and len(fresh) == _READ_BYTES:
                    complete = fresh  # longer than any event
                self._offset += len(complete)
                events += self._parse_all(complete.splitlines())
                if len(self.problems) >= MAX_PROBLEMS:
                    self._give_up()
                    return events
                if len(fresh) < _READ_BYTES:
                    break
                file.seek(self._offset)
        return events

    def _parse_all(self, lines: list[bytes]) -> list[Event]:
        """The events among these lines, up to where too many are invalid."""
        events: list[Event] = []
        for start in range(0, len(lines), _PARSED_TOGETHER):
            together = lines[start : start + _PARSED_TOGETHER]
            parsed = self._without_warnings(together)
            try:
                events += parse_events(parsed)
                self._line += len(together)
                self.warnings_left_out += len(together) - len(parsed)
            except ValidationError:
                for line in together:
                    if (event := self._parse(line)) is not None:
                        events.append(event)
                    elif len(self.problems) >= MAX_PROBLEMS:
                        return events
        return events

    def _without_warnings(self, lines: list[bytes]) -> list[bytes]:
        """The lines without warnings, once there were enough; the last line stays, for the time that it carries."""
        if self.most_warnings is None:
            return lines
        if self._warnings < self.most_warnings:
            self._warnings += sum(line.startswith(_WARNING_STARTS) for line in lines)
            return lines
        return [line for line in lines[:-1] if not line.startswith(_WARNING_STARTS)] + lines[-1:]

    def _give_up(self) -> None:
        """A file with so many invalid lines is not an event file: reading on is useless."""
        message = f"follows {MAX_PROBLEMS:,} invalid lines: reading stopped"
        self.problems.append(
            problem_at(self.path, self._line + 1, "line", message, "is it the file of a run's events?")
        )

    def _parse(self, line: bytes) -> Event | None:
        self._line += 1
        try:
            return parse_event(line)
        except ValidationError as error:
            if (kind := unknown_kind(error)) is not None:
                self.unknown[kind] += 1
                return None
            detail = error.errors(include_url=False, include_context=False, include_input=False)[0]
            key = ".".join(str(item) for item in detail["loc"]) or "line"
            message = f"is not an event: {detail['msg']}"
        hint = "this line is missing from the report; the rest is complete"
        self.problems.append(problem_at(self.path, self._line, key, message, hint))
        return None

"""Events as they are written: every call gives what is new since the last."""

from pathlib import Path

from pydantic import ValidationError

from danlu.spec import Event, Problem
from danlu.spec.event import parse_event
from danlu.spec.problem import problem_at


class EventTail:
    """Reads a growing `events.jsonl` from where it stopped; a line still being written waits for the next call.

    A line that is no event never stops the reader, because the run goes on all the same: it is
    kept in `problems` for whoever shows the run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.problems: list[Problem] = []
        self._offset = 0
        self._line = 0

    def new(self) -> list[Event]:
        """Every complete event written since the last call; none while the file does not exist."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            fresh = file.read()
        complete = fresh[: fresh.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [event for line in complete.splitlines() if (event := self._parse(line)) is not None]

    def _parse(self, line: bytes) -> Event | None:
        self._line += 1
        try:
            return parse_event(line.decode())
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            key = ".".join(str(part) for part in detail["loc"]) or "line"
            message = f"is no event: {detail['msg']}"
        except UnicodeDecodeError as error:
            key, message = "line", f"is no event: {error}"
        hint = "what this line said is missing from the report; the rest is complete"
        self.problems.append(problem_at(self.path, self._line, key, message, hint))
        return None

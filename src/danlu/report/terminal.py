"""All output to the terminal: control characters in text are escaped."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any, TextIO

from rich import console as rich_console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from danlu.spec.text import printable


class Console(rich_console.Console):
    """rich's console: its own styles reach the terminal, control characters in texts are escaped."""

    @property
    def file(self) -> IO[str]:
        """The stream below all that escape: while something live is shown, rich puts a stream of its own over ours."""
        found = super().file
        return found.rich_proxied_file if isinstance(found, EscapingStream) else found

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of a renderable, escaped."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style)

    def print_line(self, text: str, style: str = "") -> None:
        """Print a text as it is, in one line: no markup, and no line break that would cut a path."""
        self.print(Text(text, style), soft_wrap=True)


def print_warning(message: str) -> None:
    """Warn the user, on standard error."""
    Console(stderr=True).print_line(f"warning: {message}")


class EscapingStream:
    """A stream that escapes control characters; a `Console` bypasses it, because it escapes them itself."""

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream  # the name under which rich looks for the stream below

    def write(self, text: str) -> int:
        """Write a text, escaped."""
        if not isinstance(text, str):
            raise TypeError(f"text must be str, but is {type(text).__name__}")
        self.rich_proxied_file.write(printable(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several texts, escaped."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextmanager
def escape_streams() -> Iterator[None]:
    """Everything printed inside goes through `EscapingStream`."""
    out, errors = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _escaping(out), _escaping(errors)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, errors


def _escaping(stream: TextIO) -> Any:
    return stream if isinstance(stream, EscapingStream) else EscapingStream(stream)

"""Every stop of the tour is the line it quotes.

python tests/architecture/test_tour.py     # writes the line numbers again, after code has moved
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "tour.md"
STOP = re.compile(r'<a href="\.\./(?P<file>[^"#]+)#L(?P<line>\d+)"><code>(?P<code>[^<]+)</code></a>')


def line_of(file: str, code: str) -> int:
    """The one line of a file that begins with this code."""
    lines = (ROOT / file).read_text("utf-8").splitlines()
    found = [number for number, line in enumerate(lines, 1) if line.strip().startswith(code)]
    assert len(found) == 1, f"{code!r} must begin one line of {file}, but begins {len(found)}"
    return found[0]


@pytest.mark.parametrize("stop", [*STOP.finditer(PAGE.read_text("utf-8"))], ids=lambda stop: stop["file"])
def test_a_stop_is_the_line_it_quotes(stop: re.Match[str]) -> None:
    assert int(stop["line"]) == line_of(stop["file"], stop["code"]), "run python tests/architecture/test_tour.py"


def test_there_are_stops() -> None:
    assert len(STOP.findall(PAGE.read_text("utf-8"))) > 10


def main() -> None:
    """Write the numbers again."""

    def renumbered(stop: re.Match[str]) -> str:
        return stop[0].replace(f"#L{stop['line']}", f"#L{line_of(stop['file'], stop['code'])}")

    PAGE.write_text(STOP.sub(renumbered, PAGE.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()

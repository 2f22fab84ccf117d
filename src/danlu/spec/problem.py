"""What is wrong with a file: where, which value, what was expected, and the nearest valid name."""

from difflib import get_close_matches
from pathlib import Path
from typing import Any

from danlu.spec.description import Description


class Problem(Description):
    """One thing to mend, with its place."""

    file: str
    line: int
    key: str
    """Dotted path of the setting."""
    message: str
    """The value, and what was expected instead."""
    suggestion: str = ""
    """What to do; the nearest valid name, or the smallest change."""

    def __str__(self) -> str:
        text = f"{self.file}:{self.line}: {self.key}: {self.message}"
        return f"{text}\n    → {self.suggestion}" if self.suggestion else text


class SpecError(Exception):
    """A file cannot be used; carries every problem found, not just the first."""

    def __init__(self, problems: list[Problem]) -> None:
        self.problems = problems
        super().__init__("\n".join(str(problem) for problem in problems))


def nearest(name: str, valid: list[str]) -> str:
    """A suggestion that names the valid name closest to `name`, or all of them if few and none is close."""
    if close := get_close_matches(name, valid, n=1, cutoff=0.5):
        return f"did you mean `{close[0]}`?"
    return f"one of: {', '.join(sorted(valid))}" if len(valid) <= 20 else ""


def dotted(key: tuple[str | int, ...]) -> str:
    """A key as a person writes it: `levels[0].latency`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key)
    return text.removeprefix(".")


def problem_at(path: Path, line: int, key: str, message: str, suggestion: str = "") -> Problem:
    """A problem in a file, by its place."""
    return Problem(file=str(path), line=line, key=key, message=message, suggestion=suggestion)


def shown(value: Any) -> str:
    """A value as it stands in the file, cut to what fits in a line."""
    text = f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "…"

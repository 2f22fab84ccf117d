"""A `config.json` as it was read."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from danlu.spec.problem import Problem, format_value, problem_at


@dataclass
class HFConfig:
    """A `config.json` as it was read, with the problems found in it."""

    path: Path
    text: str
    values: dict[str, Any]
    defaults: Mapping[str, Any]
    """The family's, for missing keys."""
    problems: list[Problem] = field(default_factory=list)

    def get(self, key: str) -> Any:
        """A value, or the family's default for a missing key."""
        return self.values.get(key, self.defaults.get(key))

    def problem(self, key: str, message: str, suggestion: str = "") -> Problem:
        """A problem with one key, at its line."""
        return problem_at(self.path, key_line(self.text, key), key, message, suggestion)

    def add_unsupported(self, key: str, supported: str, suggestion: str = "this model cannot be imported") -> None:
        """Add a problem: a value that is not supported, and what is."""
        message = f"is {format_value(self.get(key))}, but Danlu's model has {supported}"
        self.problems.append(self.problem(key, message, suggestion))


def key_line(text: str, key: str) -> int:
    """The line of a key; 1 if the file does not have it."""
    lines = text.splitlines()
    return next((number for number, line in enumerate(lines, start=1) if f'"{key}"' in line), 1)

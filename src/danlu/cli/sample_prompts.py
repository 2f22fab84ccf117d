"""Prompts of `danlu sample`: options, a file, or standard input."""

import json
from pathlib import Path
from typing import Any, TextIO

from danlu.cli.ckpt_ref import fail
from danlu.spec import SpecError
from danlu.spec.files import read_text
from danlu.spec.problem import format_value, problem_at

_FIELD = "prompt"


def read_prompts(given: list[str] | None, file: Path | None, standard_input: TextIO) -> list[str]:
    """All prompts in order, those of options first; without any, what is piped in, or one empty prompt."""
    found = list(given or [])
    if file is not None:
        found += _from_file(file)
    if found:
        return found
    return [""] if standard_input.isatty() else [_piped(standard_input)]


def _piped(stream: TextIO) -> str:
    try:
        return stream.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        fail(f"standard input is not text in UTF-8: {error.reason}")


def _from_file(file: Path) -> list[str]:
    try:
        lines = read_text(file).splitlines()
    except FileNotFoundError:
        raise SpecError(
            [problem_at(file, 1, "prompts", "does not exist", "a file with a prompt in every line")]
        ) from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise SpecError([problem_at(file, 1, "prompts", "has no prompt", "a prompt in every line")])
    return [_from_json(file, number, line) if file.suffix == ".jsonl" else line for number, line in numbered]


def _from_json(file: Path, number: int, line: str) -> str:
    try:
        value: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise SpecError([problem_at(file, number, "prompts", f"is not JSON: {error}", "an object a line")]) from None
    text = value.get(_FIELD) if isinstance(value, dict) else None
    if not isinstance(text, str):
        message = f"is {format_value(value)}, but must be an object with a text as its `{_FIELD}`"
        raise SpecError([problem_at(file, number, "prompts", message, '{"prompt": "…"}')])
    return text

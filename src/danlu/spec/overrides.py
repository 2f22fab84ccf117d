"""Overrides of a file's settings from the command line: `--set optimizer.learning_rate=1e-4`."""

import tomllib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from danlu.spec.problem import Problem, SpecError, format_key, format_value, problem_at
from danlu.spec.toml import KeyPath, TomlDocument

SET_OPTION = Path("--set")
"""Location of a problem with such a setting: the option and its number, instead of file and line."""
_FORM = "--set batch.sequences=64"


def apply_overrides(document: TomlDocument, settings: Sequence[str]) -> TomlDocument:
    """The document with these settings overridden; raises `SpecError` for one that cannot be parsed.

    A setting is a dotted key and a TOML value; a word that is no TOML value is a string, so that
    `precision.compute=bf16` needs no quotes. An element of a list is named by its index, from 0.
    """
    values, positions, problems = deepcopy(document.values), dict[KeyPath, int](), list[Problem]()
    for number, text in enumerate(settings, start=1):
        name, is_setting, value = text.partition("=")
        key = tuple(int(part) if part.isdecimal() else part for part in name.strip().split("."))
        if not is_setting or "" in key or not value.strip():
            message = f"{format_value(text)} must be a key and a value"
            problems.append(problem_at(SET_OPTION, number, name.strip() or "key", message, f"such as {_FORM}"))
        elif key in positions:
            message = f"is set twice: by the options {positions[key]} and {number}"
            problems.append(problem_at(SET_OPTION, number, format_key(key), message, "omit one"))
        elif problem := _put(values, key, _value(value.strip())):
            problems.append(problem_at(SET_OPTION, number, format_key(key), *problem))
        positions.setdefault(key, number)
    if problems:
        raise SpecError(problems)
    return replace(document, values=values, overrides=positions)


def _value(text: str) -> Any:
    try:
        found = tomllib.loads(f"value = {text}\n")
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    return found["value"] if list(found) == ["value"] else text


def _put(values: dict[str, Any], key: KeyPath, value: Any) -> tuple[str, str] | None:
    """Set a value, creating missing tables; or return the problem and a suggestion."""
    inside: Any = values
    for depth, part in enumerate(key):
        is_last = depth == len(key) - 1
        if isinstance(inside, list) and isinstance(part, int):
            if part >= len(inside):
                return f"is index {part} of a list of {len(inside)}, which begins with 0", "an index that exists"
        elif isinstance(inside, dict):
            part = str(part)
            if not is_last:
                inside.setdefault(part, {})
        else:
            return (
                f"is inside `{format_key(key[:depth])}`, which is {format_value(inside)} and not a table",
                "see `danlu schema recipe`",
            )
        if is_last:
            inside[part] = value
        else:
            inside = inside[part]
    return None

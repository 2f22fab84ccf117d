"""JSON on standard output, as every parser reads it."""

import json
from math import isfinite
from typing import Any

import typer


def print_json(value: Any, *, indent: int | None = 2) -> None:
    """Print a value; a number that is not finite, which JSON has no word for, is `null`."""
    typer.echo(json.dumps(_without_nan(value), indent=indent, ensure_ascii=False, allow_nan=False))


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    return [_without_nan(item) for item in value] if isinstance(value, list | tuple) else value

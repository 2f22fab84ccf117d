"""Built-in models and clusters: plain TOML files in the form a user writes, each with the source of its figures."""

from pathlib import Path
from typing import Literal


def catalogue(kind: Literal["models", "clusters"]) -> dict[str, Path]:
    """Every built-in entry of a kind, by name."""
    folder = Path(__file__).parent / kind
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}

"""The built-in catalog of models and clusters: plain TOML files as a user writes them, each with its source."""

from pathlib import Path
from typing import Literal


def catalog_entries(kind: Literal["models", "clusters"]) -> dict[str, Path]:
    """Every built-in entry of a kind, by name."""
    folder = Path(__file__).parent / kind
    return {file.stem: file for file in sorted(folder.glob("*.toml"))}

"""Snapshots: texts that a person has read and found right, held word for word."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "multiprocess"))  # what is compared, and how, is shared with them
SNAPSHOTS = Path(__file__).parent / "snapshots"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--snapshot-update", action="store_true", help="write what is printed now as what is expected")


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Hold a text against `snapshots/<name>.txt`; `pytest tests/unit --snapshot-update` writes it anew."""
    update = bool(request.config.getoption("--snapshot-update", default=False))

    def compare(name: str, text: str) -> None:
        path = SNAPSHOTS / f"{name}.txt"
        if update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), (
            f"{path} is missing; read the text and write it with `pytest tests/unit --snapshot-update`"
        )
        assert text == path.read_text(encoding="utf-8")

    return compare

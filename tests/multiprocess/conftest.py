"""The corpus that the tests with real ranks train on."""

from pathlib import Path

import pytest

from danlu.storage.data.build import build_dataset
from danlu.storage.data.tokenizer import BytesTokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scratch folder with token shards of these tests' own source."""
    folder = tmp_path_factory.mktemp("ranks")
    make_shards(folder)
    return folder


def make_shards(folder: Path) -> None:
    """Token shards of these tests' own source, in `shards`."""
    text = folder / "text.txt"
    text.write_text("".join(source.read_text() for source in sorted(Path(__file__).parent.glob("*.py"))))
    build_dataset([str(text)], folder / "shards", BytesTokenizer())

"""The corpus that the tests with real ranks train on."""

from pathlib import Path
from random import Random

import pytest

from danlu.storage.data.build import build_dataset
from danlu.storage.data.tokenizer import BytesTokenizer

VOCABULARY = """
a an the this each every no one two three old new small large early late hot cold quiet loud furnace kiln crucible ember
ash coal iron copper tin gold salt clay stone river bridge road tower harbour ship sail wind rain snow night morning
market letter lamp door wall garden field horse fox crane carp holds makes melts breaks carries follows finds leaves
brings turns keeps opens counts reads writes and or but while before after under over near beyond of to from without
丹炉 炉火 青铜 白银 山河 风雨 печь уголь железо мост ветер ночь
"""
"""Few enough that a tiny model learns something from a few steps; with bytes past 127, so that of a table that is split
by rows not all that is looked up lies on the first rank."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scratch folder with token shards of `corpus()`."""
    folder = tmp_path_factory.mktemp("ranks")
    make_shards(folder)
    return folder


def make_shards(folder: Path) -> None:
    """Token shards of `corpus()`, in `shards`."""
    text = folder / "text.txt"
    text.write_text(corpus())
    build_dataset([str(text)], folder / "shards", BytesTokenizer())


def corpus() -> str:
    """About 240 kB of text that never changes.

    Were it files of the project, an edit of theirs could flip two experts with nearly the same score.
    """
    random, words = Random(0), VOCABULARY.split()
    lines = (" ".join(random.choices(words, k=random.randint(3, 15))) for _ in range(4_500))
    return "".join(f"{line.capitalize()}.\n" for line in lines)

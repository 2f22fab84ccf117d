"""Packed documents with a mask train like the same documents one by one, at every layout, in fp32.

Only what is selected is trained: `pytest tests/multiprocess/test_documents.py -k "cp and tp"` takes seconds.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from chat_data import make_conversations, make_tokenizer
from deviations import FIGURES, gather, selected, summary
from documents_layouts import LAYOUTS, QUICK, Packed
from ranks import run_ranks
from tiers import tiered

from danlu.storage.data.build import build_dataset
from danlu.storage.data.tokenizer import BytesTokenizer, open_chat_template, open_tokenizer

pytestmark = pytest.mark.timeout(1600)  # the first test waits for all layouts, on a busy machine too
BAR = 1e-5
RANK = Path(__file__).parent / "documents_rank.py"

Results = dict[str, list[dict[str, Any]]]


def make_documents(folder: Path) -> None:
    """Token shards of documents from one letter to longer than a row of 32 tokens."""
    letters = random.Random(5)
    texts = ["".join(letters.choices("abcdefgh ", k=letters.choice((1, 2, 5, 9, 14, 40)))) for _ in range(400)]
    lines = folder / "documents.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    build_dataset([str(lines)], folder / "shards", BytesTokenizer())


def make_chat(folder: Path) -> None:
    """Token shards of conversations, with a loss mask."""
    file = make_tokenizer(folder / "tokenizer")
    make_conversations(folder / "talks.jsonl")
    tokenizer = open_tokenizer(str(file))
    template = open_chat_template(tokenizer, file)
    build_dataset([str(folder / "talks.jsonl")], folder / "chat", tokenizer, field="messages", template=template)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("documents")
    make_documents(folder)
    make_chat(folder)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path, request: pytest.FixtureRequest, report: Callable[[dict[str, Any]], None]) -> Results:
    """What every rank of the selected layouts found."""
    names = selected(request)
    chosen = [layout for layout in LAYOUTS if layout.name in names]
    run_ranks(RANK, max(each.plan.degrees.world for each in chosen), str(folder), json.dumps(names), seconds=1500)
    told = [json.loads(file.read_text()) for file in folder.glob("documents-*.json")]
    found = {layout.name: [each for each in told if each["name"] == layout.name] for layout in chosen}
    if len(chosen) == len(LAYOUTS):
        ranks = {layout.name: layout.plan.degrees.world for layout in LAYOUTS}
        report(summary({name: gather(found[name], world) for name, world in ranks.items()}, ranks, BAR))
    return found


@pytest.mark.parametrize("layout", tiered(LAYOUTS, QUICK))
def test_packed_documents_train_like_each_alone(layout: Packed, results: Results, folder: Path) -> None:
    found = gather(results[layout.name], layout.plan.degrees.world)
    assert all(found[figure] <= BAR for figure in FIGURES), found
    expected = json.loads((folder / f"{layout.reference}-told.json").read_text())
    assert all(count < 8 * 32 for count in expected["counted"]), "every token of a batch counted: nothing was tested"
    for each in results[layout.name]:
        assert each["counted"] == expected["counted"]
        assert each["held-out"] == pytest.approx(expected["held-out"], rel=BAR)
        assert each["held-out counted"] == expected["held-out counted"]

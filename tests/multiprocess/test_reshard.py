"""What any layout saved, any other loads bit for bit, and goes on from.

Every change tries a sample of layouts; all ordered pairs of twenty by

    python tests/multiprocess/test_reshard.py
"""

import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ranks import run_ranks
from reshard_rank import LAYOUTS, QUICK
from rich.console import Console
from rich.progress import Progress

RANK = Path(__file__).parent / "reshard_rank.py"


def compare(folder: Path, which: str) -> dict[str, dict[str, float]]:
    """Save and load; fingerprints of parameters and optimiser were compared by the ranks."""
    run_ranks(RANK, 8 if which == "all" else 4, str(folder), which, seconds=3000 if which == "all" else 400)
    return dict(json.loads((folder / "reshard.json").read_text()))


def differing(found: dict[str, dict[str, float]]) -> list[str]:
    """Pairs whose next loss is not that of the run that was not resumed: to the bit, or within fp32 noise."""
    wrong = []
    for pair, loss in found["resumed"].items():
        model, _, names = pair.partition(": ")
        source, _, target = names.partition(" → ")
        expected = found["unresumed"][f"{model}: {source}"]
        if loss != expected if source == target else abs(loss - expected) > 1e-5 * abs(expected):
            wrong.append(f"{pair}: {loss!r} instead of {expected!r}")
    return wrong


@pytest.fixture(scope="module")
def found(folder: Path) -> dict[str, dict[str, float]]:
    return compare(folder, "quick")


def test_every_pair_was_tried(found: dict[str, dict[str, float]]) -> None:
    assert len(found["resumed"]) == sum(len(names) ** 2 for names in QUICK.values())


def test_losses_after_a_resume_are_those_without(found: dict[str, dict[str, float]]) -> None:
    assert differing(found) == []


def main() -> int:
    from conftest import make_shards

    with tempfile.TemporaryDirectory() as folder:
        make_shards(Path(folder))
        with ThreadPoolExecutor(1) as pool, Progress(console=Console(stderr=True)) as bar:
            comparing = pool.submit(compare, Path(folder), "all")
            task = bar.add_task("ordered pairs", total=sum(len(names) ** 2 for names in LAYOUTS.values()))
            while not comparing.done():
                told = Path(folder) / "progress"
                bar.update(task, completed=int(told.read_text() or 0) if told.exists() else 0)
                time.sleep(0.5)
            every = comparing.result()
    wrong = differing(every)
    print("\n".join(wrong))
    print(json.dumps({"pairs": len(every["resumed"]), "layouts": sum(map(len, LAYOUTS.values())), "wrong": len(wrong)}))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

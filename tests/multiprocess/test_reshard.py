"""What any layout saved, any other loads bit for bit, and goes on from.

Every change tries a sample of layouts (of these only what is selected); all ordered pairs of twenty by

    python tests/multiprocess/test_reshard.py [--report FILE]
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import pytest
from deviations import relative, selected
from ranks import run_ranks
from reshard_rank import LAYOUTS, QUICK
from rich.console import Console
from rich.progress import Progress

RANK = Path(__file__).parent / "reshard_rank.py"
BAR = 1e-5


def pairs_of(chosen: Mapping[str, Iterable[str]]) -> list[str]:
    """All ordered pairs of each model's layouts."""
    return [f"{model}: {a} → {b}" for model, names in chosen.items() for a, b in product(names, repeat=2)]


def compare(folder: Path, pairs: list[str], processes: int, seconds: float) -> dict[str, dict[str, float]]:
    """Save and load; fingerprints of parameters and optimizer were compared by the ranks."""
    run_ranks(RANK, processes, str(folder), json.dumps(pairs), seconds=seconds)
    return dict(json.loads((folder / "reshard.json").read_text()))


def deviation(pair: str, found: dict[str, dict[str, float]]) -> float:
    """How far the next loss is from that of the run that was not resumed, relative to it."""
    return relative([found["resumed"][pair]], [found["unresumed"][pair.partition(" → ")[0]]])


def is_same(pair: str, found: dict[str, dict[str, float]]) -> bool:
    """Whether the next loss is that of the run that was not resumed: to the bit, or within fp32 noise."""
    source, _, target = pair.partition(": ")[2].partition(" → ")
    return deviation(pair, found) <= (0.0 if source == target else BAR)


@pytest.fixture(scope="module")
def found(folder: Path, request: pytest.FixtureRequest) -> dict[str, dict[str, float]]:
    return compare(folder, selected(request), processes=4, seconds=900)


@pytest.mark.parametrize("pair", pairs_of(QUICK), ids=lambda pair: pair.replace("→", "to").replace("×", "x"))
def test_loss_after_a_resume_is_that_without(pair: str, found: dict[str, dict[str, float]]) -> None:
    assert is_same(pair, found), f"{found['resumed'][pair]!r}, but the run that was not resumed: {found['unresumed']}"


def main() -> int:
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    from conftest import make_shards
    from reports import add_report_option, write_report

    parser = argparse.ArgumentParser(description="All ordered pairs of layouts.")
    add_report_option(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_shards(Path(folder))
        with ThreadPoolExecutor(1) as pool, Progress(console=Console(stderr=True)) as bar:
            pairs = pairs_of(LAYOUTS)
            comparing = pool.submit(compare, Path(folder), pairs, processes=8, seconds=3000)
            task = bar.add_task("ordered pairs", total=len(pairs))
            while not comparing.done():
                told = Path(folder) / "progress"
                bar.update(task, completed=int(told.read_text() or 0) if told.exists() else 0)
                time.sleep(0.5)
            every = comparing.result()
    wrong = [pair for pair in pairs if not is_same(pair, every)]
    print("\n".join(wrong))
    figures = {
        "pairs": len(pairs),
        "layouts": sum(map(len, LAYOUTS.values())),
        "wrong": len(wrong),
        "to the bit": sum(deviation(pair, every) == 0.0 for pair in pairs),
        "worst": max(deviation(pair, every) for pair in pairs),
    }
    print(json.dumps(figures))
    write_report(arguments.report, "reshard", figures)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

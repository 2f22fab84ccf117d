"""A sample of bad files: each is read, or refused with a message; the whole campaign is benchmarks/bad_input.py."""

import json
from collections.abc import Iterator

import pytest
from bad_files import BadFile, Case, Piece
from bad_input import Bench, Report, campaign

SAMPLE = 150


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """One process for all tests: it imports torch."""
    made = Bench(tmp_path_factory.mktemp("bad-input") / "work")
    yield made
    made.close()


def test_every_drawn_file_is_read_or_refused(bench: Bench) -> None:
    report = campaign(bench, SAMPLE, number=11)
    assert report.cases == SAMPLE and len(report.kinds) == 6
    assert not report.faults, json.dumps(report.faults[:3], indent=1)


def test_the_bench_sees_what_a_case_must_not_do(bench: Bench) -> None:
    """A write outside, a file that changed beside the case, a message that names no file: each is seen."""
    report = Report()
    recipe = BadFile("recipe.toml", (Piece(b"x = 1\n"),))
    bench.run(Case("recipe", ("schema", "-o", "../schemas"), (recipe,)), report)
    assert report.faults[-1]["wrong"] == ["outside", "made schemas"]
    for path in (bench.work / "schemas").iterdir():
        path.unlink()
    (bench.work / "schemas").rmdir()
    bench.run(Case("recipe", ("show", "nothing"), (BadFile("zebra/stripes", (Piece(b""),)),)), report)
    assert report.faults[-1]["wrong"] == ["names no file"]
    (bench.guard / "made").touch()
    bench.run(Case("recipe", ("schema",), (recipe,)), report)
    assert report.faults[-1]["wrong"] == ["guard changed"]
    (bench.guard / "made").unlink()
    bench.before = bench._guarded()

"""Faults can still be planted, and the tool that plants them tells a fault that was caught from one that lived."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from planted_campaign import Campaign, by_need
from planted_faults import Edit, Fault, Outcome, baseline, load_faults, plant, run_fault

ROOT = Path(__file__).parents[2]
FAULTS = load_faults(ROOT)


def test_every_fault_still_finds_its_place(tmp_path: Path) -> None:
    """Code moves; a fault that no longer applies proves nothing."""
    stale = []
    for number, fault in enumerate(FAULTS):
        copy = tmp_path / str(number)
        for edit in fault.edits:
            (copy / edit.file).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / edit.file).exists():
                (copy / edit.file).write_text((ROOT / edit.file).read_text())
        try:
            plant(copy, fault)
        except ValueError as error:
            stale.append(str(error))
    assert not stale, "\n".join(stale)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name, text in {
        "src/number.py": "def two():\n    return 2\n",
        "test_number.py": (
            "import number\nimport pytest\n\ndef test_two():\n    assert number.two() == 2\n\n"
            "def test_blind():\n    assert number\n\ndef test_broken():\n    assert False\n\n"
            "@pytest.mark.parametrize('twos', ['1 × 2'])\ndef test_times(twos):\n    assert number.two() == 2\n"
        ),
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


def fault(check: str, old: str = "return 2", new: str = "return 3") -> Fault:
    return Fault("src", "two is three", check, (Edit("src/number.py", old, new),), quick=False)


@pytest.mark.parametrize(
    ("planted", "caught", "witness"),
    [
        (fault("pytest test_number.py::test_two"), True, "test_number.py::test_two"),
        (fault("pytest 'test_number.py::test_times[1 × 2]'"), True, "test_number.py::test_times"),
        (fault("pytest test_number.py::test_blind"), False, "lived"),
        (fault("pytest test_number.py::test_broken"), False, "fails without the fault: test_number.py::test_broken"),
        (fault("pytest test_number.py::test_two", old="return 9"), False, "must stand once"),
        (fault("pytest test_number.py::test_two", new="return ("), False, "no failing test"),
        (fault("python -c 'import sys, number; sys.exit(number.two() != 2)'"), True, "python -c"),
        (fault("pytest -k nothing_is_called_so"), False, "no failing test"),
    ],
)
def test_a_fault_is_caught_by_a_test_that_failed_and_by_nothing_else(
    tree: Path, planted: Fault, caught: bool, witness: str
) -> None:
    outcome = run_fault(tree, planted, baseline(tree, planted.check))
    assert outcome.caught == caught
    assert witness in outcome.witness
    assert (tree / "src/number.py").read_text() == "def two():\n    return 2\n"  # the tree itself is left alone


def test_a_campaign_goes_on_where_it_is_needed_most(tmp_path: Path) -> None:
    """Rows of other commits are kept; what is new, was edited, lived or has changed is planted first."""
    report, page = tmp_path / "mutations.json", tmp_path / "page.md"
    new, lived, changed, caught = (
        Fault("src", name, f"pytest test_{name}.py", (Edit(f"src/{name}.py", "a", "b"),), quick=False)
        for name in ("new", "lived", "changed", "caught")
    )
    campaign = Campaign([new, lived, changed, caught], report, page, "0123456789")
    campaign.record(Outcome(lived, False, "lived", 1.0))
    campaign.record(Outcome(caught, True, "test_caught.py::test", 1.0))
    campaign.record(Outcome(changed, True, "test_changed.py::test", 1.0))
    edited = replace(caught, edits=(Edit("src/caught.py", "a", "c"),))

    figures = Campaign([caught, new, changed, lived], report, page, "later").figures()
    assert [figures[key] for key in ("faults", "planted", "caught", "commits")] == [4, 3, 2, 1]
    assert Campaign([edited], report, page, "later").figures()["planted"] == 0, "an edited fault is another one"
    assert "| new | not planted yet |" in page.read_text()
    assert "| lived | **lived**: lived | " in page.read_text()

    rows = {(row["room"], row["fault"]): row for row in figures["rows"]}
    for files in ({"src/changed.py"}, {"test_changed.py"}):
        order = by_need([caught, changed, lived, new], rows, lambda _, files=files: files)
        assert {fault.name for fault in order[:2]} == {"new", "lived"}
        assert [fault.name for fault in order[2:]] == ["changed", "caught"]
    assert by_need([caught, changed], rows, lambda _: None) == [caught, changed], "an unknown commit: all have changed"

"""Every figure on a page is that of the last report, whose command the page names; what is missed says so."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from source_tree import ROOT

sys.path += [str(ROOT / "docs" / "reports"), str(ROOT / "benchmarks")]

import figures
import update

PAGES = update.pages()
REPORTS = sorted(figures.REPORTS.glob("*.json"))
UNCHECKED = {
    "docs/planted-faults.md": "made whole by benchmarks/mutations.py",
    "docs/reference/": "ranges and units, made from the schema",
    "docs/dependencies.md": "what was weighed on the day of a choice",
}
COMPARED = re.compile(r"(?P<sign>[≤≥]) (?P<limit>\S+(?: · 10\S+)?)(?: (?P<unit>%))?")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_figures_are_those_of_their_reports(page: Path) -> None:
    text = page.read_text("utf-8")
    assert figures.wrong_ties(text) == [], "python docs/reports/update.py carries them over"
    assert update.updated(text) == text, "python docs/reports/update.py makes the tables again"


@pytest.mark.parametrize("page", [page for page in PAGES if not name(page).startswith(tuple(UNCHECKED))], ids=name)
def test_no_figure_stands_without_its_report(page: Path) -> None:
    """A figure that nobody measured says so: `<!-- not measured: the reason -->` in its paragraph."""
    assert figures.untied(page.read_text("utf-8")) == []


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.name)
def test_a_report_says_where_it_comes_from(path: Path) -> None:
    report = json.loads(path.read_text("utf-8"))
    assert {"command", "commit", "date", "figures"} <= report.keys()
    assert re.fullmatch("[0-9a-f]{40}", report["commit"]), "measured from a commit, not from changes to one"


def test_what_is_predicted_of_published_runs_is_today_s() -> None:
    """The one report that is the same on every machine."""
    from validation.report import report_figures
    from validation.scores import validate

    now = json.loads(json.dumps(report_figures(validate())))
    assert _rounded(figures.load("validate.json")["figures"]) == _rounded(now), (
        "python benchmarks/validation/validate.py --report docs/reports/validate.json"
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def misjudged(page: str) -> list[str]:
    """Table rows with a bar (`≤ 3 %`) before a figure that miss it and do not say `missed`, or the other way round."""
    found = []
    for block in figures.blocks(page):
        cells = [cell.strip() for cell in block.text.strip().strip("|").split("|")]
        bar = next((n for n, cell in enumerate(cells) if COMPARED.match(cell)), None)
        if not block.text.lstrip().startswith("|") or bar is None:
            continue
        asked = COMPARED.match(cells[bar])
        assert asked
        limit = figures.number(asked["limit"] + (asked["unit"] or ""))
        measured = figures.number(figures.prose(cells[bar + 1]))
        reached = measured >= limit if asked["sign"] == "≥" else measured <= limit
        if reached == ("missed" in block.prose):
            found.append(f"{block.line}: {block.prose}")
    return found


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_is_missed_says_so(page: Path) -> None:
    assert misjudged(page.read_text("utf-8")) == []


def test_the_readme_has_what_was_missed_beside_what_was_reached() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    missed = [bar for bar, found in figures.load("validate.json")["figures"]["bars"].items() if not found["reached"]]
    assert [bar for bar in missed if f"= bars.{bar}.value" not in readme] == []


# ---- the checks themselves


FIGURES = {
    "layouts": 63,
    "worst": {"loss": 1.89e-7},
    "error": 0.0786,
    "rows": [{"s": 1.5, "same": True}, {"s": 12.25, "same": False}],
    "bytes": 3 * 2**29,
    "bar": 1e-5,
}
PAGE = """# Page

`pytest tests/x.py` trains 63 layouts: 1.9 · 10⁻⁷ of the loss, 7.9 % off, at most 12.2 s, 1 of
2 the same, 1.5 GiB.
<!-- x.json: 63 layouts = layouts; 1.9 · 10⁻⁷ = worst.loss; 7.9 % = error; 12.2 s = max rows.*.s;
     1 of = count rows.*.same; 1.5 GiB = bytes -->

| bar | asked | measured |
|---|---|---|
| error | ≤ 10 % | 7.9 % <!-- x.json: 7.9 % = error --> |
| loss | ≤ 10⁻⁵ | 1.9 · 10⁻⁷ <!-- x.json: 1.9 · 10⁻⁷ = worst.loss; ≤ 10⁻⁵ = bar --> |

```console
took 17 s
```

A block has 16 MiB. <!-- not measured: a constant of the format -->
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    report = {"command": "pytest tests/x.py --reports out", "commit": "0" * 40, "date": "2026", "figures": FIGURES}
    (tmp_path / "x.json").write_text(json.dumps(report))
    return tmp_path


def test_a_page_that_is_right_passes(folder: Path) -> None:
    assert figures.wrong_ties(PAGE, folder) == []
    assert figures.untied(PAGE) == []
    assert misjudged(PAGE) == []
    assert update.updated(PAGE, folder) == PAGE


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("63 layouts:", "64 layouts:", "`63 layouts` does not stand"),
        ("1.9 · 10⁻⁷ of", "1.9 · 10⁻⁸ of", "`1.9 · 10⁻⁷` does not stand"),
        ("7.9 %", "7.8 %", "`7.8 %` is `7.9 %` in x.json (error)"),
        ("| ≤ 10⁻⁵ |", "| ≤ 10⁻⁶ |", "`≤ 10⁻⁵` does not stand"),
        ("10⁻⁵", "10⁻⁶", "`≤ 10⁻⁶` is `≤ 10⁻⁵`"),
        ("12.2 s", "12.3 s", "`12.3 s` is `12.2 s`"),
        ("1 of\n2", "2 of\n2", "`1 of` does not stand"),
        ("1 of =", "1 of 2 =", "is no tie: write `one figure"),
        ("= error;", "= eror;", "there is no `eror`"),
        ("max rows", "rows", "are 2 values"),
        ("x.json: 63", "y.json: 63", "y.json is not there"),
        ("`pytest tests/x.py`", "A test", "does not name `pytest tests/x.py`"),
        ("63 layouts = layouts", "layouts", "is no tie"),
    ],
)
def test_a_wrong_figure_is_caught(folder: Path, old: str, new: str, told: str) -> None:
    assert PAGE.replace(old, new) != PAGE
    assert told in "\n".join(figures.wrong_ties(PAGE.replace(old, new), folder))


@pytest.mark.parametrize(
    "claim",
    [
        "It is 3 % off.",
        "It is 1.2 × faster.",
        "It takes 9 s.",
        "It has 2.5 GiB.",
        "To 10⁻⁷.",
        "In 18 of 19 cases.",
        "On 62 layouts.",
        "- 5 % <!-- x.json: 7.9 % = error -->",
    ],
)
def test_a_figure_without_a_report_is_caught(claim: str) -> None:
    assert figures.untied(claim)


@pytest.mark.parametrize("claim", ["Asked: ≤ 3 %.", "`--limit 3 s`", "# 3 % more", "    took 3 s", "tp 2 × pp 4"])
def test_what_is_no_figure_is_left_alone(claim: str) -> None:
    assert figures.untied(f"\n\n{claim}\n") == []


def test_a_bar_that_is_misjudged_is_caught() -> None:
    assert misjudged("| a | ≤ 3 % | 4.5 % |\n") and not misjudged("| a | ≤ 3 % | **4.5 %**, missed |\n")
    assert misjudged("| a | ≥ 0.9 | 0.95 (missed) |\n") and not misjudged("| a | ≥ 0.9 | 0.95 |\n")
    assert misjudged("| a | ≤ 10⁻⁵ | 1.9 · 10⁻⁴ |\n") and not misjudged("| a | ≤ 10⁻⁵ | 1.9 · 10⁻⁷ |\n")


def test_a_new_empty_table_is_made_and_what_follows_it_stays(folder: Path) -> None:
    page = "<!-- made: index -->\n<!-- /made -->\n\nA sentence.\n\n<!-- made: index -->\nold\n<!-- /made -->\n"
    after = update.updated(page, folder)
    assert "\n\nA sentence.\n\n" in after and "old" not in after
    assert after.count("<!-- /made -->") == 2 and after.count("[`x.json`]") == 2
    assert update.updated(after, folder) == after


def test_figures_are_carried_over(folder: Path) -> None:
    changed = FIGURES | {"layouts": 64, "error": 0.1234, "worst": {"loss": 2.04e-6}}
    report = json.loads((folder / "x.json").read_text()) | {"figures": changed}
    (folder / "x.json").write_text(json.dumps(report))
    after = update.updated(PAGE, folder)
    assert "64 layouts: 2.0 · 10⁻⁶ of the loss, 12.3 % off" in after
    assert figures.wrong_ties(after, folder) == []
    assert misjudged(after), "what is now missed must be said by a person"


def test_the_command_compares(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs/reports/update.py", "--check"], capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stdout + done.stderr

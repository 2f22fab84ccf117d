"""The site shows every room and names every dependency; CI runs every tier of tests."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from source_tree import ROOT, rooms

DOCS = ROOT / "docs"
OUTSIDE = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")
STYLE_OUTSIDE = re.compile(r"(?:@import|url\()\s*[\"']?(?:https?:)?//")


def nav_pages() -> set[str]:
    """Pages the site's menu leads to."""
    return set(re.findall(r"^\s+- (?:[^:\n]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE))


def missing_from_site(room: str, docs: Path, nav: set[str]) -> list[str]:
    """What a room lacks on the site."""
    page = docs / "rooms" / f"{room}.md"
    include = f'--8<-- "src/danlu/{room}/README.md"'
    lacks = []
    if not page.is_file() or include not in page.read_text("utf-8"):
        lacks.append(f"docs/rooms/{room}.md with the line {include}")
    if f"rooms/{room}.md" not in nav:
        lacks.append(f"`- {room}: rooms/{room}.md` in the nav of mkdocs.yml")
    return lacks


def unnamed_dependencies(page: str) -> set[str]:
    """Requirements of pyproject.toml that have no row (`| `name` |`) on the page."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return {Requirement(text).name for texts in lists for text in texts} - set(
        re.findall(r"^\| `(.+?)` \|", page, re.M)
    )


def test_there_are_pages_in_the_menu() -> None:
    assert {"index.md", "design.md", "dependencies.md"} <= nav_pages()


@pytest.mark.parametrize("room", rooms())
def test_a_room_is_on_the_site(room: str) -> None:
    assert missing_from_site(room, DOCS, nav_pages()) == []


def test_a_room_that_is_not_on_the_site_is_caught(tmp_path: Path) -> None:
    assert len(missing_from_site("attic", tmp_path, {"index.md"})) == 2
    (tmp_path / "rooms").mkdir()
    (tmp_path / "rooms" / "attic.md").write_text("An attic.\n")
    assert len(missing_from_site("attic", tmp_path, {"rooms/attic.md"})) == 1


def test_every_page_is_a_room_or_in_the_menu() -> None:
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert pages == nav_pages()


def test_every_dependency_is_accounted_for() -> None:
    assert unnamed_dependencies((DOCS / "dependencies.md").read_text("utf-8")) == set()


def test_an_unnamed_dependency_is_caught() -> None:
    assert "torch" in unnamed_dependencies("We like torch.")
    assert "torch" not in unnamed_dependencies("| `torch` | tensors | – |")


def test_the_site_builds_and_loads_nothing_from_outside(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=360)
    assert result.returncode == 0, result.stdout + result.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) >= len(nav_pages())
    assert {page.name: found[0] for page in pages if (found := OUTSIDE.search(page.read_text("utf-8")))} == {}
    styles = (tmp_path / "site").rglob("*.css")
    assert [style.name for style in styles if STYLE_OUTSIDE.search(style.read_text("utf-8"))] == []


@pytest.mark.parametrize("tag", ['<script src="https://x.org/a.js">', "<link href=//x.org/a.css>"])
def test_something_from_outside_is_caught(tag: str) -> None:
    assert OUTSIDE.search(tag)
    assert STYLE_OUTSIDE.search("@import url(https://x.org/a.css)")


def test_ci_runs_every_tier() -> None:
    tiers = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.rglob("test_*.py"))}
    script = (ROOT / ".ci" / "run").read_text("utf-8")
    assert {tier for tier in tiers if f"tests/{tier}" not in script} == set()
    everything = (ROOT / "benchmarks" / "full.py").read_text("utf-8")
    assert "benchmarks/full.py" in (ROOT / ".ci" / "full").read_text("utf-8")
    assert {tier for tier in tiers - {"architecture"} if f"pytest tests/{tier}" not in everything} == set()
    assert "not full" not in everything


def test_the_design_page_has_the_rooms_and_layers_of_the_code() -> None:
    page = (ROOT / "docs" / "design.md").read_text("utf-8")
    rooms = {path.parent.name for path in (ROOT / "src" / "danlu").glob("*/__init__.py")}
    assert set(re.findall(r"(?m)^\| `(\w+)` \|", page)) >= rooms
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"][0]
    layers = "\n".join(f"    {layer.replace('danlu.', '')}" for layer in contract["layers"])
    assert layers in page
    assert set(re.findall(r"danlu\.(\w+)", " ".join(contract["layers"]))) == rooms | {
        "torch_compat",
        "version",
        "worker",
        "session",
    }

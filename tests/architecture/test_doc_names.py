"""Commands, options, files, Python names and keys that the documentation names exist, and its lists are complete."""

import re
from collections.abc import Callable
from pathlib import Path

import doc_names
import pytest
from house_rules import Breach
from source_tree import PACKAGE, ROOT, rooms
from test_import_order import WITHOUT_TORCH

READMES = sorted(PACKAGE.rglob("README.md"))
PAGES = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES += [*sorted((ROOT / "docs").rglob("*.md")), *READMES]
CHECKS: dict[str, Callable[[str], list[Breach]]] = {
    "commands": doc_names.unknown_commands,
    "options": doc_names.unknown_options,
    "names": doc_names.unknown_names,
    "keys": doc_names.unknown_keys,
}
BRITISH = re.compile(
    r"\w*(?:neighbour|colour|behaviour|favour|catalogue|cancell|labell|modell|(?:optim|token|parallel|initial|serial"
    r"|normal|quant|organ|recogn|summar|minim|maxim|synchron|material|random|custom)is(?:e|ed|es|er|ing|ation)\b)\w*",
    re.IGNORECASE,
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text("utf-8")
    found = [f"{line}: {what}" for check in CHECKS.values() for line, what in check(text)]
    found += [f"{line}: {what}" for line, what in doc_names.missing_paths(text, page.parent)]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_a_page_spells_as_torch_does(page: Path) -> None:
    prose = re.sub(r"`[^`\n]+`", "", page.read_text("utf-8"))
    assert BRITISH.findall(prose) == []


@pytest.mark.parametrize("readme", READMES, ids=name)
def test_a_readme_names_the_files_of_its_folder(readme: Path) -> None:
    assert doc_names.file_table_breaches(readme.read_text("utf-8"), readme.parent) == []


def test_the_table_of_commands_is_complete() -> None:
    table = doc_names.commands_in_table((PACKAGE / "cli" / "README.md").read_text("utf-8"))
    assert table == set(doc_names.commands())


def test_the_rooms_without_torch_are_those_that_are_tested() -> None:
    tested = {room.removeprefix("danlu.") for room in WITHOUT_TORCH}
    rule = re.search(r"^2\. \*\*.+?(?=^3\.)", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M | re.S)
    design = re.search(r"Two things follow\..+?\n\n", (ROOT / "docs" / "design.md").read_text("utf-8"), re.S)
    assert rule and design
    for text in (rule[0], design[0]):
        assert set(re.findall(r"`(\w+)`", text)) & set(rooms()) == tested


def test_contributing_has_every_tier_of_tests() -> None:
    tiers = {path.name for path in (ROOT / "tests").iterdir() if path.is_dir() and any(path.rglob("test_*.py"))}
    contributing = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert set(re.findall(r"(?m)^\| `tests/(\w+)` \|", contributing)) == tiers


# ---- the checks themselves


@pytest.mark.parametrize(
    ("check", "text"),
    [
        ("commands", "Run `danlu fly` now."),
        ("commands", "`danlu ckpt mend`"),
        ("commands", "```bash\ndanlu train r.toml --plan p.toml --fast\n```"),
        ("commands", "```console\n$ danlu runs && danlu ckpt list x\n```"),
        ("commands", "```bash\ndanlu train \\\n    --fast\n```"),
        ("commands", "\n    danlu prob --quick\n"),
        ("options", "With `--fast` it is."),
        ("names", "`danlu.paralelize(model)`"),
        ("names", "```python\nfrom danlu.cost import predict_all\n```"),
        ("names", "```python\nfrom danlu.cost.nowhere import predict\n```"),
        ("names", "A `CheckpointKeeper` saves."),
        ("names", "Call `settle_all_saves()`."),
        ("keys", "`checkpoint.evry` says when."),
        ("keys", '`recomputed = "full"`'),
        ("keys", "```toml\n[degrees]\ndp = 4\n```"),
        ("keys", "```toml\n[[levels]]\nfan = 8\n```"),
    ],
)
def test_a_name_of_nothing_is_caught(check: str, text: str) -> None:
    assert CHECKS[check](text)


@pytest.mark.parametrize(
    "text",
    [
        "`danlu train RECIPE`, `danlu COMMAND --help`, `danlu export …`, `danlu launch … --sbatch --gpus-per-node=8`",
        "```bash\ndanlu ckpt ls RUN && danlu ckpt verify RUN --all  # danlu's\n```",
        "`\"danlu leaf\"`, Danlu fly, `pip install 'danlu[s3]'`",
        "`danlu.parallelize`, `danlu.chips.Runtime`, `danlu.storage.store.base.open_store`",
        "```python\nfrom mine import MyOwnModel\n```\n\n`MyOwnModel` is yours.",
        '`checkpoint.every = 10`, `tp = 2`, `recompute = "full"`, `model.arguments.anything`, `mapping.tp`',
        "```toml\n[mapping.tp]\nnode = 8\n```\n\n```toml\n[project]\nname = 'x'\n```",
    ],
)
def test_what_exists_is_allowed(text: str) -> None:
    assert [breach for check in CHECKS.values() for breach in check(text)] == []


def test_a_missing_file_is_caught() -> None:
    for text in ("`tests/unit/test_nothing.py`", "`framework/lop.py`", "`lop.py`", "    python benchmarks/none.py"):
        assert doc_names.missing_paths(f"\n{text}\n", ROOT), text
    for text in ("`tests/unit/test_hf.py`", "`framework/loop.py`", "`loop.py`", "`runs/x/events.jsonl`", "`docs/`"):
        assert doc_names.missing_paths(f"\n{text}\n", ROOT) == [], text


def test_a_file_table_that_lags_is_caught(tmp_path: Path) -> None:
    (tmp_path / "kept.py").touch()
    (tmp_path / "new.py").touch()
    table = "| file | holds |\n|---|---|\n| `kept.py`, `gone.py` | things |\n"
    assert [what for _, what in doc_names.file_table_breaches(table, tmp_path)] == [
        "there is no gone.py here",
        "new is not named",
    ]


def test_commands_of_a_table_are_found() -> None:
    table = "| `danlu train RECIPE` | x |\n| `danlu data build`, `show` | x |\n| `danlu launch X --on slurm` | x |\n"
    assert doc_names.commands_in_table(table) == {"train", "data build", "data show", "launch"}


def test_british_spelling_is_caught() -> None:
    assert BRITISH.search("a neighbour") and BRITISH.search("the optimiser") and not BRITISH.search("parallelism")

"""What comes in from files and flags: names, units, ranges, sizes, escapes; and files that older versions wrote."""

import os
from pathlib import Path

import pytest
from broken_files import CLUSTER, RECIPE
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.runs.prepare import choose_new_run_folder
from danlu.spec import Cluster, SpecError, load_cluster, load_plan, load_recipe, toml
from danlu.spec.files import MAX_TEXT_BYTES, read_bytes
from danlu.spec.names import is_name, sanitize_name
from danlu.spec.problem import format_value, problem_at
from danlu.spec.quantity import format_quantity
from danlu.spec.text import is_printable, printable

WRONG_NAMES = [
    "",
    ".",
    "..",
    "../../x",
    "/etc/x",
    "a/b",
    "-rf",
    "\x1b[31mred",
    "<img src=x>",
    "x" * 101,
    "a b",
    "é",
    "x\n",
]


def _run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, SpecError):
        return 2, str(result.exception)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_one_pattern_for_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not is_name(name) and is_name(sanitize_name(name))
    with pytest.raises(SpecError, match=r"--name: is .*, but must be letters, digits"):
        choose_new_run_folder(name, "tiny")
    Path("recipe.toml").write_text(RECIPE)
    code, said = _run("train", "recipe.toml", "--name", name)
    assert code == 2 and "→ --name " in said and is_printable(said.replace("\n", ""))
    assert [path.name for path in Path().iterdir()] == ["recipe.toml"]


@pytest.mark.parametrize("name", ["a", "0", "tiny-llama_2.1", "x" * 100, "A..b"])
def test_names_that_are_fine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose_new_run_folder(name, "tiny").path == tmp_path / "runs" / name


def test_a_name_out_of_the_runs_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "a" / "b"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    Path("recipe.toml").write_text(RECIPE.replace('"tiny"', '"../../x"'))
    for command in ("check", "train"):
        code, said = _run(command, "recipe.toml")
        assert code == 2 and 'recipe.toml:1: name: is "../../x"' in said and '→ name = "x"' in said
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a", "b", "recipe.toml"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            ["--what-if", "node.bandwidth=2"],
            'must be a string with its unit, such as "300 GB/s", or a factor such as 2x',
        ),
        (["--what-if", "chip.memory=141"], "must be a string with its unit"),
        (["--what-if", "node.latency=-1x"], "is not a factor"),
        (["--what-if", "chip.name=2x"], "is not a factor"),
        (["--what-if", "batch.length=0"], "must be greater than or equal to 1"),
        (["--mtbf", "5"], '--mtbf: is "5", but must be a number with its unit, such as "30 d"'),
        (["--mtbf", "0 d"], "--mtbf: is"),
        (["--days", "-3"], "--days"),
        (["--days", "nan"], "--days"),
        (["--chips", "0"], "--chips"),
    ],
)
def test_flags_of_plan(flags: list[str], expected: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    code, said = _run("plan", str(tmp_path / "recipe.toml"), "--cluster", "local", *flags)
    assert code == 2 and expected in " ".join(said.split()) and "pydantic" not in said


@given(st.floats(min_value=1e-9, max_value=1e20, allow_nan=False), st.sampled_from(["B/s", "FLOP/s", "s"]))
def test_a_quantity_is_written_as_exactly_itself(value: float, unit: str) -> None:
    number, _, name = format_quantity(value, unit).partition(" ")
    cluster = _cluster_with(value, format_quantity(value, unit), unit)
    assert cluster == value, (number, name)


def _cluster_with(value: float, text: str, unit: str) -> float:
    from pydantic import TypeAdapter

    from danlu.spec.quantity import Bandwidth, Flops, Seconds

    kind = {"B/s": Bandwidth, "FLOP/s": Flops, "s": Seconds}[unit]
    return TypeAdapter(kind).validate_python(text)


def test_a_cluster_is_written_with_units_and_read_back(tmp_path: Path) -> None:
    cluster = load_cluster("h100-pod")
    text = toml.dumps(cluster)
    assert 'bandwidth = "450 GB/s"' in text and 'memory = "80 GB"' in text and 'latency = "3 us"' in text
    (tmp_path / "cluster.toml").write_text(text)
    assert load_cluster(str(tmp_path / "cluster.toml")) == cluster


OLD_PROBE = """\
name = "x86_64"
source = "measured by danlu probe"
[chip]
name = "Some CPU, 1 thread"
kind = "cpu"
memory = 4000000000
memory_bandwidth = 10400000000.0
measured = true
peak = {fp32 = 50300000000.0}
[[levels]]
name = "node"
fanout = 2
bandwidth = 1040000000.0
latency = 0.00005
"""


def test_files_of_older_versions_still_load(tmp_path: Path) -> None:
    """`danlu probe`, `danlu plan -o` and run folders wrote quantities as plain numbers."""
    (tmp_path / "cluster.toml").write_text(OLD_PROBE)
    cluster = load_cluster(str(tmp_path / "cluster.toml"))
    assert cluster.levels[0].bandwidth == 1.04e9 and cluster.chip.memory == 4 * 10**9
    (tmp_path / "recipe.toml").write_text(
        RECIPE.replace(
            'shards = "shards"', 'shards = "shards"\nsources = []\nsource = []\ncache = ""\ncache_size = 17179869184'
        )
    )
    assert load_recipe(tmp_path / "recipe.toml").data.cache_size == 16 << 30
    (tmp_path / "plan.toml").write_text(
        "[prediction]\nseconds = 0.25\ntokens_per_second = 4000.0\nbytes = 3000000\nmodel_flops_share = 0.3\n"
        'cluster = "x86_64"\nby = "danlu"\n'
    )
    assert load_plan(tmp_path / "plan.toml").prediction is not None
    # Even there a number that was changed by hand is held to what a machine can have.
    (tmp_path / "cluster.toml").write_text(OLD_PROBE.replace("1040000000.0", "25"))
    with pytest.raises(SpecError, match="from 1 kB/s to 1 EB/s"):
        load_cluster(str(tmp_path / "cluster.toml"))


def test_the_size_of_a_cache_needs_its_unit(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.replace('shards = "shards"', 'shards = "shards"\ncache_size = 16'))
    with pytest.raises(SpecError, match='16 bytes\\? write "16 GB"'):
        load_recipe(tmp_path / "recipe.toml")


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "0x" + "f" * 300, "-5"])
def test_a_number_that_is_none_needs_a_unit_too(number: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.replace('shards = "shards"', f'shards = "s"\ncache_size = {number}'))
    with pytest.raises(SpecError, match=r"cache_size: is .*, but must be a string with its unit"):
        load_recipe(tmp_path / "recipe.toml")


def test_python_takes_plain_numbers() -> None:
    values = load_cluster("local").model_dump()
    assert Cluster.model_validate(values) == load_cluster("local")


def test_more_chips_than_there_can_be(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(
        CLUSTER.replace("fanout = 6", "fanout = 10_000_000").replace("fanout = 4", "fanout = 1000")
    )
    with pytest.raises(SpecError, match="at most 100,000,000 chips"):
        load_cluster(str(tmp_path / "cluster.toml"))
    (tmp_path / "plan.toml").write_text("[degrees]\npp = 100_000\nshard = 100_000\n")
    with pytest.raises(SpecError, match="at most 100,000,000 ranks"):
        load_plan(tmp_path / "plan.toml")


def test_pipes_folders_and_large_files_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "folder.toml").mkdir()
    (tmp_path / "large.toml").write_bytes(b"#" * (MAX_TEXT_BYTES + 1))
    for name, expected in (("pipe", "is a pipe"), ("folder", "is a folder"), ("large", "at most 1,048,576")):
        with pytest.raises(SpecError, match=expected):
            load_recipe(tmp_path / f"{name}.toml")
    with pytest.raises(SpecError, match="is a device"):
        read_bytes(Path("/dev/zero"), 10)


def test_a_mark_before_the_text_is_no_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text("\ufeff" + RECIPE, encoding="utf-8")
    assert load_recipe(tmp_path / "recipe.toml").name == "tiny"


def test_what_a_terminal_obeys_is_written_out() -> None:
    assert printable("a\x1b[2Jb\x07\x9b31m\u202ec\ud800\n\td") == "a\\u001b[2Jb\\u0007\\u009b31m\\u202ec\\ud800\n\td"
    assert format_value("x\ny") == '"x\\ny"'
    assert format_value(1 << 100_000) == "a number of about 10^30103"


@given(st.text())
def test_printable_text_has_nothing_a_terminal_obeys(text: str) -> None:
    once = printable(text)
    assert once.encode().decode() == printable(once)
    assert not any((ord(letter) < 32 and letter not in "\n\t") or 127 <= ord(letter) < 160 for letter in once)


def test_a_problem_is_told_in_printable_lines() -> None:
    told = problem_at(Path("a\x1b"), 1, "k\x9b" + "x" * 500, "is\x07\nno problems", "do\u202e")
    assert all(is_printable(text) for text in (told.file, told.key, told.message, told.suggestion))
    assert len(told.key) < 150

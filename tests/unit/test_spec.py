"""Files: lines of keys in any TOML, quantities, what is read and written back, JSON Schemas."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from broken_files import CLUSTER, EXPERTS, RECIPE
from pydantic import TypeAdapter, ValidationError
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.spec import Cluster, Plan, Recipe, SpecError, toml
from danlu.spec.divisors import closest_divisor, closest_multiple, divisors
from danlu.spec.load import load_cluster, load_model, load_plan, load_recipe
from danlu.spec.quantity import Bandwidth, Bytes, Flops, Seconds
from danlu.spec.recompute import RecomputeLayers
from danlu.spec.schema import FILE_KINDS, json_schema

NASTY = '''\
# [not.a.table] and not = "a key"
title = "a [b] # c = d"  # [no]
"quoted.key" = 1
'single' . inner = 2
site."google.com" = true
a.b.c = 1

[tables]  # [[comment]]
array = [  # ]]
    "x = 1", # [
    ["[table]", 'y = 2'],
    # z = """
]
after = 1
inline = { x = 1, y = { z = [1, 2] } }

[tables."with ] and # inside"]
text = """
[fake]
key = 1 \\"""
still = "in" """
raw = \'\'\'
[[fake]]
\' \'\' key = 2\'\'\'\'\'
one_line = """x = 1""" # "
last = "\\\\"

[[list]]
name = "first"
[list.sub]
deep = 1
[[list.inner]]
n = 0
[[list.inner]]
n = 1

  [[list]]
  name = "second"
  [[list.inner]]
  n = 2

[x.y.z]
end = """\\
  ["""
'''


@pytest.mark.parametrize(
    ("key", "start"),
    [
        (("title",), "title = "),
        (("quoted.key",), '"quoted.key"'),
        (("single", "inner"), "'single'"),
        (("single",), "'single'"),
        (("site", "google.com"), "site."),
        (("a", "b", "c"), "a.b.c"),
        (("a", "b"), "a.b.c"),
        (("tables",), "[tables]"),
        (("tables", "array"), "array = ["),
        (("tables", "array", 1), "array = ["),
        (("tables", "after"), "after"),
        (("tables", "inline", "y", "z"), "inline"),
        (("tables", "with ] and # inside"), '[tables."with'),
        (("tables", "with ] and # inside", "text"), "text = "),
        (("tables", "with ] and # inside", "raw"), "raw = "),
        (("tables", "with ] and # inside", "one_line"), "one_line"),
        (("tables", "with ] and # inside", "last"), "last"),
        (("list", 0, "name"), 'name = "first"'),
        (("list", 0, "sub", "deep"), "deep"),
        (("list", 0, "inner", 0, "n"), "n = 0"),
        (("list", 0, "inner", 1, "n"), "n = 1"),
        (("list", 1, "name"), '  name = "second"'),
        (("list", 1, "inner", 0, "n"), "  n = 2"),
        (("x", "y"), "[x.y.z]"),
        (("x", "y", "z", "end"), "end = "),
        (("x", "missing"), "[x.y.z]"),
        (("nowhere", "at", "all"), "# [not.a.table]"),
    ],
)
def test_line_of_a_key(key: toml.KeyPath, start: str, tmp_path: Path) -> None:
    (tmp_path / "nasty.toml").write_text(NASTY)
    line = toml.read(tmp_path / "nasty.toml").line(key)
    assert NASTY.split("\n")[line - 1].startswith(start)


@pytest.mark.parametrize("text", [NASTY, NASTY.replace("\n", "\r\n"), RECIPE, CLUSTER])
def test_every_key_of_the_parser_has_a_line_and_no_other(text: str) -> None:
    found = toml.key_lines(text)
    in_file = set(_paths(tomllib.loads(text)))
    assert set(found) <= in_file
    values_inside_values = {
        path for path in in_file - set(found) if path[:2] in (("tables", "array"), ("tables", "inline"))
    }
    inline_tables = {path for path in in_file - set(found) if path[:2] == ("chip", "peak")}
    assert in_file - set(found) == values_inside_values | inline_tables


def _paths(value: Any, path: toml.KeyPath = ()) -> list[toml.KeyPath]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [below for key, inner in items for below in [(*path, key), *_paths(inner, (*path, key))]]


def test_an_explicit_table_beats_the_place_where_it_is_implied() -> None:
    assert toml.key_lines("[a.b]\nx = 1\n[a]\ny = 2\n")[("a",)] == 3


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (Bytes, "80 GB", 80_000_000_000),
        (Bytes, "80 GiB", 80 * 2**30),
        (Bytes, "1.5 KiB", 1536),
        (Bytes, "7 B", 7),
        (Bytes, 7, 7),
        (Bytes, " 3  kB ", 3000),
        (Bandwidth, "2039 GB/s", 2.039e12),
        (Bandwidth, "3.35 TB/s", 3.35e12),
        (Flops, "312 TFLOP/s", 312e12),
        (Flops, "1.5 EFLOP/s", 1.5e18),
        (Seconds, "5 us", 5e-6),
        (Seconds, "5 µs", 5e-6),
        (Seconds, "20 ns", 2e-8),
        (Seconds, "1e-3 ms", 1e-6),
        (Seconds, "2 min", 120.0),
        (Seconds, "237.3 d", 237.3 * 86400),
        (Seconds, 3.5, 3.5),
    ],
)
def test_quantity(kind: Any, text: object, value: float) -> None:
    read = TypeAdapter(kind).validate_python(text, strict=True)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize("kind", [Bytes, Bandwidth, Flops, Seconds])
@pytest.mark.parametrize(
    "text",
    ["", "5", "GB", "5 parsecs", "80GB", "nan GB", "inf s", "-1 B", "-1 s", "inf B/s", "0x5 B", "5 gb", True, None],
)
def test_not_a_quantity(kind: Any, text: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(kind).validate_python(text, strict=True)


@pytest.mark.parametrize("kind", [Bandwidth, Flops, Seconds])
@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_quantities_are_finite(kind: Any, number: float) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(kind).validate_python(number)


@pytest.mark.parametrize("text", [RECIPE, EXPERTS, RECIPE + '[[precision.layers]]\nmatch = "head"\ncompute = "fp32"\n'])
def test_recipe_there_and_back(text: str, tmp_path: Path) -> None:
    _there_and_back(load_recipe, text, tmp_path)


def test_plan_there_and_back(tmp_path: Path) -> None:
    _there_and_back(load_plan, "", tmp_path)
    _there_and_back(load_plan, 'recompute = {full = "0-3, 5", selective = "4"}\n', tmp_path)
    _there_and_back(
        load_plan, "microbatches = 4\ndegrees.tp = 2\nmapping.tp = {node = 2}\npipeline.layers = [1, 3]\n", tmp_path
    )


def test_recompute_by_layer() -> None:
    plan = Plan(recompute=RecomputeLayers(full="0-1, 5", selective="3"))
    assert plan.recompute_modes(7) == ("full", "full", "none", "selective", "none", "full", "none")
    assert Plan(recompute="full").recompute_modes(2) == ("full", "full")
    assert str(plan.recompute) == "full 0-1, 5, selective 3"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{full = "0-3", selective = "3-4"}', r"recompute\.selective: must not name layer 3 again"),
        ('{full = "0-3, 2"}', r"recompute\.full: must not name layer 2 again"),
        ('{full = "3-1"}', r"recompute\.full: must have ranges that count upwards .*but has 3-1"),
        ('{full = "0-100000"}', r"recompute\.full: must have ranges .*below 100,000"),
        ('{full = "first"}', r"recompute\.full: is \"first\""),
        ('{fully = "0-3"}', r"recompute\.fully: is not a setting.*(\n.*)*`full`"),
        ("{}", r"recompute\.full: must name layers, or"),
        ('"ful"', r'recompute: is "ful", but must be one of none, selective, full'),
    ],
)
def test_recompute_that_cannot_be_is_refused(text: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(f"recompute = {text}\n")
    with pytest.raises(SpecError, match=told):
        load_plan(tmp_path / "plan.toml")


def _there_and_back(load: Any, text: str, folder: Path) -> None:
    (folder / "first.toml").write_text(text)
    first = load(folder / "first.toml")
    (folder / "second.toml").write_text(toml.dumps(first))
    assert load(folder / "second.toml") == first


def test_base_gives_what_the_table_does_not(tmp_path: Path) -> None:
    head, rest = RECIPE[: RECIPE.index("[model]")], RECIPE[RECIPE.index("[data]") :]
    table = '[model]\nbase = "mixtral-8x7b"\nlayers = 2\n[model.moe]\nexperts = 16\n'
    (tmp_path / "recipe.toml").write_text(head + table + rest)
    model, base = load_recipe(tmp_path / "recipe.toml").model, load_model("mixtral-8x7b")
    assert base.moe is not None
    assert model == base.model_copy(update={"layers": 2, "moe": base.moe.model_copy(update={"experts": 16})})


def test_a_folder_named_like_a_cluster_does_not_hide_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sunway").mkdir()
    assert load_cluster("sunway").chips == 96_000


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_bytes('name = "café"'.encode("latin-1"))
    with pytest.raises(SpecError, match="is not text in UTF-8"):
        load_recipe(tmp_path / "recipe.toml")


def test_nearest_numbers() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert closest_divisor(5, 12) == 6
    assert closest_divisor(5, 12, also=lambda divisor: divisor % 2 == 1) == 3
    assert closest_divisor(5, 12, also=lambda divisor: divisor > 12) is None
    assert closest_multiple(13, 8) == 16
    assert closest_multiple(3, 8) == 8


@pytest.mark.parametrize("kind", FILE_KINDS)
def test_schema_is_strict_and_explained(kind: Any) -> None:
    described = json_schema(kind)
    tables = [*described.get("$defs", {}).values(), *([described] if "properties" in described else [])]
    assert tables
    for table in tables:
        assert table["additionalProperties"] is False
        assert table["description"]
    assert json.loads(json.dumps(described)) == described


def test_schema_of_the_recipe_allows_a_base() -> None:
    recipe = json_schema("recipe")
    model, moe = (recipe["$defs"][name] for name in ("Model", "Moe"))
    assert "llama3-8b" in model["properties"]["base"]["enum"]
    assert "required" not in model
    from_weights, alone = recipe["anyOf"]
    assert from_weights == {"required": ["weights"]}
    assert alone["required"] == ["model"] and "model" not in recipe["required"]
    base, whole = alone["properties"]["model"]["anyOf"]
    assert base == {"required": ["base"]}
    assert whole["required"] == ["vocabulary", "layers", "width", "heads"]
    assert whole["properties"]["moe"] == {"required": ["experts", "top_k", "width"]}
    assert "required" not in moe
    assert model["properties"]["width"]["description"] == "Width of the residual stream."


def test_schema_has_every_field_and_quantities_as_text() -> None:
    for kind, described in (("recipe", Recipe), ("cluster", Cluster), ("plan", Plan)):
        assert set(json_schema(kind)["properties"]) == set(described.model_fields)  # type: ignore[arg-type]
    memory = json_schema("cluster")["$defs"]["Chip"]["properties"]["memory"]
    assert memory["type"] == "string" and memory["examples"] == ["80 GiB"]


def test_schema_command(tmp_path: Path) -> None:
    run = CliRunner()
    assert all(kind in run.invoke(app, ["schema"]).stdout for kind in FILE_KINDS)
    assert json.loads(run.invoke(app, ["schema", "plan"]).stdout) == json_schema("plan")
    assert run.invoke(app, ["schema", "-o", str(tmp_path / "schemas")]).exit_code == 0
    assert sorted(file.name for file in (tmp_path / "schemas").iterdir()) == sorted(
        f"{kind}.schema.json" for kind in FILE_KINDS
    )
    assert "did you mean `recipe`?" in str(run.invoke(app, ["schema", "recipes"]).exception)

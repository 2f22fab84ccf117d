"""Every entry of the catalog reads, says where it comes from, round-trips, and can be printed."""

import json
from math import prod
from pathlib import Path

import pytest
from typer.testing import CliRunner

from danlu.cli.app import app
from danlu.spec import toml
from danlu.spec.catalog import catalog_entries
from danlu.spec.load import load_cluster, load_model

MODELS, CLUSTERS = catalog_entries("models"), catalog_entries("clusters")
DAY = 86400.0


@pytest.mark.parametrize("name", MODELS)
def test_model(name: str, tmp_path: Path) -> None:
    model = load_model(name)
    assert model.name == name
    assert model.source
    (tmp_path / "again.toml").write_text(toml.dumps(model))
    assert load_model(str(tmp_path / "again.toml")) == model


@pytest.mark.parametrize("name", CLUSTERS)
def test_cluster(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.source
    assert cluster.levels[0].name == "node"
    assert cluster.chip.kind in ("cpu", "cuda", "rocm", "ascend")
    assert "bf16" in cluster.chip.peak
    (tmp_path / "again.toml").write_text(toml.dumps(cluster))
    assert load_cluster(str(tmp_path / "again.toml")) == cluster


def test_names_are_unique() -> None:
    assert not MODELS.keys() & CLUSTERS.keys()


def test_the_machines_of_the_papers() -> None:
    h100, sunway = load_cluster("h100-pod"), load_cluster("sunway")
    assert prod(level.fanout for level in h100.levels[:2]) == 3072
    assert h100.failures is not None
    assert 54 * DAY / (h100.failures.node_mtbf / 2048) == pytest.approx(466, rel=0.001)
    assert sunway.failures is not None
    assert sunway.failures.node_mtbf / 100_000 == 3600
    assert sunway.chips * sunway.chip.peak["fp16"] == pytest.approx(5.3e18, rel=0.01)
    assert sunway.chips * sunway.chip.memory > 9e15


def test_bagualu_divides_over_its_machine() -> None:
    moe, sunway = load_model("bagualu-14t-like").moe, load_cluster("sunway")
    assert moe is not None
    assert moe.experts % sunway.levels[-1].fanout == 0
    assert sunway.chips % moe.experts == 0


def test_tables() -> None:
    out = CliRunner().invoke(app, ["catalog"]).stdout
    assert all(name in out for name in (*MODELS, *CLUSTERS))
    assert "1 × node · 256 × supernode · 375 × fabric" in out
    assert "8 of 256" in out


def test_json() -> None:
    answer = json.loads(CliRunner().invoke(app, ["catalog", "--json"]).stdout)
    assert [model["name"] for model in answer["models"]] == list(MODELS)
    assert {cluster["name"]: cluster["chips"] for cluster in answer["clusters"]}["sunway"] == 96_000
    entry = json.loads(CliRunner().invoke(app, ["catalog", "local", "--json"]).stdout)
    assert entry["chip"]["memory"] == 4_000_000_000


@pytest.mark.parametrize("name", ["llama3-8b", "sunway"])
def test_an_entry_is_printed_as_its_file(name: str) -> None:
    assert CliRunner().invoke(app, ["catalog", name]).stdout == (MODELS | CLUSTERS)[name].read_text()


def test_unknown_entry() -> None:
    assert "did you mean `llama3-8b`?" in str(CliRunner().invoke(app, ["catalog", "llama-8b"]).exception)

"""Metrics beside the run's own files: what is served, what W&B gets, and that neither can end a run."""

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danlu.framework.event_metrics import event_metrics
from danlu.framework.event_writer import EventWriter
from danlu.framework.metrics_server import MetricsServer
from danlu.framework.wandb_writer import WandbWriter
from danlu.spec import EvaluationEvent, RunFolder, SpecError, StepEvent, WarningEvent
from danlu.spec.catalog import catalog_entries
from danlu.spec.check import load_run_spec
from danlu.spec.plan import Plan
from danlu.spec.recipe import Recipe
from danlu.spec.toml import read


def _step(step: int, loss: float = 2.0, committed: bool = True) -> StepEvent:
    return StepEvent(
        time=1.0, step=step, loss=loss, norm=0.5, learning_rate=1e-3, tokens=100, seconds=0.5, memory=7,
        committed=committed,
    )  # fmt: skip


EVALUATED = EvaluationEvent(time=1.0, step=2, losses={'a "quoted" set': 1.5}, tokens={'a "quoted" set': 9}, seconds=1.0)


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    served = MetricsServer("my-run", 0)  # 0: any free port
    yield served
    served.close()


def get(server: MetricsServer, path: str, host: str | None = None) -> tuple[str, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{server.port}{path}")
    if host is not None:
        request.add_header("Host", host)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode(), answer.headers


def test_prometheus_text(server: MetricsServer) -> None:
    for event in (_step(1), _step(2, loss=float("nan"), committed=False), EVALUATED):
        server.add(event)
    text, headers = get(server, "/metrics")
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    lines = text.splitlines()
    assert 'danlu_step{run="my-run"} 2.0' in lines
    assert 'danlu_loss{run="my-run"} NaN' in lines
    assert 'danlu_tokens_per_second{run="my-run"} 200.0' in lines
    assert 'danlu_tokens_total{run="my-run"} 200.0' in lines
    assert 'danlu_skipped_steps_total{run="my-run"} 1.0' in lines
    assert r'danlu_held_out_loss{run="my-run",data="a \"quoted\" set"} 1.5' in lines
    for name in {line.partition("{")[0] for line in lines if not line.startswith("#")}:
        assert sum(line.startswith(f"# TYPE {name} ") for line in lines) == 1, name
        assert sum(line.startswith(f"# HELP {name} ") for line in lines) == 1, name


def test_events_are_fed_from_where_a_reader_stopped(server: MetricsServer) -> None:
    for step in (1, 2, 3):
        server.add(_step(step))
    text, headers = get(server, "/events?after=1")
    assert [json.loads(line)["step"] for line in text.splitlines()] == [2, 3]
    assert get(server, f"/events?after={headers['Danlu-Events']}")[0] == ""


@pytest.mark.parametrize(
    ("path", "host", "status"),
    [("/", None, 404), ("/events?after=x", None, 400), ("/metrics", "evil.example:80", 403)],
)
def test_other_requests_are_refused(server: MetricsServer, path: str, host: str | None, status: int) -> None:
    with pytest.raises(urllib.error.HTTPError) as raised:
        get(server, path, host)
    assert raised.value.code == status
    raised.value.close()


def test_the_port_is_not_reachable_from_other_hosts(server: MetricsServer) -> None:
    address = server._server.server_address[0]
    assert address == "127.0.0.1"
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", server.port))


def recipe(mode: str = "offline") -> Recipe:
    return Recipe.model_validate(
        {
            "name": "small",
            "steps": 3,
            "model": read(catalog_entries("models")["tiny-llama"]).values,
            "data": {"shards": "shards"},
            "batch": {"sequences": 1, "length": 8},
            "metrics": {"wandb": "project", "wandb_mode": mode},
        }
    )


def _log_records(data: bytes) -> Iterator[bytes]:
    """Records of a log in LevelDB's format, which W&B's files have after seven bytes of their own."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # what is left of a block is too small for a header
            at += 32768 - at % 32768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def _offline_rows(folder: Path) -> list[dict[str, Any]]:
    """The history in W&B's own files."""
    from wandb.proto import wandb_internal_pb2

    rows = []
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in _log_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                rows.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return rows


def test_wandb_has_every_step_also_those_that_a_resumed_run_repeats(tmp_path: Path) -> None:
    run, warnings = RunFolder(tmp_path / "run"), list[str]()
    run.path.mkdir()
    for first in (1, 2):  # the second start resumes from step 1
        with EventWriter(run, sinks=[WandbWriter(run, recipe(), warnings.append)]) as writer:
            for step in range(first, 4):
                writer.write(_step(step, loss=float(first)))
            writer.write(EVALUATED)
        time.sleep(1.1)  # W&B names its folders by the second
    assert not warnings
    rows = _offline_rows(run.path)
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (2, 2.0),
        (3, 2.0),
    ]
    assert [row['held-out loss/a "quoted" set'] for row in rows if "loss" not in row] == [1.5, 1.5]


def test_wandb_that_fails_is_a_warning_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)  # as if it were not installed
    run, warnings = RunFolder(tmp_path / "run"), list[str]()
    run.path.mkdir()
    with EventWriter(run, sinks=[WandbWriter(run, recipe(), warnings.append)]) as writer:
        writer.write(_step(1))
    assert len(warnings) == 1
    assert "pip install 'danlu[wandb]'" in warnings[0]
    assert [event.kind for event in run.read_events()] == ["step"]


def test_events_without_figures_have_no_metrics() -> None:
    assert event_metrics(WarningEvent(time=1.0, rank=0, message="")) is None


def test_a_mode_without_a_project_is_refused(tmp_path: Path) -> None:
    text = """
        name = "small"
        steps = 4
        model = { base = "tiny-llama", vocabulary = 264 }
        data = { shards = "shards" }
        batch = { sequences = 8, length = 64 }
        metrics = { wandb_mode = "offline" }
    """
    (tmp_path / "recipe.toml").write_text(text)
    with pytest.raises(SpecError, match=r"`metrics.wandb` names no project"):
        load_run_spec(tmp_path / "recipe.toml", None, None, Plan())

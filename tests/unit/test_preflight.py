"""A save tried out before the first step: what it finds, and what it refuses to start with."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from danlu.comm.world import World
from danlu.storage.checkpoint import preflight as room
from danlu.storage.checkpoint.engine import CheckpointEngine
from danlu.storage.checkpoint.preflight import PreflightError, SaveEstimate, probe_save_cost
from danlu.storage.store.local_store import LocalStore

TENSORS = {"w": torch.randn(300, 100), "n": torch.tensor(1.0)}
BYTES = 300 * 100 * 4 + 4


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[CheckpointEngine]:
    made = CheckpointEngine(LocalStore(tmp_path / "store"), 2, World.adopt(), staging=tmp_path / "memory")
    yield made
    made.close()


def test_it_measures_and_leaves_nothing_behind(checkpoints: CheckpointEngine, tmp_path: Path) -> None:
    found = probe_save_cost(checkpoints, TENSORS, first_on_host=True)
    assert BYTES <= found.bytes <= BYTES + 64
    assert found.seconds == pytest.approx(found.bytes / found.bandwidth)
    assert 0 < found.seconds < 60 and 0 <= found.stall < 60
    assert found.free_bytes is not None and found.free_bytes > 0
    assert list((tmp_path / "store").iterdir()) == []
    assert checkpoints.save(1, TENSORS, {"step": 1}).bytes == found.bytes


def test_no_more_than_a_probe_is_written_and_copied(
    checkpoints: CheckpointEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room, "PROBE_BYTES", 5000)
    monkeypatch.setattr(room, "CHUNK_BYTES", 1000)
    written: list[int] = []
    write = LocalStore.write

    def counted(store: LocalStore, path: str, parts: list[bytes]) -> None:
        written.append(sum(map(len, parts)))
        write(store, path, parts)

    monkeypatch.setattr(LocalStore, "write", counted)
    assert probe_save_cost(checkpoints, TENSORS, first_on_host=True).bytes >= BYTES
    assert written == [5000]


def test_a_full_store_is_refused_and_what_is_kept_counts(
    checkpoints: CheckpointEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalStore, "free_bytes", lambda store: 3 * BYTES - 1)
    with pytest.raises(PreflightError, match=r"space for 2 checkpoints and the one being written.*`checkpoint\.keep`"):
        probe_save_cost(checkpoints, TENSORS, first_on_host=True)
    checkpoints.save(1, TENSORS, {"step": 1})
    assert probe_save_cost(checkpoints, TENSORS, first_on_host=True).free_bytes == 3 * BYTES - 1


def test_a_store_that_cannot_be_written_is_refused(checkpoints: CheckpointEngine, tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file, where a folder is needed")
    with pytest.raises(PreflightError, match="cannot be written"):
        probe_save_cost(checkpoints, TENSORS, first_on_host=True)


def test_a_store_that_cannot_create_once_is_refused(
    checkpoints: CheckpointEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(store: LocalStore, path: str, data: bytes) -> None:
        raise OSError("has no hard links")

    monkeypatch.setattr(LocalStore, "create", refuse)
    with pytest.raises(PreflightError, match="has no hard links"):
        probe_save_cost(checkpoints, TENSORS, first_on_host=True)


def test_too_little_memory_is_refused(checkpoints: CheckpointEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", refuse)
    with pytest.raises(PreflightError, match="this host's memory must hold 2 copies"):
        probe_save_cost(checkpoints, TENSORS, first_on_host=True)


def test_young() -> None:
    found = SaveEstimate(bytes=10, seconds=8.0, stall=0.1, bandwidth=1.25, free_bytes=None)
    assert found.optimal_interval(10_000.0) == 400.0
    assert found.optimal_interval(1.0) == 8.0, "not more often than a save takes"

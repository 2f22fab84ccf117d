"""A folder that PyTorch's distributed checkpoint wrote on two ranks, imported: every tensor equals."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from dcp_rank import tensors
from ranks import run_ranks

from danlu.cli import main
from danlu.storage.checkpoint.compare import read_bits
from danlu.storage.checkpoint.foreign.megatron import open_megatron
from danlu.storage.checkpoint.foreign.safe_pickle import CheckpointImportError
from danlu.storage.checkpoint.reader import CheckpointReader
from danlu.storage.store.base import open_store


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp") / "iter_0000120"
    run_ranks(Path(__file__).with_name("dcp_rank.py"), 2, str(folder), seconds=360)
    assert len(list(folder.glob("*.distcp"))) == 2
    return folder


def imported(kind: str, folder: Path, output: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["danlu", "import", kind, str(folder), "-o", str(output)])
    with pytest.raises(SystemExit) as ending:
        main()
    return int(ending.value.code or 0)


def assert_equal(output: Path) -> None:
    reader = CheckpointReader(open_store(str(output)), 120)
    assert set(reader.manifest.tensors) == set(tensors())
    for name, tensor in tensors().items():
        bits = read_bits(reader, name)
        expected = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        assert bits.shape == tuple(tensor.shape)
        assert np.array_equal(np.ascontiguousarray(bits).reshape(-1).view(np.uint8), expected), name


def test_every_tensor_equals(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert imported("dcp", saved, tmp_path / "out", monkeypatch) == 0
    out, err = capsys.readouterr()
    assert f"step 120: {len(tensors())} tensors" in out
    assert "not imported: settings.lr: an object of Python" in err
    assert_equal(tmp_path / "out")
    assert imported("dcp", saved, tmp_path / "out", monkeypatch) == 2
    assert "must be new, but exists already" in capsys.readouterr().err


def test_a_folder_of_megatron(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(CheckpointImportError, match=r"must hold metadata\.json"):
        open_megatron(saved)
    (saved / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    (saved / "common.pt").write_bytes(b"never opened")
    assert imported("megatron", saved, tmp_path / "out", monkeypatch) == 0
    assert "not imported: common.pt" in capsys.readouterr().err
    assert_equal(tmp_path / "out")


def test_a_data_file_that_was_cut_short(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "step-120"
    broken.mkdir()
    for file in saved.iterdir():
        content = file.read_bytes()
        (broken / file.name).write_bytes(content[: len(content) // 2] if file.suffix == ".distcp" else content)
    assert imported("dcp", broken, tmp_path / "out", monkeypatch) == 2
    assert not (tmp_path / "out" / "step-00000120" / "manifest.json").exists()

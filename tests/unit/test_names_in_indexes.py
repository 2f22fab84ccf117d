"""An index names files of its own folder and no others, whoever reads it; links that its owner made are followed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from danlu.spec import SpecError
from danlu.storage.checkpoint.foreign.safe_pickle import CheckpointImportError
from danlu.storage.checkpoint.foreign.safetensors_files import open_safetensors
from danlu.storage.checkpoint.manifest import CorruptCheckpointError, Leaf, parse_metadata
from danlu.storage.checkpoint.safetensors_io import SafetensorsReader
from danlu.storage.data.dataset_index import ShardInfo
from danlu.storage.store.safe_path import UnsafePathError, sibling_file

OUTSIDE = ["../secret.safetensors", "{root}/secret.safetensors", "x/../../secret.safetensors", "..", ".", ""]


def hugging_face(folder: Path) -> list[str]:
    return SafetensorsReader(folder, "model").names


def imported(folder: Path) -> list[str]:
    return [tensor.name for tensor in open_safetensors(folder).tensors]


Reading = Callable[[Path], list[str]]
READERS = pytest.mark.parametrize("read", [hugging_face, imported])


def model(folder: Path, file: object) -> Path:
    """A folder with an index that says tensor `w` is in `file`; beside the folder lies a file that is not its own."""
    folder.mkdir(parents=True)
    save_file({"w": torch.ones(3)}, folder.parent / "secret.safetensors")
    (folder / "x").mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    return folder


@READERS
@pytest.mark.parametrize("name", OUTSIDE)
def test_a_name_out_of_the_folder_is_refused(read: Reading, name: str, tmp_path: Path) -> None:
    folder = model(tmp_path / "model", name.format(root=tmp_path))
    with pytest.raises((SpecError, CheckpointImportError)) as refused:
        read(folder)
    assert "must name files beside it, but names" in str(refused.value)
    assert "model.safetensors.index.json" in str(refused.value) and "a source you trust" in str(refused.value)


@READERS
def test_links_in_a_folder_are_followed(read: Reading, tmp_path: Path) -> None:
    """A snapshot in Hugging Face's cache is a folder of links to `../../blobs`."""
    folder = model(tmp_path / "snapshots" / "a1b2", "model-00001-of-00001.safetensors")
    (tmp_path / "blobs").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "blobs" / "c3d4")
    (folder / "model-00001-of-00001.safetensors").symlink_to("../../blobs/c3d4")
    assert read(folder) == ["w"]


@pytest.mark.parametrize("name", [7, None, ["a"], "a\\b", "a\0b", "a\nb", "a\x1b[2J", "sub/file", "x" * 300])
def test_only_plain_names_are_taken(name: object, tmp_path: Path) -> None:
    with pytest.raises(UnsafePathError, match="must name files beside it, but names"):
        sibling_file(tmp_path / "index.json", name)
    assert sibling_file(tmp_path / "index.json", "a.bin") == tmp_path / "a.bin"


@pytest.mark.parametrize("name", ["../00000.bin", "/etc/passwd", "00000.bin\n", "a/00000.bin"])
def test_the_index_of_a_data_set_and_a_checkpoint_name_their_own_files(name: str) -> None:
    with pytest.raises(ValueError, match="file"):
        ShardInfo(file=name, tokens=1, sha256="0" * 64)
    leaf = {"step": 1, "attempt": "0" * 8, "writer": 0, "pack": name, "bytes": 0, "finite": True, "tensors": {}}
    with pytest.raises(CorruptCheckpointError, match="pack"):
        parse_metadata(Leaf, json.dumps(leaf).encode(), "here")

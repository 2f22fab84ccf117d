"""Checkpoints of other systems: what is read, and above all what is refused."""

import io
import json
import os
import pickle
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from danlu.cli import main
from danlu.storage.checkpoint.compare import decode_numbers, read_bits
from danlu.storage.checkpoint.foreign.dcp import open_dcp
from danlu.storage.checkpoint.foreign.megatron import open_megatron
from danlu.storage.checkpoint.foreign.safe_pickle import CheckpointImportError, PickledObject, read_pickle
from danlu.storage.checkpoint.foreign.safetensors_files import open_safetensors
from danlu.storage.checkpoint.foreign.torch_zip import FileSlice, read_tensor
from danlu.storage.checkpoint.reader import CheckpointReader
from danlu.storage.store.base import open_store

PLAIN = {"a": [1, 2.5, None, True, "x", b"y", (1, 2, 3, 4), 2**80, -7], 3: {"deep": [{}, [], ()]}, "s": {1, 2}}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_is_read_as_it_is(protocol: int) -> None:
    data = PLAIN if protocol >= 4 else {key: value for key, value in PLAIN.items() if key != "s"}
    data = data if protocol >= 3 else {3: data[3]}
    assert read_pickle(pickle.dumps(data, protocol), "here", {}) == data


def test_a_permitted_class_is_a_record_and_no_object() -> None:
    made = read_pickle(pickle.dumps(OrderedDict(a=1)), "here", {"collections": frozenset({"OrderedDict"})})
    assert isinstance(made, PickledObject) and str(made.cls) == "collections.OrderedDict" and made.items == [("a", 1)]


class _Runs:
    def __init__(self, act: Any, *arguments: Any) -> None:
        self.call = act, arguments

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    "evil",
    [_Runs(os.system, "touch ran"), _Runs(eval, "open('ran', 'w')"), {"x": [_Runs(exec, "open('ran', 'w')")]}],
    ids=["system", "eval", "nested"],
)
def test_a_pickle_that_would_run_something_is_refused(
    evil: Any, protocol: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "step-1"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(evil, protocol))
    monkeypatch.setattr("sys.argv", ["danlu", "import", "dcp", str(folder), "-o", "out"])
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 2
    assert "is refused" in capsys.readouterr().err
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("program", "says"),
    [
        (b"cos\nsystem\n(S'touch ran'\ntR.", "it asks for os.system"),
        (b"\x80\x02cbuiltins\ngetattr\n.", "it asks for builtins.getattr"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", "it asks for os.system"),
        (b"\x80\x04\x8c\x0ctorch.Size.x\x8c\x01y\x93.", "it asks for torch.Size.x.y"),
        (b"\x80\x04]K\x01\x93.", "it asks for"),  # a global whose names are no texts
        (b"(S'touch ran'\nios\nsystem\n.", "INST at byte"),
        (b"\x80\x02\x82\x01.", "EXT1 at byte"),
        (b"\x80\x04K\x01)R.", "it calls 1, which is not a class"),
        (b"\x80\x04K\x01}b.", "it sets the state of int"),
        (b"\x80\x04K\x01K\x02a.", "it appends to int"),
        (b"\x80\x04K\x01K\x02K\x03s.", "it sets items of int"),
        (b"\x80\x04\x86.", "it makes a tuple of values that are not there"),
        (b"\x80\x04e.", "is not a readable pickle"),
        (b"\x80\x04h\x07.", "is not a readable pickle"),
        (b"\x80\x04]", "is not a readable pickle"),
        (b"\x80\x04}]K\x01s.", "is not a readable pickle"),  # a list as a key
        (b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fx.", "is not a readable pickle"),
        (b"", "is not a readable pickle"),
        (b"hello", "is not a readable pickle"),
    ],
)
def test_programs_written_by_hand(program: bytes, says: str) -> None:
    with pytest.raises(CheckpointImportError, match=says.replace(".", r"\.").replace("(", r"\(")):
        read_pickle(program, "here", {"torch": frozenset({"Size"})})


def test_a_pickle_that_is_too_long_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("danlu.storage.checkpoint.foreign.safe_pickle.MAX_PICKLE_BYTES", 10)
    with pytest.raises(CheckpointImportError, match="no pickle above 10"):
        read_pickle(b"x" * 11, "here", {})


# --- a tensor as torch.save writes it


def record(path: Path, value: Any) -> FileSlice:
    stream = io.BytesIO()
    torch.save(value, stream)
    path.write_bytes(b"before" + stream.getvalue() + b"after")
    return FileSlice(path, 6, stream.tell())


def test_a_tensor_is_found_in_its_record(tmp_path: Path) -> None:
    tensor = torch.randn(10, 6)[2:9:3, 1:].t()  # a view: not from the start, not in rows
    found = read_tensor(record(tmp_path / "file", tensor), "F32", (5, 3))
    assert bytes(found) == tensor.contiguous().numpy().tobytes()


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": 1}, "must describe one tensor"),
        (torch.zeros(4), r"must hold F32 \[3\] as the metadata says, but has F32 \[4\]"),
        (torch.zeros(3, dtype=torch.int32), "but has I32"),
        (torch.device("cpu"), "is refused"),
        (torch.zeros(3).to_sparse(), "is refused"),
    ],
)
def test_a_record_of_something_else_is_refused(tmp_path: Path, value: Any, says: str) -> None:
    with pytest.raises(CheckpointImportError, match=says):
        read_tensor(record(tmp_path / "file", value), "F32", (3,))


def tampered(path: Path, change: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> FileSlice:
    stream = io.BytesIO()
    torch.save(torch.zeros(3), stream)
    with zipfile.ZipFile(stream) as old, zipfile.ZipFile(path, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change.get(name.partition("/")[2], old.read(name)))
    return FileSlice(path, 0, path.stat().st_size)


def test_a_record_that_was_tampered_with_is_refused(tmp_path: Path) -> None:
    cases = {
        "is refused": tampered(tmp_path / "a", {"data.pkl": pickle.dumps(_Runs(os.system, "touch ran"))}),
        "must lie inside its storage of 8 bytes": tampered(tmp_path / "b", {"data/0": bytes(8)}),
        "big-endian": tampered(tmp_path / "c", {"byteorder": b"big"}),
        "must be stored uncompressed": tampered(tmp_path / "d", {}, zipfile.ZIP_DEFLATED),
        "must be a zip": FileSlice(tmp_path / "a", 0, 20),
    }
    for says, place in cases.items():
        with pytest.raises(CheckpointImportError, match=says):
            read_tensor(place, "F32", (3,))


# --- folders


def test_what_is_no_folder_of_the_kind(tmp_path: Path) -> None:
    with pytest.raises(CheckpointImportError, match=r"must hold \.metadata"):
        open_dcp(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(CheckpointImportError, match="must describe a distributed checkpoint"):
        open_dcp(tmp_path)
    for text, says in (("[", "must be a JSON object"), ("[]", "JSON object"), ('{"sharded_backend":"zarr"}', "'zarr'")):
        (tmp_path / "metadata.json").write_text(text)
        with pytest.raises(CheckpointImportError, match=says):
            open_megatron(tmp_path)


def dcp_metadata(path: str, **info: Any) -> bytes:
    from torch.distributed.checkpoint import metadata as m
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    chunk = m.ChunkStorageMetadata(torch.Size([0]), torch.Size([3]))
    tensor = m.TensorStorageMetadata(m.TensorProperties(dtype=torch.float32), torch.Size([3]), [chunk])
    place = _StorageInfo(relative_path=path, offset=0, length=10, **info)
    return pickle.dumps(m.Metadata({"w": tensor}, storage_data={m.MetadataIndex("w", torch.Size([0]), 0): place}))


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "a/b", "", ".."])
def test_a_data_file_elsewhere_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / ".metadata").write_bytes(dcp_metadata(path))
    with pytest.raises(CheckpointImportError, match="must name files beside it"):
        open_dcp(tmp_path)


def test_members_of_an_enum_are_read_as_any_python_writes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3.11.0 to 3.11.3, Debian 12's among them, write `getattr(class, name)`; nothing of it is called."""
    from torch.distributed.checkpoint import metadata as m

    monkeypatch.setattr(m._MEM_FORMAT_ENCODING, "__reduce_ex__", lambda self, _: (getattr, (type(self), self.name)))
    written = dcp_metadata("x.distcp")
    assert b"getattr" in written
    (tmp_path / ".metadata").write_bytes(written)
    (tensor,) = open_dcp(tmp_path).tensors
    assert tensor.name == "w" and tensor.shape == (3,)


def test_a_transformed_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(dcp_metadata("x.distcp", transform_descriptors=["zstd"]))
    with pytest.raises(CheckpointImportError, match="has transforms"):
        open_dcp(tmp_path)


# --- safetensors


def safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        dtype = {"float32": "F32", "uint16": "BF16"}[str(array.dtype)]
        span = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": span}
        data += array.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_safetensors_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w, b = np.random.default_rng(0).random((5, 3)).astype(np.float32), np.array([0x3F80, 0x4000], np.uint16)
    folder = tmp_path / "model"
    folder.mkdir()
    safetensors(folder / "m-1.safetensors", {"w": w})
    safetensors(folder / "m-2.safetensors", {"b": b})
    index = {"weight_map": {"w": "m-1.safetensors", "b": "m-2.safetensors"}}
    (folder / "m.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr("sys.argv", ["danlu", "import", "safetensors", str(folder), "-o", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as ending:
        main()
    assert ending.value.code == 2, "the folder's name has no step"
    monkeypatch.setattr("sys.argv", [*sys.argv, "--step", "9"])
    with pytest.raises(SystemExit) as ending:
        main()
    assert not ending.value.code
    reader = CheckpointReader(open_store(str(tmp_path / "out")), 9)
    assert np.array_equal(decode_numbers(read_bits(reader, "w"), "F32"), w)
    assert decode_numbers(read_bits(reader, "b"), "BF16").tolist() == [1.0, 2.0]
    assert [t.name for t in open_safetensors(folder / "m-2.safetensors").tensors] == ["b"]


def test_broken_safetensors_are_refused(tmp_path: Path) -> None:
    good = tmp_path / "good.safetensors"
    safetensors(good, {"w": np.zeros(3, np.float32)})
    content = good.read_bytes()
    cases = {
        "its header would have": b"\xff" * 8 + content[8:],
        "is not JSON": content[:8] + b"x" + content[9:],
        "must lie inside the file": content[:-1],
        "is stored as F33": content.replace(b"F32", b"F33"),
        "whole numbers": (len(content) - 8 - 12 + 1).to_bytes(8, "little") + content[8:].replace(b"[3]", b"[-3]"),
    }
    for says, broken in cases.items():
        (tmp_path / "broken.safetensors").write_bytes(broken)
        with pytest.raises(CheckpointImportError, match=says):
            open_safetensors(tmp_path / "broken.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointImportError, match="holds none"):
        open_safetensors(tmp_path / "empty")
    (tmp_path / "x.safetensors.index.json").write_text('{"weight_map": {"w": "../x.safetensors"}}')
    with pytest.raises(CheckpointImportError, match="must name files beside it"):
        open_safetensors(tmp_path)
    (tmp_path / "x.safetensors.index.json").write_text('{"weight_map": {"w": "absent.safetensors"}}')
    with pytest.raises(CheckpointImportError, match="lacks 1 of the files"):
        open_safetensors(tmp_path)

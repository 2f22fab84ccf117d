"""`danlu ckpt` as a user runs it, on checkpoints made by hand."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from made_checkpoints import HALF, WEIGHT, flip, one_writer, two_writers
from made_runs import make_run

from danlu.cli import main
from danlu.comm.world import World
from danlu.spec import RunFolder
from danlu.storage.checkpoint.async_saver import SavePolicy
from danlu.storage.checkpoint.checkpoint_dir import CheckpointDir
from danlu.storage.checkpoint.compare import decode_numbers, read_bits
from danlu.storage.checkpoint.copying import copy_checkpoint
from danlu.storage.checkpoint.engine import CheckpointEngine
from danlu.storage.checkpoint.manifest import MANIFEST_FILE
from danlu.storage.checkpoint.reader import CheckpointReader
from danlu.storage.store.base import open_store
from danlu.storage.store.local_store import LocalStore

Danlu = Callable[..., tuple[int, str, str]]


@pytest.fixture
def danlu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Danlu:
    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["danlu", *arguments])
        with pytest.raises(SystemExit) as ending:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        return int(ending.value.code or 0), out, err

    return call


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """A run with steps 4 and 8 complete, 2 set aside, and the leftovers of 12."""
    monkeypatch.chdir(tmp_path)
    made = make_run(tmp_path / "runs" / "mine")
    store = open_store(str(made.checkpoints))
    for step in (2, 4, 8):
        one_writer(store, step)
    CheckpointDir(store, 2).quarantine(2)
    store.write("step-00000012/0badcafe-000000.pack", [b"half"])
    return made


def pack_of(run: RunFolder, step: int) -> Path:
    (pack,) = (run.checkpoints / f"step-{step:08d}").glob("*.pack")
    return pack


# --- ls and names


def test_ls_tells_every_state(run: RunFolder, danlu: Danlu) -> None:
    (run.checkpoints / "step-00000004" / MANIFEST_FILE).write_text("{}")
    (run.checkpoints / "step-00000006").mkdir()  # nothing is in it, so nothing is told of it
    code, out, err = danlu("ckpt", "ls", "mine")
    assert code == 0
    rows = [line.split() for line in out.splitlines()]
    assert [(row[0], row[1]) for row in rows[1:]] == [
        ("2", "quarantined"),
        ("4", "damaged"),
        ("8", "complete"),
        ("12", "incomplete"),
    ]
    assert "1 leftover file" in out and "yes" in rows[3]
    assert "step 4: " in err and 'must be a "danlu checkpoint" file' in err


def test_ls_for_machines(run: RunFolder, danlu: Danlu) -> None:
    _, out, _ = danlu("ckpt", "ls", "runs/mine", "--json")
    entries = {entry["step"]: entry for entry in json.loads(out)}
    assert entries[8]["state"] == "complete" and entries[8]["tensors"] == 3 and entries[8]["finite"] is True
    assert entries[8]["layout"] == {"shard": 1, "tp": 1} and len(entries[8]["root"]) == 64
    assert "tensors" not in entries[12]


@pytest.mark.parametrize("name", ["mine", "runs/mine", "runs/mine/checkpoints", "mine@8"])
def test_a_place_may_be_named_in_several_ways(run: RunFolder, danlu: Danlu, name: str) -> None:
    code, out, _ = danlu("ckpt", "verify", name)
    assert code == 0 and "@8: intact: 3 tensors, 3 chunks" in out


def test_a_step_folder_names_its_step(run: RunFolder, danlu: Danlu) -> None:
    code, out, _ = danlu("ckpt", "verify", "runs/mine/checkpoints/step-00000004")
    assert code == 0 and "@4: intact" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ls", "mnie"], "did you mean `mine`?"),
        (["show", "mine@9"], "did you mean mine@8?"),
        (["verify", "mine@12"], "mine@12 is incomplete"),
        (["show", "mine@2"], "mine@2 is quarantined"),
        (["show", "mine", "--match", "nothing*"], "the first is model.half"),
        (["rm", "mine"], "give the step"),
        (["copy", "mine", "elsewhere@3"], "keeps its step"),
        (["verify", "mine@4", "--all"], "omit @STEP"),
        (["ls", "s33://bucket/x"], "did you mean s3://?"),
        (["ls", "s3://bucket/x", "--s3", "endpiont=x"], "did you mean `endpoint`?"),
        (["ls", "empty"], "there is no checkpoint in"),
    ],
)
def test_a_mistake_is_answered_with_what_to_do(run: RunFolder, danlu: Danlu, arguments: list[str], says: str) -> None:
    Path("empty").mkdir()
    code, _, err = danlu("ckpt", *arguments)
    assert code == 2
    assert says in err


# --- verify


def test_verify_names_tensor_and_file(run: RunFolder, danlu: Danlu) -> None:
    pack = pack_of(run, 8)
    flip(pack, at=0)  # model.half comes first
    code, out, _ = danlu("ckpt", "verify", "mine", "--all")
    assert code == 1
    assert "mine@8: CORRUPT in 1 places of 1 files" in out
    assert f"step-00000008/{pack.name} is corrupt in bytes 0 to 6" in out and "  model.half: " in out
    assert "mine@4: intact" in out


def test_verify_goes_on_after_a_missing_leaf_and_a_short_pack(tmp_path: Path, danlu: Danlu) -> None:
    two_writers(open_store(str(tmp_path)), 5)
    folder = tmp_path / "step-00000005"
    (folder / "00c0ffee-000000.json").unlink()
    (folder / "00c0ffee-000001.pack").write_bytes(b"x")
    code, out, _ = danlu("ckpt", "verify", str(tmp_path), "--json")
    assert code == 1
    (verdict,) = json.loads(out)
    assert [fault["file"] for fault in verdict["faults"]] == [
        "step-00000005/00c0ffee-000000.json",
        "step-00000005/00c0ffee-000001.pack",
    ]
    assert {fault["tensor"] for fault in verdict["faults"]} == {"model.w"}


def test_what_parity_reaches_is_mended(tmp_path: Path, danlu: Danlu) -> None:
    store = open_store(str(tmp_path))
    checkpoints = CheckpointEngine(store, 1, World.adopt(), staging=tmp_path / "shm", policy=SavePolicy(parity=1))
    checkpoints.save(5, {"model.w": torch.arange(100.0)}, {})
    checkpoints.close()
    folder = tmp_path / "step-00000005"
    (pack,), (leaf,) = folder.glob("*.pack"), folder.glob("*-000000.json")
    assert danlu("ckpt", "repair", str(tmp_path))[:2] == (0, f"{tmp_path}@5: intact, nothing to repair\n")
    flip(pack, at=3)
    leaf.unlink()
    code, out, _ = danlu("ckpt", "verify", str(tmp_path))
    assert code == 1 and "2 corrupt places, all repairable" in out and "danlu ckpt repair" in out
    code, out, _ = danlu("ckpt", "repair", str(tmp_path))
    assert code == 0 and "repaired, 2 files rewritten" in out
    assert danlu("ckpt", "verify", str(tmp_path))[0] == 0
    for name in folder.glob("*.parity*"):
        name.unlink()
    flip(pack, at=3)
    code, out, _ = danlu("ckpt", "repair", str(tmp_path), "--json")
    assert code == 1 and json.loads(out)["left"][0]["tensor"] == "model.w"


def test_verify_of_a_damaged_manifest(run: RunFolder, danlu: Danlu) -> None:
    flip(run.checkpoints / "step-00000008" / MANIFEST_FILE, at=40)
    code, out, _ = danlu("ckpt", "verify", "mine@8")
    assert code == 1 and "mine@8: CORRUPT" in out and MANIFEST_FILE in out


# --- show


def test_show(run: RunFolder, danlu: Danlu) -> None:
    code, out, _ = danlu("ckpt", "show", "mine@4", "--match", "model.*", "--chunks")
    assert code == 0
    assert "cursor = 32, imported" not in out and "cursor = 32, seed = 3, step = 4" in out
    assert "1 level: the manifest, 0 nodes, 1 leaf, 1 pack, 3 chunks" in out
    assert "model.w" in out and "6 × 4" in out and "from byte 0" in out and "optimizer.step" not in out
    _, out, _ = danlu("ckpt", "show", "mine@4", "--json")
    shown = json.loads(out)
    assert shown["tensors"]["model.half"]["dtype"] == "BF16"
    assert shown["tree"] == {"levels": 1, "nodes": 0, "leaves": 1, "packs": 1}


# --- diff


def test_the_same_tensor_of_two_layouts_is_equal_by_fingerprint(tmp_path: Path, danlu: Danlu) -> None:
    one_writer(tmp_path / "one", 5)
    two_writers(open_store(str(tmp_path / "two")), 5)
    code, out, _ = danlu("ckpt", "diff", str(tmp_path / "one"), str(tmp_path / "two"))
    assert code == 1
    assert "only in A   model.half  BF16 3" in out and "only in A   optimizer.step  I64 scalar" in out
    assert "1 of 1 shared tensors have the same bits" in out
    two_writers(open_store(str(tmp_path / "again")), 5, attempt="12345678")
    code, out, _ = danlu("ckpt", "diff", str(tmp_path / "two"), str(tmp_path / "again"), "--values")
    assert code == 0 and "different" not in out


def test_values_say_how_far(tmp_path: Path, danlu: Danlu) -> None:
    one_writer(tmp_path / "a", 5)
    other, half = WEIGHT.copy(), HALF.copy()
    other[4, 1] += 0.5
    other[5, 3] = np.inf
    half[1] = 0x4040  # 3 instead of 2
    one_writer(tmp_path / "b", 5, weight=other, half=half)
    code, out, _ = danlu("ckpt", "diff", f"{tmp_path / 'a'}@5", str(tmp_path / "b"), "--values")
    assert code == 1
    assert "model.w  max |Δ| 0.5, 2 of 24 elements (8.33 %), first at [4, 1], 1 not finite" in out
    assert "model.half  max |Δ| 1, 1 of 3 elements (33.3 %), first at [1]" in out
    assert "1 of 3 shared tensors have the same bits" in out


def test_diff_tells_shapes_and_scalars(tmp_path: Path, danlu: Danlu) -> None:
    one_writer(tmp_path, 5)
    one_writer(tmp_path, 6, weight=WEIGHT[:3])
    _, out, _ = danlu("ckpt", "diff", f"{tmp_path}@5", f"{tmp_path}@6", "--values")
    assert "shape       model.w  F32 6 × 4 → F32 3 × 4" in out
    assert "scalar      cursor  40 → 48" in out
    assert "optimizer.step  max |Δ| 1, 1 of 1 elements" in out and "first at []" in out
    code, out, _ = danlu("ckpt", "diff", f"{tmp_path}@5", f"{tmp_path}@6", "--match", "model.half", "--json")
    assert code == 0 and json.loads(out)["equal"] == 1


@pytest.mark.parametrize(
    ("dtype", "bits", "value"),
    [
        ("F8_E4M3", 0x38, 1.0),
        ("F8_E4M3", 0x7E, 448.0),
        ("F8_E4M3", 0x81, -(2.0**-9)),
        ("F8_E5M2", 0x3C, 1.0),
        ("F8_E5M2", 0x7B, 57344.0),
        ("BF16", 0xC040, -3.0),
    ],
)
def test_small_floats_are_decoded_by_hand(dtype: str, bits: int, value: float) -> None:
    width = np.uint16 if dtype == "BF16" else np.uint8
    assert float(decode_numbers(np.array([bits], width), dtype)[0]) == value  # type: ignore[arg-type]


# --- rm


def test_rm_asks_and_refuses_the_newest(run: RunFolder, danlu: Danlu, monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, err = danlu("ckpt", "rm", "mine@8", "--yes")
    assert code == 2 and "--force" in err
    monkeypatch.setattr("typer.confirm", lambda question: False)
    code, out, _ = danlu("ckpt", "rm", "mine@4")
    assert code == 1 and out == "nothing was deleted\n"
    assert (run.checkpoints / "step-00000004" / MANIFEST_FILE).exists()
    for name in ("mine@4", "mine@12", "mine@2"):
        assert danlu("ckpt", "rm", name, "-y")[0] == 0
    assert danlu("ckpt", "rm", "mine@8", "-y", "--force")[0] == 0
    assert list(run.checkpoints.iterdir()) == []


# --- copy


def test_a_copy_that_was_cut_off_before_its_parity_is_completed(tmp_path: Path, danlu: Danlu) -> None:
    store = open_store(str(tmp_path / "from"))
    checkpoints = CheckpointEngine(store, 1, World.adopt(), staging=tmp_path / "shm", policy=SavePolicy(parity=1))
    checkpoints.save(5, {"model.w": torch.arange(100.0)}, {})
    checkpoints.close()
    copy = ("ckpt", "copy", str(tmp_path / "from"), str(tmp_path / "to"))
    assert danlu(*copy)[0] == 0
    folder = tmp_path / "to" / "step-00000005"
    whole = sorted(path.name for path in folder.iterdir())
    for name in {*folder.glob("*.parity*"), *folder.glob("*-g*.json"), *folder.glob("*.copy.json")}:
        name.unlink()
    assert danlu(*copy)[1].endswith("the parity of 1 groups is new\n")
    assert "parity" not in danlu(*copy)[1]
    missing = set(whole) - {path.name for path in folder.iterdir()}
    assert all(name.endswith(".copy.json") for name in missing), missing
    (pack,) = folder.glob("*.pack")
    flip(pack, at=3)
    assert danlu("ckpt", "repair", str(tmp_path / "to"))[0] == 0


def test_copy_and_go_on_after_a_cut(tmp_path: Path, danlu: Danlu) -> None:
    source = open_store(str(tmp_path / "from"))
    two_writers(source, 5)
    code, out, _ = danlu("ckpt", "copy", str(tmp_path / "from"), str(tmp_path / "to"))
    assert code == 0 and "2 packs, 96 B copied, every chunk verified" in out
    folder = tmp_path / "to" / "step-00000005"
    for file in (tmp_path / "from" / "step-00000005").iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()
    assert "already there" in danlu("ckpt", "copy", str(tmp_path / "from"), str(tmp_path / "to"))[1]

    (folder / MANIFEST_FILE).unlink()  # as if the copy had been cut off, with one pack wrong
    kept = (folder / "00c0ffee-000000.pack").stat().st_mtime_ns
    flip(folder / "00c0ffee-000001.pack")
    _, out, _ = danlu("ckpt", "copy", str(tmp_path / "from"), str(tmp_path / "to"))
    assert "1 packs, 48 B copied, every chunk verified, 1 already there" in out
    assert (folder / "00c0ffee-000000.pack").stat().st_mtime_ns == kept
    assert danlu("ckpt", "verify", str(tmp_path / "to"))[0] == 0


def test_a_damaged_source_leaves_no_manifest(tmp_path: Path, danlu: Danlu) -> None:
    one_writer(tmp_path / "from", 5)
    flip(next((tmp_path / "from" / "step-00000005").glob("*.pack")), at=0)
    code, _, err = danlu("ckpt", "copy", str(tmp_path / "from"), str(tmp_path / "to"))
    assert code == 2 and "model.half[0]: crc32c must be" in err
    assert not (tmp_path / "to" / "step-00000005" / MANIFEST_FILE).exists()


def test_another_checkpoint_of_the_same_step_is_not_written_over(tmp_path: Path, danlu: Danlu) -> None:
    one_writer(tmp_path / "from", 5)
    one_writer(tmp_path / "to", 5)
    code, _, err = danlu("ckpt", "copy", str(tmp_path / "from"), str(tmp_path / "to"))
    assert code == 2 and "is another checkpoint" in err


def test_a_full_target_is_told_before_the_first_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one_writer(tmp_path / "from", 5)
    monkeypatch.setattr(LocalStore, "free_bytes", lambda store: 10)
    with pytest.raises(OSError, match="has 10 B free"):
        copy_checkpoint(open_store(str(tmp_path / "from")), open_store(str(tmp_path / "to")), 5)
    assert not (tmp_path / "to").exists()


def test_packs_of_several_runs_are_copied_and_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With small chunks and small runs, borders fall everywhere."""
    monkeypatch.setattr("danlu.storage.checkpoint.single_writer.CHUNK_BYTES", 8)
    monkeypatch.setattr("danlu.storage.checkpoint.copying.MAX_READ_BYTES", 100)
    source, target = open_store(str(tmp_path / "from")), open_store("memory://copied-in-runs")
    assert one_writer(source, 5).bytes > 100
    seen: list[int] = []
    copied = copy_checkpoint(source, target, 5, seen.append)
    assert sum(seen) == copied.bytes and len(seen) > 3
    reader = CheckpointReader(target, 5)
    assert np.array_equal(decode_numbers(read_bits(reader, "model.w"), "F32"), WEIGHT)

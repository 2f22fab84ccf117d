"""What killed saves leave: it goes, whatever it is, and nothing that counts goes with it."""

from pathlib import Path
from uuid import uuid4

import pytest
from made_checkpoints import attempt_of, check, content, write_all

from danlu.storage.checkpoint.checkpoint_dir import QUARANTINE_FILE, CheckpointDir
from danlu.storage.checkpoint.commit import CheckpointSaveError, step_folder
from danlu.storage.checkpoint.manifest import MANIFEST_FILE
from danlu.storage.store.base import Store, open_store
from danlu.storage.store.local_store import LocalStore
from danlu.storage.store.safe_path import TEMP_MARK


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "run") if request.param == "local" else f"memory://{uuid4()}")


def saved(store: Store, *steps: int, finite: bool = True) -> None:
    for step in steps:
        write_all(store, step, attempt_of(step), content(step, attempt_of(step), finite=finite), 2)


def test_a_sweep_takes_all_but_what_is_kept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for name in ("aaaa-1", "aaaa-2", "bbbb-1"):
        store.write(f"step/{name}", [b"x"])
    (tmp_path / "step" / f"bbbb-2{TEMP_MARK}1").write_bytes(b"half of it")
    (tmp_path / "step" / f"aaaa-3{TEMP_MARK}1").write_bytes(b"on its way")
    store.remove_except("step", keep="aaaa")
    left = sorted(path.name for path in (tmp_path / "step").iterdir())
    assert left == ["aaaa-1", "aaaa-2", f"aaaa-3{TEMP_MARK}1"]
    store.remove_except("nowhere", keep="aaaa")


def test_what_a_killed_save_left_goes_with_the_first_save_after_it(store: Store) -> None:
    store.write(f"{step_folder(20)}/{attempt_of(1)}-000000.pack", [b"half of it"])
    CheckpointDir(store, 2).remove_leftovers(20, attempt_of(20))
    assert store.list(step_folder(20)) == []


def test_a_checkpoint_is_never_swept(store: Store) -> None:
    saved(store, 20)
    before = store.list(step_folder(20))
    CheckpointDir(store, 2).remove_leftovers(20, "00000000")
    assert store.list(step_folder(20)) == before
    CheckpointDir(store, 2).quarantine(20)
    CheckpointDir(store, 2).remove_leftovers(20, "00000000")
    assert len(store.list(step_folder(20))) == len(before), "what was set aside is kept for whoever looks into it"


def test_folders_without_a_manifest_go_once_a_later_save_counts(store: Store) -> None:
    shelf = CheckpointDir(store, 2)
    store.write(f"{step_folder(5)}/{attempt_of(5)}-000000.pack", [b"half of it"])
    store.write(f"{step_folder(30)}/{attempt_of(30)}-000000.pack", [b"under way"])
    saved(store, 10)
    shelf.quarantine(10)
    saved(store, 20)
    manifest = shelf.manifest_or_none(20)
    assert manifest is not None
    shelf.purge_stale(manifest.step)
    assert shelf.steps_with_folder() == [10, 20, 30] and shelf.resumable_steps() == [20]


def test_a_later_checkpoint_that_is_not_proven_counts_for_nothing(store: Store) -> None:
    saved(store, 10, 20, 30)
    CheckpointDir(store, 1).purge_stale(20)
    assert CheckpointDir(store, 1).resumable_steps() == [20, 30], "30 may yet turn out not to be whole"


def test_a_checkpoint_is_never_replaced(store: Store) -> None:
    saved(store, 20)
    with pytest.raises(CheckpointSaveError, match="exists already; it is not changed"):
        CheckpointDir(store, 2).refuse_or_quarantine(20)
    check(store, lambda step, attempt: content(step, attempt), [20])


@pytest.mark.parametrize("how", ["not finite", "damaged", "empty"])
def test_what_is_no_checkpoint_makes_way_for_one(store: Store, how: str) -> None:
    """A run that went back to an older checkpoint comes to this step again, and must be able to save it."""
    saved(store, 20, finite=how != "not finite")
    if how != "not finite":
        store.write(f"{step_folder(20)}/{MANIFEST_FILE}", [b"" if how == "empty" else b"{}"])
    shelf = CheckpointDir(store, 2)
    assert shelf.resumable_steps() == []
    shelf.refuse_or_quarantine(20)
    assert QUARANTINE_FILE in store.list(step_folder(20))
    write_all(store, 20, attempt_of(99), content(20, attempt_of(99)), 2)
    assert check(store, lambda step, attempt: content(step, attempt), [20]) == 1


def test_folders_that_only_look_like_a_step_are_left_alone(store: Store) -> None:
    """`step-000000010` is not step 10 twice: retention would count it, and delete the real one."""
    saved(store, 10)
    for name in ("step-000000010", "step-٠٠٠٠٠٠١٠", "step-1", "step-00000010x"):
        store.write(f"{name}/file", [b"x"])
    assert CheckpointDir(store, 1).steps_with_folder() == [10]

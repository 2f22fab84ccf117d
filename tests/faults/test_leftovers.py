"""What killed saves leave: it goes, whatever it is, and nothing that counts goes with it."""

from pathlib import Path
from uuid import uuid4

import pytest
from made_checkpoints import attempt_of, check, content, write_all

from danlu.storage.checkpoint.commit import SaveFailed, folder_of
from danlu.storage.checkpoint.manifest import MANIFEST
from danlu.storage.checkpoint.shelf import QUARANTINE, Shelf
from danlu.storage.local_store import LocalStore
from danlu.storage.store import Store, open_store
from danlu.storage.store_path import UNFINISHED


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
    (tmp_path / "step" / f"bbbb-2{UNFINISHED}1").write_bytes(b"half of it")
    (tmp_path / "step" / f"aaaa-3{UNFINISHED}1").write_bytes(b"on its way")
    store.sweep("step", keep="aaaa")
    left = sorted(path.name for path in (tmp_path / "step").iterdir())
    assert left == ["aaaa-1", "aaaa-2", f"aaaa-3{UNFINISHED}1"]
    store.sweep("nowhere", keep="aaaa")


def test_what_a_killed_save_left_goes_with_the_first_save_after_it(store: Store) -> None:
    store.write(f"{folder_of(20)}/{attempt_of(1)}-000000.pack", [b"half of it"])
    Shelf(store, 2).clear(20, attempt_of(20))
    assert store.list(folder_of(20)) == []


def test_a_checkpoint_is_never_swept(store: Store) -> None:
    saved(store, 20)
    before = store.list(folder_of(20))
    Shelf(store, 2).clear(20, "00000000")
    assert store.list(folder_of(20)) == before
    Shelf(store, 2).set_aside(20)
    Shelf(store, 2).clear(20, "00000000")
    assert len(store.list(folder_of(20))) == len(before), "what was set aside is kept for whoever looks into it"


def test_folders_without_a_manifest_go_once_a_later_save_counts(store: Store) -> None:
    shelf = Shelf(store, 2)
    store.write(f"{folder_of(5)}/{attempt_of(5)}-000000.pack", [b"half of it"])
    store.write(f"{folder_of(30)}/{attempt_of(30)}-000000.pack", [b"under way"])
    saved(store, 10)
    shelf.set_aside(10)
    saved(store, 20)
    manifest = shelf.manifest(20)
    assert manifest is not None
    shelf.retire(manifest.step)
    assert shelf.folders() == [10, 20, 30] and shelf.steps() == [20]


def test_a_checkpoint_is_never_replaced(store: Store) -> None:
    saved(store, 20)
    with pytest.raises(SaveFailed, match="exists already; it is left as it is"):
        Shelf(store, 2).make_way(20)
    check(store, lambda step, attempt: content(step, attempt), [20])


@pytest.mark.parametrize("how", ["not finite", "damaged", "empty"])
def test_what_is_no_checkpoint_makes_way_for_one(store: Store, how: str) -> None:
    """A run that went back to an older checkpoint comes to this step again, and must be able to save it."""
    saved(store, 20, finite=how != "not finite")
    if how != "not finite":
        store.write(f"{folder_of(20)}/{MANIFEST}", [b"" if how == "empty" else b"{}"])
    shelf = Shelf(store, 2)
    assert shelf.steps() == []
    shelf.make_way(20)
    assert QUARANTINE in store.list(folder_of(20))
    write_all(store, 20, attempt_of(99), content(20, attempt_of(99)), 2)
    assert check(store, lambda step, attempt: content(step, attempt), [20]) == 1


def test_folders_that_only_look_like_a_step_are_left_alone(store: Store) -> None:
    """`step-000000010` is not step 10 twice: retention would count it, and delete the real one."""
    saved(store, 10)
    for name in ("step-000000010", "step-٠٠٠٠٠٠١٠", "step-1", "step-00000010x"):
        store.write(f"{name}/file", [b"x"])
    assert Shelf(store, 1).folders() == [10]

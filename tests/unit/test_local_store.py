"""What a store in a folder adds to the contract: the order of its calls, errors of the disk, links."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from made_stores import FailsAt, Recorder, RefusesDirect, noise, page_aligned

from danlu.storage.store.local_store import DIRECT_IO_MIN_BYTES, LocalStore
from danlu.storage.store.safe_path import TEMP_MARK


def names_below(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*"))


def test_a_local_write_is_ordered(tmp_path: Path) -> None:
    calls = Recorder()
    store = LocalStore(tmp_path / "store", calls)
    store.write("a/b", [b"x"])
    assert calls.seen == [
        *("mkdir store", f"sync {tmp_path.name}", "mkdir a", "sync store"),
        *("data new", "sync new", "rename new b", "sync a"),
    ]
    calls.seen.clear()
    store.create("a/c", b"x")
    assert calls.seen == ["data new", "sync new", "sync a", "link new c", "unlink new", "sync a"]


def test_a_large_local_write_is_ordered(tmp_path: Path) -> None:
    calls = Recorder()
    store = LocalStore(tmp_path, calls)
    store.write("b", [noise(2 * DIRECT_IO_MIN_BYTES)])
    calls.seen.clear()
    store.write("b", [noise(2 * DIRECT_IO_MIN_BYTES + 5)])
    assert calls.seen[-3:] == ["sync new", "rename new b", f"sync {tmp_path.name}"]
    assert set(calls.seen[:-3]) == {"data new"}


def test_a_folder_somebody_else_made_is_brought_to_the_disk_too(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    calls = Recorder()
    LocalStore(tmp_path, calls).write("a/b", [b"x"])
    assert calls.seen[:2] == [f"sync {tmp_path.parent.name}", f"sync {tmp_path.name}"]


@pytest.mark.parametrize("method", ["pwrite", "fsync", "rename", "fallocate"])
@pytest.mark.parametrize("length", [3, 2 * DIRECT_IO_MIN_BYTES])
def test_an_error_of_the_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, method: str, length: int) -> None:
    LocalStore(tmp_path).write("a", [b"old"])
    # The first fsyncs are those of the folders, the first pwrite of a large file is the probe of O_DIRECT.
    nth = {"fsync": 2, "pwrite": 2 if length > DIRECT_IO_MIN_BYTES else 1}.get(method, 1)
    store = LocalStore(tmp_path, FailsAt(method, errno.EIO, nth))
    with pytest.raises(OSError, match="Input/output error"):
        store.write("a", [bytes(length)])
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names_below(tmp_path) == ["a"]


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path) -> None:
    calls = Recorder()
    store = LocalStore(tmp_path, calls)
    store.write("a", [bytes(DIRECT_IO_MIN_BYTES)])
    calls.seen.clear()
    page = page_aligned(bytes(64 << 20))
    room = store.free_bytes()
    assert room is not None
    with pytest.raises(OSError, match=r"B free, but [0-9.]+ .?.?B are needed") as caught:
        store.write("b", [page] * (room // len(page) + 64))
    assert caught.value.errno == errno.ENOSPC
    assert "data new" not in calls.seen
    assert names_below(tmp_path) == ["a"]


def test_room_is_looked_for_where_it_cannot_be_taken(tmp_path: Path) -> None:
    calls = FailsAt("fallocate", errno.EOPNOTSUPP)
    store = LocalStore(tmp_path, calls)
    store.write("a", [bytes(DIRECT_IO_MIN_BYTES)])
    assert store.size("a") == DIRECT_IO_MIN_BYTES
    calls.left = 1
    calls.statvfs = lambda path: os.statvfs_result((4096, 4096, 9, 9, 9, 0, 0, 0, 0, 255))  # type: ignore[method-assign]
    with pytest.raises(OSError, match=r"36\.9 kB free"):
        store.write("b", [bytes(DIRECT_IO_MIN_BYTES)])


@pytest.mark.parametrize("at_open", [True, False])
def test_a_file_system_without_direct_access_is_told_once(tmp_path: Path, at_open: bool) -> None:
    store = LocalStore(tmp_path, RefusesDirect(at_open=at_open))
    with pytest.warns(RuntimeWarning, match=r"refuses O_DIRECT .*page cache"):
        store.write("a", [noise(DIRECT_IO_MIN_BYTES)])
    store.write("b", [noise(DIRECT_IO_MIN_BYTES)])  # a second warning would be an error
    store.read_into("a", 0, memoryview(bytearray(DIRECT_IO_MIN_BYTES)))
    assert names_below(tmp_path) == ["a", "b"]


def test_reading_without_direct_access_is_told_too(tmp_path: Path) -> None:
    LocalStore(tmp_path).write("a", [noise(DIRECT_IO_MIN_BYTES)])
    into = bytearray(DIRECT_IO_MIN_BYTES)
    with pytest.warns(RuntimeWarning, match="refuses O_DIRECT"):
        LocalStore(tmp_path, RefusesDirect(at_open=True)).read_into("a", 0, memoryview(into))
    assert into == noise(DIRECT_IO_MIN_BYTES)


def test_a_file_system_without_links_is_an_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, FailsAt("link", errno.EPERM))
    with pytest.raises(OSError, match="no hard links"):
        store.create("a", b"x")
    assert names_below(tmp_path) == []


def test_what_a_crash_left_is_not_listed_and_goes_with_its_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write("a/b", [b"x"])
    (tmp_path / "a" / f"c{TEMP_MARK}1-2").write_bytes(b"half")
    assert store.list("a") == ["b"]
    store.remove("a")
    assert names_below(tmp_path) == []


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_bytes(b"secret")
    store = LocalStore(tmp_path / "store")
    store.write("here", [b"x"])
    (tmp_path / "store" / "folder").symlink_to(outside)
    (tmp_path / "store" / "file").symlink_to(outside / "secret")
    (tmp_path / "store" / "dangling").symlink_to(outside / "absent")
    for path in ("folder/secret", "file", "dangling"):
        for attempt in (
            lambda path=path: store.read(path),
            lambda path=path: store.write(path, [b"y"]),
            lambda path=path: store.create(path, b"y"),
            lambda path=path: store.remove(path),
            lambda path=path: store.list(path),
        ):
            with pytest.raises(PermissionError, match="symbolic link"):
                attempt()
    assert names_below(outside) == ["secret"]
    assert (outside / "secret").read_bytes() == b"secret"


def test_removing_a_folder_leaves_what_a_link_in_it_points_to(tmp_path: Path) -> None:
    (tmp_path / "kept").write_bytes(b"x")
    store = LocalStore(tmp_path / "store")
    store.write("a/b", [b"x"])
    (tmp_path / "store" / "a" / "link").symlink_to(tmp_path / "kept")
    store.remove("a")
    assert names_below(tmp_path) == ["kept", "store"]


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    LocalStore(tmp_path / "link").write("a", [b"x"])
    assert (tmp_path / "real" / "a").read_bytes() == b"x"


ON_RAMFS = """
import errno, os, sys
from pathlib import Path
from danlu.storage.store.local_store import DIRECT_IO_MIN_BYTES, LocalStore
from danlu.storage.store.syscalls import Syscalls
descriptor = os.open(sys.argv[1] + "/file", os.O_WRONLY | os.O_CREAT)
os.write(descriptor, bytes(4096))
try:
    Syscalls().fallocate(descriptor, 0, 1 << 20)
except OSError as error:
    print(error.errno == errno.EOPNOTSUPP)
LocalStore.free_bytes = lambda store: None  # ramfs tells nothing of its room
store = LocalStore(Path(sys.argv[1]) / "store")
for name in "ab":
    store.write(name, [bytes(DIRECT_IO_MIN_BYTES)])
    print(store.size(name) == DIRECT_IO_MIN_BYTES)
"""


def test_a_file_system_that_allocates_nothing_is_written_to(tmp_path: Path) -> None:
    """NFS before 4.2 is one; of those that this machine can mount, ramfs is."""
    shell = 'mount -t ramfs none "$0" && exec "$1" -W ignore -c "$2" "$0"'
    command = ["unshare", "--mount", "sh", "-c", shell, str(tmp_path), sys.executable, ON_RAMFS]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.stdout.split() == ["True"] * 3, ended.stderr

"""One contract, held by every store; and what each adds to it."""

import errno
import mmap
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import numpy as np
import pytest

from danlu.storage.calls import Calls
from danlu.storage.direct import ALIGNMENT, BLOCK
from danlu.storage.local_store import LARGE, LocalStore
from danlu.storage.store import LONGEST_PART, LONGEST_PATH, Store, UnsafePathError, open_store, safe
from danlu.storage.store_path import UNFINISHED

UNSAFE = [
    "",
    "/etc/passwd",
    "..",
    "a/../b",
    "a/..",
    ".",
    "a/./b",
    "a//b",
    "a/",
    "a\\b",
    "a\0b",
    "a\nb",
    "a\x7f",
    "\ud800",
    "x" * (LONGEST_PART + 1),
    "é" * LONGEST_PART,
    "/".join(["abcdefg"] * (LONGEST_PATH // 8 + 1)),
    f"a{UNFINISHED}b",
]


class RefusesDirect(Calls):
    """A file system that does not know O_DIRECT: at opening, or only when a block comes."""

    def __init__(self, *, at_open: bool) -> None:
        self.at_open = at_open

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        if flags & os.O_DIRECT and (self.at_open or not flags & os.O_CREAT):
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().open(path, flags, mode)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        if self._is_direct(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")
        return super().pwrite(descriptor, data, offset)

    @staticmethod
    def _is_direct(descriptor: int) -> bool:
        flags = Path(f"/proc/self/fdinfo/{descriptor}").read_text().split("flags:")[1].split()[0]
        return bool(int(flags, 8) & os.O_DIRECT)


class Recorder(Calls):
    """Writes down the calls that change the disk, in order."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._names: dict[int, str] = {}

    def open(self, path: str, flags: int, mode: int = 0o666) -> int:
        descriptor = super().open(path, flags, mode)
        self._names[descriptor] = path
        return descriptor

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        self.seen.append(f"data {self._short(self._names[descriptor])}")
        return super().pwrite(descriptor, data, offset)

    def fsync(self, descriptor: int) -> None:
        self.seen.append(f"sync {self._short(self._names[descriptor])}")
        super().fsync(descriptor)

    def rename(self, source: str, target: str) -> None:
        self.seen.append(f"rename {self._short(source)} {self._short(target)}")
        super().rename(source, target)

    def link(self, source: str, target: str) -> None:
        self.seen.append(f"link {self._short(source)} {self._short(target)}")
        super().link(source, target)

    def unlink(self, path: str) -> None:
        self.seen.append(f"unlink {self._short(path)}")
        super().unlink(path)

    def mkdir(self, path: str) -> None:
        self.seen.append(f"mkdir {self._short(path)}")
        super().mkdir(path)

    @staticmethod
    def _short(path: str) -> str:
        name = Path(path).name
        return "new" if UNFINISHED in name else name


class FailsAt(Calls):
    """Fails at the nth call of one kind."""

    def __init__(self, method: str, code: int, nth: int = 1) -> None:
        self.left = nth
        real = getattr(super(), method)

        def failing(*arguments: object) -> object:
            self.left -= 1
            if not self.left:
                raise OSError(code, os.strerror(code))
            return real(*arguments)

        setattr(self, method, failing)


def page_aligned(content: bytes) -> memoryview:
    view = memoryview(mmap.mmap(-1, len(content)))
    view[:] = content
    return view


def shifted(content: bytes, by: int = 1) -> memoryview:
    return page_aligned(bytes(by) + content)[by:]


def noise(length: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(length)


@pytest.fixture(params=["local", "local through the page cache", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "memory":
        yield open_store(f"memory://{uuid4()}")
    elif request.param == "local":
        yield open_store(str(tmp_path / "store"))
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield LocalStore(tmp_path / "store", RefusesDirect(at_open=True))


def test_a_store_holds_what_it_promises(store: Store) -> None:
    assert isinstance(store, Store)
    assert store.name


def test_what_is_written_is_read(store: Store) -> None:
    store.write("step-1/data.bin", [b"abc", bytearray(b"de"), memoryview(b"f"), b""])
    assert store.read("step-1/data.bin") == b"abcdef"
    assert store.read("step-1/data.bin", 2) == b"cdef"
    assert store.read("step-1/data.bin", 2, 3) == b"cde"
    assert store.read("step-1/data.bin", 6) == b""
    assert store.size("step-1/data.bin") == 6
    into = bytearray(3)
    store.read_into("step-1/data.bin", 1, memoryview(into))
    assert into == b"bcd"


def test_an_empty_file_is_a_file(store: Store) -> None:
    store.write("empty", [])
    assert store.size("empty") == 0
    assert store.read("empty") == b""
    assert store.list() == ["empty"]


def test_a_write_replaces(store: Store) -> None:
    store.write("a", [b"a longer text"])
    store.write("a", iter([b"short"]))
    assert store.read("a") == b"short"


def test_a_file_is_created_once(store: Store) -> None:
    store.create("deep/er/manifest.json", b"first")
    with pytest.raises(FileExistsError, match=r"manifest\.json"):
        store.create("deep/er/manifest.json", b"second")
    assert store.read("deep/er/manifest.json") == b"first"
    assert store.list("deep/er") == ["manifest.json"]


def test_of_many_creators_one_succeeds(store: Store) -> None:
    winners: list[int] = []

    def attempt(number: int) -> None:
        try:
            store.create("only/one", str(number).encode())
        except FileExistsError:
            return
        winners.append(number)

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(winners) == 1
    assert store.read("only/one") == str(winners[0]).encode()


def test_what_is_not_there_is_named(store: Store) -> None:
    store.write("a/b", [b"x"])
    for path in ("nowhere", "a/c", "a", "a/b/c"):
        with pytest.raises(FileNotFoundError, match=path):
            store.read(path)
        with pytest.raises(FileNotFoundError, match=path):
            store.size(path)
        with pytest.raises(FileNotFoundError, match=path):
            store.read_into(path, 0, memoryview(bytearray(1)))


def test_too_few_bytes_are_an_error_that_names_both(store: Store) -> None:
    store.write("a", [b"12345"])
    for attempt in (
        lambda: store.read("a", 3, 4),
        lambda: store.read("a", 6, 1),
        lambda: store.read_into("a", 3, memoryview(bytearray(4))),
        lambda: store.read_into("a", 0, memoryview(bytearray(2 * LARGE))),
    ):
        with pytest.raises(EOFError, match=r"has 5 bytes.*asked for"):
            attempt()


def test_a_folder_lists_what_is_directly_inside(store: Store) -> None:
    assert store.list() == []
    for path in ("b/2", "b/1/x", "a", "b/1/y", "b1"):
        store.write(path, [b"."])
    assert store.list() == ["a", "b", "b1"]
    assert store.list("b") == ["1", "2"]
    assert store.list("absent") == []


def test_remove_takes_files_and_folders_and_minds_no_absence(store: Store) -> None:
    for path in ("b/2", "b/1/x", "a", "b1"):
        store.write(path, [b"."])
    store.remove("absent")
    store.remove("a/absent")
    store.remove("a")
    store.remove("b")
    assert store.list() == ["b1"]
    store.write("b/2", [b"again"])
    assert store.read("b/2") == b"again"


def test_a_name_is_a_file_or_a_folder(store: Store) -> None:
    store.write("a", [b"."])
    store.write("b/c", [b"."])
    with pytest.raises(NotADirectoryError, match="a"):
        store.write("a/b", [b"."])
    with pytest.raises(IsADirectoryError, match="b"):
        store.write("b", [b"."])
    assert store.list() == ["a", "b"]
    assert store.list("b") == ["c"]


@pytest.mark.parametrize("path", UNSAFE)
def test_an_unsafe_path_reaches_no_method(store: Store, path: str) -> None:
    with pytest.raises(UnsafePathError):
        safe(path)
    attempts: list[Callable[[], object]] = [
        lambda: store.write(path, [b"x"]),
        lambda: store.create(path, b"x"),
        lambda: store.read(path),
        lambda: store.read_into(path, 0, memoryview(bytearray(1))),
        lambda: store.size(path),
        lambda: store.remove(path),
    ]
    if path:
        attempts.append(lambda: store.list(path))
    for attempt in attempts:
        with pytest.raises(UnsafePathError):
            attempt()
    assert store.list() == []


@pytest.mark.parametrize("path", ["a", "a/b.c", "...", "..a/b..", "ü", "x" * LONGEST_PART, "a b", "step-1/~"])
def test_a_plain_path_is_safe(store: Store, path: str) -> None:
    assert safe(path) == path
    store.write(path, [b"x"])
    assert store.read(path) == b"x"


@pytest.mark.parametrize("as_list", [True, False])
@pytest.mark.parametrize(
    "lengths",
    [
        [LARGE],
        [2 * BLOCK, 3 * BLOCK + 17],
        [5, LARGE, 1],
        [ALIGNMENT - 3, 3, 2 * BLOCK],
        [100_003] * 130,
        [BLOCK + ALIGNMENT, 0, 300_000, 300_000],
    ],
)
def test_large_files_of_any_alignment(store: Store, lengths: list[int], as_list: bool) -> None:
    """Parts that can be written where they lie, parts that cannot, and every border between them."""
    pieces = [noise(length, seed) for seed, length in enumerate(lengths)]
    place = [page_aligned, shifted, lambda piece: shifted(piece, 3)]
    parts = [place[number % 3](piece) if piece else b"" for number, piece in enumerate(pieces)]
    store.write("large", parts if as_list else iter(parts))
    content = b"".join(pieces)
    assert store.size("large") == len(content)
    assert store.read("large") == content
    for offset in (0, 1, ALIGNMENT, ALIGNMENT + 5):
        for make in (page_aligned, shifted, lambda empty, by=offset % ALIGNMENT: shifted(empty, by or ALIGNMENT)):
            into = make(bytes(len(content) - offset))
            store.read_into("large", offset, into)
            assert into == content[offset:]
    assert store.list() == ["large"]


def test_strided_memory_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        store.write("a", [memoryview(b"abcdef")[::2]])
    assert store.list() == []


def test_a_writer_that_fails_leaves_the_old_file(store: Store) -> None:
    def broken() -> Iterator[bytes]:
        yield noise(2 * LARGE)
        raise RuntimeError("the source is gone")

    store.write("a", [b"old"])
    with pytest.raises(RuntimeError, match="the source is gone"):
        store.write("a", broken())
    assert store.read("a") == b"old"
    assert store.list() == ["a"]


# --- local stores


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
    store.write("b", [noise(2 * LARGE)])
    calls.seen.clear()
    store.write("b", [noise(2 * LARGE + 5)])
    assert calls.seen[-3:] == ["sync new", "rename new b", f"sync {tmp_path.name}"]
    assert set(calls.seen[:-3]) == {"data new"}


def test_a_folder_somebody_else_made_is_brought_to_the_disk_too(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    calls = Recorder()
    LocalStore(tmp_path, calls).write("a/b", [b"x"])
    assert calls.seen[:2] == [f"sync {tmp_path.parent.name}", f"sync {tmp_path.name}"]


@pytest.mark.parametrize("method", ["pwrite", "fsync", "rename", "fallocate"])
@pytest.mark.parametrize("length", [3, 2 * LARGE])
def test_an_error_of_the_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, method: str, length: int) -> None:
    LocalStore(tmp_path).write("a", [b"old"])
    # The first fsyncs are those of the folders, the first pwrite of a large file is the probe of O_DIRECT.
    nth = {"fsync": 2, "pwrite": 2 if length > LARGE else 1}.get(method, 1)
    store = LocalStore(tmp_path, FailsAt(method, errno.EIO, nth))
    with pytest.raises(OSError, match="Input/output error"):
        store.write("a", [bytes(length)])
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names_below(tmp_path) == ["a"]


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path) -> None:
    calls = Recorder()
    store = LocalStore(tmp_path, calls)
    store.write("a", [bytes(LARGE)])
    calls.seen.clear()
    page = page_aligned(bytes(64 << 20))
    room = store.free()
    assert room is not None
    with pytest.raises(OSError, match=r"bytes free, but \d+ are needed") as caught:
        store.write("b", [page] * (room // len(page) + 64))
    assert caught.value.errno == errno.ENOSPC
    assert "data new" not in calls.seen
    assert names_below(tmp_path) == ["a"]


def test_room_is_looked_for_where_it_cannot_be_taken(tmp_path: Path) -> None:
    calls = FailsAt("fallocate", errno.EOPNOTSUPP)
    store = LocalStore(tmp_path, calls)
    store.write("a", [bytes(LARGE)])
    assert store.size("a") == LARGE
    calls.left = 1
    calls.statvfs = lambda path: os.statvfs_result((4096, 4096, 9, 9, 9, 0, 0, 0, 0, 255))  # type: ignore[method-assign]
    with pytest.raises(OSError, match="36864 bytes free"):
        store.write("b", [bytes(LARGE)])


@pytest.mark.parametrize("at_open", [True, False])
def test_a_file_system_without_direct_access_is_told_once(tmp_path: Path, at_open: bool) -> None:
    store = LocalStore(tmp_path, RefusesDirect(at_open=at_open))
    with pytest.warns(RuntimeWarning, match=r"refuses O_DIRECT .*page cache"):
        store.write("a", [noise(LARGE)])
    store.write("b", [noise(LARGE)])  # a second warning would be an error
    store.read_into("a", 0, memoryview(bytearray(LARGE)))
    assert names_below(tmp_path) == ["a", "b"]


def test_reading_without_direct_access_is_told_too(tmp_path: Path) -> None:
    LocalStore(tmp_path).write("a", [noise(LARGE)])
    into = bytearray(LARGE)
    with pytest.warns(RuntimeWarning, match="refuses O_DIRECT"):
        LocalStore(tmp_path, RefusesDirect(at_open=True)).read_into("a", 0, memoryview(into))
    assert into == noise(LARGE)


def test_a_file_system_without_links_is_an_error(tmp_path: Path) -> None:
    store = LocalStore(tmp_path, FailsAt("link", errno.EPERM))
    with pytest.raises(OSError, match="no hard links"):
        store.create("a", b"x")
    assert names_below(tmp_path) == []


def test_what_a_crash_left_is_not_listed_and_goes_with_its_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.write("a/b", [b"x"])
    (tmp_path / "a" / f"c{UNFINISHED}1-2").write_bytes(b"half")
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


# --- addresses


def test_a_local_store_tells_its_room(tmp_path: Path) -> None:
    free = open_store(str(tmp_path / "not" / "yet")).free()
    assert free is not None and free > 0


def test_addresses(tmp_path: Path) -> None:
    open_store(str(tmp_path)).write("a", [b"x"])
    assert open_store(f"file://{tmp_path}").read("a") == b"x"
    name = f"memory://{uuid4()}"
    open_store(name).write("a", [b"x"])
    assert open_store(name).read("a") == b"x"
    assert open_store(name).free() is None
    assert open_store(f"{name}-other").list() == []


@pytest.mark.parametrize(
    ("where", "options", "message"),
    [
        ("s3a://bucket/x", {}, "did you mean s3"),
        ("https://host/x", {}, "not https"),
        ("file://host/x", {}, "three slashes"),
        ("memory://", {}, "must have a name"),
        ("/tmp", {"endpoint": "x"}, "takes no options"),
        ("/", {}, "whole file system"),
        ("s3://", {}, "must name a bucket"),
        ("s3://bucket/../x", {}, "'..'"),
        ("s3://bucket/x", {"endpont": "x"}, "did you mean `endpoint`"),
        ("s3://bucket/x", {"part_bytes": "1000"}, "`part_bytes` must be"),
        ("s3://bucket/x", {"read_timeout": "soon"}, "`read_timeout` must be"),
    ],
)
def test_a_wrong_address_says_what_is_right(where: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_store(where, options)

"""One contract, held by every store; and the addresses stores are found at."""

import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from made_stores import RefusesDirect, noise, page_aligned, shifted

from danlu.storage.store.base import Store, open_store
from danlu.storage.store.direct_io import ALIGNMENT, BLOCK_BYTES
from danlu.storage.store.local_store import DIRECT_IO_MIN_BYTES, LocalStore
from danlu.storage.store.peer_store import PeerServer, PeerStore
from danlu.storage.store.safe_path import MAX_NAME_BYTES, MAX_PATH_BYTES, TEMP_MARK, UnsafePathError, check_path

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
    "x" * (MAX_NAME_BYTES + 1),
    "é" * MAX_NAME_BYTES,
    "/".join(["abcdefg"] * (MAX_PATH_BYTES // 8 + 1)),
    f"a{TEMP_MARK}b",
]


@pytest.fixture(params=["local", "local through the page cache", "memory", "peer"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    if request.param == "memory":
        yield open_store(f"memory://{uuid4()}")
    elif request.param == "local":
        yield open_store(str(tmp_path / "store"))
    elif request.param == "peer":
        server = PeerServer(open_store(f"memory://{uuid4()}"), b"token", "127.0.0.1")
        peer = PeerStore(server.address, b"token")
        yield peer
        peer.close()
        server.close()
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
        lambda: store.read_into("a", 0, memoryview(bytearray(2 * DIRECT_IO_MIN_BYTES))),
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
        check_path(path)
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


@pytest.mark.parametrize("path", ["a", "a/b.c", "...", "..a/b..", "ü", "x" * MAX_NAME_BYTES, "a b", "step-1/~"])
def test_a_plain_path_is_safe(store: Store, path: str) -> None:
    assert check_path(path) == path
    store.write(path, [b"x"])
    assert store.read(path) == b"x"


LARGE_FILES = [
    [DIRECT_IO_MIN_BYTES],
    [2 * BLOCK_BYTES, 3 * BLOCK_BYTES + 17],
    [5, DIRECT_IO_MIN_BYTES, 1],
    [ALIGNMENT - 3, 3, 2 * BLOCK_BYTES],
    [100_003] * 130,
    [BLOCK_BYTES + ALIGNMENT, 0, 300_000, 300_000],
]
"""Lengths of the parts of one file."""


@pytest.mark.parametrize(
    ("lengths", "as_list"),
    [
        pytest.param(lengths, as_list, marks=() if as_list == (number % 2 == 1) else pytest.mark.full)
        for number, lengths in enumerate(LARGE_FILES)
        for as_list in (True, False)
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
    for offset, border in ((0, 0), (0, 1), (1, 0), (ALIGNMENT, 0), (ALIGNMENT + 5, 5)):
        into = shifted(bytes(len(content) - offset), border)
        store.read_into("large", offset, into)
        assert into == content[offset:]
    assert store.list() == ["large"]


def test_strided_memory_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        store.write("a", [memoryview(b"abcdef")[::2]])
    assert store.list() == []


def test_a_writer_that_fails_leaves_the_old_file(store: Store) -> None:
    def broken() -> Iterator[bytes]:
        yield noise(2 * DIRECT_IO_MIN_BYTES)
        raise RuntimeError("the source is gone")

    store.write("a", [b"old"])
    with pytest.raises(RuntimeError, match="the source is gone"):
        store.write("a", broken())
    assert store.read("a") == b"old"
    assert store.list() == ["a"]


# --- addresses


def test_a_local_store_tells_its_room(tmp_path: Path) -> None:
    free = open_store(str(tmp_path / "not" / "yet")).free_bytes()
    assert free is not None and free > 0


def test_addresses(tmp_path: Path) -> None:
    open_store(str(tmp_path)).write("a", [b"x"])
    assert open_store(f"file://{tmp_path}").read("a") == b"x"
    name = f"memory://{uuid4()}"
    open_store(name).write("a", [b"x"])
    assert open_store(name).read("a") == b"x"
    assert open_store(name).free_bytes() is None
    assert open_store(f"{name}-other").list() == []


@pytest.mark.parametrize(
    ("where", "options", "message"),
    [
        ("s3a://bucket/x", {}, "did you mean s3"),
        ("https://host/x", {}, "not https"),
        ("file://host/x", {}, "three slashes"),
        ("memory://", {}, "must have a name"),
        ("/tmp", {"endpoint": "x"}, "takes no options"),
        ("/", {}, "root of the file system"),
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


def test_a_peer_with_another_token_is_refused_on_both_sides() -> None:
    server = PeerServer(open_store(f"memory://{uuid4()}"), b"token", "127.0.0.1")
    with pytest.raises(ConnectionError, match="does not know this job's token"):
        PeerStore(server.address, b"another").list()
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port))) as line:
        line.sendall(bytes(32))
        assert len(line.recv(64, socket.MSG_WAITALL)) == 64
        line.sendall(bytes(32))  # no proof
        line.sendall(b"\x12\0\0\0" + b'{"ask": "list"}   ')
        assert line.recv(1) == b""
    server.close()


def test_a_peer_that_is_gone_is_a_connection_error() -> None:
    server = PeerServer(open_store(f"memory://{uuid4()}"), b"token", "127.0.0.1")
    peer = PeerStore(server.address, b"token", timeout=2)
    peer.write("a", [b"1"])
    server.close()
    peer.close()
    with pytest.raises(ConnectionError, match="does not answer"):
        peer.read("a")


def test_a_peer_store_listens_on_one_interface_only() -> None:
    with pytest.raises(ValueError, match="must listen on one interface"):
        PeerServer(open_store("memory://x"), b"token", "0.0.0.0")

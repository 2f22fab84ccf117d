"""An object store against a real S3 server, which is also killed under it."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import fsspec.config
import numpy as np
import pytest
from s3_lab import BUCKET, KEY, SECRET, S3Lab

from danlu.storage.store.base import Store, open_store
from danlu.storage.store.s3_store import S3Store
from danlu.storage.store.safe_path import UnsafePathError

s3fs = pytest.importorskip("s3fs", reason="the store is looked at past our own client")
PART = 5 << 20
QUICK = {"part_bytes": str(PART), "connect_timeout": "2", "read_timeout": "4", "request_timeout": "10"}


def opened(lab: S3Lab, prefix: str = "runs/a") -> Store:
    return open_store(f"s3://{BUCKET}/{prefix}", {"endpoint": lab.endpoint, **QUICK})


def raw(lab: S3Lab) -> Any:
    return s3fs.S3FileSystem(
        endpoint_url=lab.endpoint, key=KEY, secret=SECRET, use_listings_cache=False, skip_instance_cache=True
    )


def noise(length: int) -> bytes:
    return np.random.default_rng(length).bytes(length)


def test_the_contract(s3: S3Lab) -> None:
    """What every store promises (`tests/unit/test_stores.py`), one server start for all of it."""
    store = opened(s3)
    assert isinstance(store, Store)
    assert store.name == f"s3://{BUCKET}/runs/a"
    assert store.list() == [] and store.free_bytes() is None
    _holds_files(store)
    _creates_once(store)
    _lists_and_removes(store)
    _moves_large_files(store)
    _leaves_the_old_file(store, raw(s3))
    _refuses(store, s3)


def _holds_files(store: Store) -> None:
    store.write("step-1/data.bin", [b"abc", bytearray(b"de"), memoryview(b"f"), b""])
    assert store.read("step-1/data.bin") == b"abcdef"
    assert store.read("step-1/data.bin", 2, 3) == b"cde"
    assert store.read("step-1/data.bin", 2) == b"cdef"
    assert store.read("step-1/data.bin", 6) == b""
    assert store.size("step-1/data.bin") == 6
    store.write("step-1/data.bin", iter([b"x"]))
    assert store.read("step-1/data.bin") == b"x"
    store.write("empty", [])
    assert store.read("empty") == b"" and store.size("empty") == 0
    for path in ("nowhere", "step-1", "step-1/x"):
        with pytest.raises(FileNotFoundError, match=path):
            store.read(path)
        with pytest.raises(FileNotFoundError, match=path):
            store.read_into(path, 0, memoryview(bytearray(1)))
    store.write("five", [b"12345"])
    for offset, length in ((3, 4), (6, 1), (5, 1), (6, 0)):
        with pytest.raises(EOFError, match=r"has 5 bytes.*asked for"):
            store.read("five", offset, length)
    with pytest.raises(EOFError, match="has 5 bytes"):
        store.read_into("five", 1, memoryview(bytearray(5)))


def _creates_once(store: Store) -> None:
    store.create("once/manifest.json", b"first")
    with pytest.raises(FileExistsError, match=r"manifest\.json"):
        store.create("once/manifest.json", b"second")
    assert store.read("once/manifest.json") == b"first"

    def attempt(number: int) -> bool:
        try:
            store.create("only/one", str(number).encode())
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(attempt, range(8)))
    assert sum(won) == 1
    assert store.read("only/one") == str(won.index(True)).encode()
    assert store.list() == ["empty", "five", "once", "only", "step-1"]  # the probe has gone


def _lists_and_removes(store: Store) -> None:
    for path in ("b/2", "b/1/x", "b/1/y", "b1", "b/star*", "b/what?", "b/[x]"):
        store.write(path, [b"."])
    assert store.list("b") == ["1", "2", "[x]", "star*", "what?"]
    assert store.list("absent") == []
    store.remove("b/star*")
    store.remove("absent")
    assert store.list("b") == ["1", "2", "[x]", "what?"]
    store.remove("b")
    assert store.list("b") == []
    assert "b1" in store.list() and "b" not in store.list()


def _moves_large_files(store: Store) -> None:
    content = noise(3 * PART + 12345)
    for parts in ([content], [content[:7], content[7 : 2 * PART], content[2 * PART :]]):
        store.write("large", iter(parts))
        assert store.size("large") == len(content)
        into = bytearray(len(content) - 3)
        store.read_into("large", 3, memoryview(into))
        assert into == content[3:]
    assert store.read("large", PART - 1, 10) == content[PART - 1 : PART + 9]


def _leaves_the_old_file(store: Store, files: Any) -> None:
    def broken() -> Iterator[bytes]:
        yield noise(3 * PART)
        raise RuntimeError("the source is gone")

    before = store.read("large", 0, 100)
    with pytest.raises(RuntimeError, match="the source is gone"):
        store.write("large", broken())
    assert store.read("large", 0, 100) == before
    uploads = files.call_s3("list_multipart_uploads", Bucket=BUCKET).get("Uploads", [])
    assert uploads == []


def _refuses(store: Store, lab: S3Lab) -> None:
    for attempt in (lambda: store.read("../x"), lambda: store.write("/x", [b"y"]), lambda: store.remove("")):
        with pytest.raises(UnsafePathError):
            attempt()
    nowhere = open_store("s3://no-such-bucket/x", {"endpoint": lab.endpoint, **QUICK})
    with pytest.raises(FileNotFoundError, match="no-such-bucket"):
        nowhere.list()


def test_wrong_credentials_are_told(s3: S3Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fsspec.config.conf, "s3", {"key": KEY, "secret": "wrong"})
    with pytest.raises(PermissionError, match="refused"):
        opened(s3).write("a", [b"x"])


def test_a_server_that_ignores_the_condition_is_refused(s3: S3Lab) -> None:
    """The same server behind a client that drops the header, as an old server would."""

    class Forgetful(s3fs.S3FileSystem):  # type: ignore[misc]
        def call_s3(self, method: str, **arguments: object) -> object:
            arguments.pop("IfNoneMatch", None)
            return super().call_s3(method, **arguments)

    files = Forgetful(endpoint_url=s3.endpoint, key=KEY, secret=SECRET, skip_instance_cache=True)
    store = S3Store(files, BUCKET, "old", PART, 10)
    with pytest.raises(OSError, match="ignores If-None-Match"):
        store.create("manifest", b"x")
    assert store.list() == []


def test_a_server_that_dies_is_told_in_time(s3: S3Lab) -> None:
    store = opened(s3)
    store.write("before", [b"kept"])
    dead = threading.Event()

    def parts() -> Iterator[bytes]:
        yield noise(2 * PART)
        s3.kill()
        dead.set()
        for _ in range(8):
            yield noise(PART)

    began = time.monotonic()
    with pytest.raises(ConnectionError, match=r"writing big: no answer") as caught:
        store.write("big", parts())
    assert dead.is_set()
    assert "parts may stay" in " ".join(caught.value.__cause__.__notes__ if caught.value.__cause__ else [])
    for attempt in (
        lambda: store.read("before"),
        lambda: store.size("before"),
        lambda: store.list(),
        lambda: store.create("x", b"y"),
        lambda: store.remove("before"),
    ):
        with pytest.raises(ConnectionError, match="no answer"):
            attempt()
    assert time.monotonic() - began < 30
    s3.start()
    assert store.read("before") == b"kept"
    assert store.list() == ["before"]


def test_a_server_that_is_silent_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listening socket nobody answers at: the other way a server dies."""
    monkeypatch.setitem(fsspec.config.conf, "s3", {"key": KEY, "secret": SECRET})
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = f"http://127.0.0.1:{mute.getsockname()[1]}"
        store = open_store(f"s3://{BUCKET}/x", {**QUICK, "endpoint": endpoint, "request_timeout": "2"})
        for attempt in (
            lambda: store.write("a", [b"x"]),
            lambda: store.read("a", 0, 1),
            lambda: store.create("a", b""),
        ):
            began = time.monotonic()
            with pytest.raises(ConnectionError, match="no answer"):
                attempt()
            assert time.monotonic() - began < 10

"""Checksums against the standard's own vectors and another implementation, in C and without."""

import ctypes
import mmap
import threading
import time
import warnings
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.storage.store import checksum
from danlu.storage.store.checksum import NativeCrc32c, PortableCrc32c, copy_with_crc32c, crc32c, crc32c_is_native
from danlu.storage.store.native import NativeUnavailableError, load_library

RFC_3720 = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (b"123456789", 0xE3069283),
    (b"", 0),
]
WAYS = {"native": NativeCrc32c, "portable": PortableCrc32c}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    made = WAYS[request.param]()
    monkeypatch.setattr(checksum, "_crc32c_backend", lambda: made)
    return str(request.param)


def test_this_machine_has_the_native_way() -> None:
    """Every machine the tests are run on has a compiler: CI installs one."""
    assert crc32c_is_native()


@pytest.mark.parametrize(("data", "expected"), RFC_3720)
def test_vectors_of_the_standard(way: str, data: bytes, expected: int) -> None:
    assert crc32c(data) == expected
    target = bytearray(len(data))
    assert copy_with_crc32c(data, target) == expected
    assert target == data


@pytest.mark.usefixtures("way")
def test_a_sum_goes_on_where_another_ended() -> None:
    data = np.random.default_rng(1).bytes(100_000)
    for border in (0, 1, 3072, 50_001, 100_000):
        assert crc32c(data[border:], crc32c(data[:border])) == google_crc32c.value(data)


LENGTHS = st.one_of(st.integers(0, 10_000), st.integers((1 << 20) - 70, (1 << 20) + 7000))


@pytest.mark.parametrize("made", [WAYS[name]() for name in WAYS], ids=list(WAYS))
@settings(max_examples=60, deadline=None)
@given(length=LENGTHS, from_border=st.integers(0, 130), to_border=st.integers(0, 130), seed=st.integers(0, 2**32))
def test_any_length_and_alignment(
    made: NativeCrc32c | PortableCrc32c, length: int, from_border: int, to_border: int, seed: int
) -> None:
    """Also that not one byte beside the target is touched."""
    origin = memoryview(mmap.mmap(-1, length + 131))
    origin[:] = np.random.default_rng(seed).bytes(len(origin))
    copied = memoryview(mmap.mmap(-1, length + 262))
    source, target = origin[from_border : from_border + length], copied[to_border : to_border + length]
    expected = google_crc32c.value(bytes(source))
    if length:
        assert made.copy(source, target) == expected
    assert made.crc32c(0, source) == expected
    assert target == source
    assert not any(copied[:to_border]) and not any(copied[to_border + length :])


@pytest.mark.usefixtures("way")
def test_every_single_flipped_bit_shows() -> None:
    data = bytearray(np.random.default_rng(2).bytes(4096))
    right = crc32c(data)
    for bit in range(0, 8 * len(data), 37):
        data[bit // 8] ^= 1 << bit % 8
        assert crc32c(data) != right
        data[bit // 8] ^= 1 << bit % 8
    assert crc32c(data) == right


@pytest.mark.usefixtures("way")
def test_what_cannot_be_copied_is_refused() -> None:
    both = bytearray(100)
    with pytest.raises(ValueError, match="10 bytes of `source`, but has 11"):
        copy_with_crc32c(bytes(10), bytearray(11))
    with pytest.raises(ValueError, match="read-only"):
        copy_with_crc32c(bytes(10), bytes(10))
    with pytest.raises(ValueError, match="overlap"):
        copy_with_crc32c(memoryview(both)[:60], memoryview(both)[40:])
    with pytest.raises(ValueError, match="contiguous"):
        copy_with_crc32c(memoryview(both)[::2], bytearray(50))


def test_arrays_of_any_dtype_are_taken() -> None:
    values = np.arange(1000, dtype=np.float32).reshape(10, 100)
    copy = np.zeros_like(values)
    assert copy_with_crc32c(memoryview(values), memoryview(copy)) == google_crc32c.value(values.tobytes())
    assert np.array_equal(values, copy)


def test_other_threads_run_meanwhile() -> None:
    source, target = np.ones(1 << 28, np.uint8), np.zeros(1 << 28, np.uint8)
    ticks: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    thread = threading.Thread(target=tick)
    thread.start()
    began = time.monotonic()
    copy_with_crc32c(memoryview(source), memoryview(target))
    ended = time.monotonic()
    done.set()
    thread.join()
    assert sum(began < moment < ended for moment in ticks) >= 3


# --- compiling


def test_the_library_is_made_once_and_kept_private(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    load_library("copy_hash", cache)
    (library,) = cache.iterdir()
    made = library.stat()
    assert made.st_mode & 0o077 == 0 and cache.stat().st_mode & 0o077 == 0
    load_library("copy_hash", cache)
    assert library.stat().st_mtime_ns == made.st_mtime_ns


def _replace(library: Path) -> None:
    """With another file: one that is loaded must not change under the process."""
    library.unlink()
    library.write_bytes(b"not what was compiled")
    library.chmod(0o700)


def test_a_library_somebody_else_may_write_is_not_loaded(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    load_library("copy_hash", cache)
    (library,) = cache.iterdir()
    _replace(library)
    library.chmod(0o777)
    assert isinstance(load_library("copy_hash", cache), ctypes.CDLL)
    assert library.stat().st_mode & 0o077 == 0
    cache.chmod(0o777)
    _replace(library)
    assert isinstance(load_library("copy_hash", cache), ctypes.CDLL)  # made elsewhere
    assert library.read_bytes() == b"not what was compiled"


def test_a_link_in_the_cache_is_not_loaded(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    load_library("copy_hash", cache)
    (library,) = cache.iterdir()
    other = tmp_path / "other.so"
    other.write_bytes(b"not what was compiled")
    library.unlink()
    library.symlink_to(other)
    load_library("copy_hash", cache)
    assert not library.is_symlink()
    assert other.read_bytes() == b"not what was compiled"


@pytest.mark.parametrize(
    ("compiler", "reason"), [(("no-such-compiler",), "no C compiler"), (("false",), "failed"), (("true",), "loaded")]
)
def test_no_compiler_is_told_with_its_reason(tmp_path: Path, compiler: tuple[str, ...], reason: str) -> None:
    with pytest.raises(NativeUnavailableError, match=reason):
        load_library("copy_hash", tmp_path / "cache", compiler)


def test_the_slow_way_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> ctypes.CDLL:
        raise NativeUnavailableError("there is no C compiler `cc`")

    monkeypatch.setattr(checksum, "load_library", refuse)
    checksum._crc32c_backend.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"no C compiler.*twice as long"):
            assert crc32c(b"123456789") == 0xE3069283
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert copy_with_crc32c(b"123456789", bytearray(9)) == 0xE3069283
            assert not crc32c_is_native()
    finally:
        checksum._crc32c_backend.cache_clear()

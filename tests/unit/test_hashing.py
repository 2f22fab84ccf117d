"""Checksums against the standard's own vectors and another implementation, in C and without."""

import ctypes
import mmap
import shutil
import threading
import time
import warnings
from functools import cache
from pathlib import Path

import google_crc32c
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu import native
from danlu.native import NativeUnavailableError, load_library
from danlu.storage.checkpoint import reed_solomon
from danlu.storage.checkpoint.fingerprint import NativeFingerprint, NumpyFingerprint
from danlu.storage.store import checksum
from danlu.storage.store.checksum import NativeCrc32c, PortableCrc32c, copy_with_crc32c, crc32c

RFC_3720 = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (bytes(range(31, -1, -1)), 0x113FDB5C),
    (b"123456789", 0xE3069283),
    (b"", 0),
]
WAYS = {"native": cache(lambda: NativeCrc32c(load_library("copy_hash"))), "portable": PortableCrc32c}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    made = WAYS[request.param]()
    monkeypatch.setattr(checksum, "_crc32c_backend", lambda: made)
    return str(request.param)


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


@pytest.mark.parametrize("name", WAYS)
@settings(max_examples=60, deadline=None)
@given(length=LENGTHS, from_border=st.integers(0, 130), to_border=st.integers(0, 130), seed=st.integers(0, 2**32))
def test_any_length_and_alignment(name: str, length: int, from_border: int, to_border: int, seed: int) -> None:
    """Also that not one byte beside the target is touched."""
    made = WAYS[name]()
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


# --- compiled, or not


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the C files, without libraries."""
    for source in native.build.FOLDER.glob("*.[ch]"):
        shutil.copy(source, tmp_path)
    monkeypatch.setattr(native.build, "FOLDER", tmp_path)
    return tmp_path


def test_every_c_file_is_compiled_and_loaded() -> None:
    """pip has compiled them, or build.py in a checkout on the path; CI must not test the portable code alone."""
    for source in native.build.FOLDER.glob("*.c"):
        assert isinstance(load_library(source.stem), ctypes.CDLL)


def test_a_library_is_of_its_source_as_it_is_now(folder: Path) -> None:
    for source in folder.glob("*.c"):
        if source.stem != "gf256":
            source.unlink()  # each takes seconds to compile
    assert native.build.build() == {}
    load_library("gf256")
    with (folder / "gf256.c").open("a") as source:
        source.write("int danlu_more(void) { return 42; }\n")
    with pytest.raises(NativeUnavailableError, match=r"(?s)gf256.c was not compiled.*run `python .*build.py`"):
        load_library("gf256")
    assert native.build.build() == {}
    assert load_library("gf256").danlu_more() == 42
    assert len(list(folder.glob("*.so"))) == len(list(folder.glob("*.c"))), "the earlier one is removed"


@pytest.mark.parametrize(("compiler", "reason"), [("no-such-compiler", "no C compiler"), ("false", "failed")])
def test_a_build_without_a_compiler_says_so_and_leaves_nothing(folder: Path, compiler: str, reason: str) -> None:
    failures = native.build.build((compiler,))
    assert set(failures) == {source.stem for source in folder.glob("*.c")}
    assert all(reason in why for why in failures.values())
    assert {file.suffix for file in folder.iterdir()} == {".c", ".h"}


def test_a_library_that_cannot_be_loaded_says_so(folder: Path) -> None:
    native.build.library_path("gf256").write_bytes(b"compiled for another machine")
    with pytest.raises(NativeUnavailableError, match="cannot be loaded"):
        load_library("gf256")


HERE = Path("/proc/cpuinfo").read_text()
BY_VECTORS = ("gf256", "fingerprint")
"""Libraries that ask a processor which vectors it has."""


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("vectors", ["", *(name for name in ("ssse3", "avx2") if name in HERE)])
def test_narrower_vectors_give_the_same(vectors: str) -> None:
    """As on a processor that has these and no others; a feature is known by the length of its name."""
    for other in {*native.build.FOLDER.glob("*.c")} - {native.build.FOLDER / f"{name}.c" for name in BY_VECTORS}:
        other.unlink()  # takes its time to compile
    lesser = f"-DCPU_HAS(feature)=(sizeof(feature) == {len(vectors) + 1})"
    assert native.build.build((*native.build.COMPILE_COMMAND, lesser)) == {}
    dice = np.random.default_rng(3)
    data, total = (dice.integers(0, 256, 1000, dtype=np.uint8) for _ in range(2))
    products = reed_solomon._products(29)
    expected = total ^ products[data]
    halves = np.concatenate([products[:16], products[::16]])
    multiply_add = reed_solomon._multiply_add(load_library("gf256"))
    multiply_add(total.ctypes.data, data.ctypes.data, halves.ctypes.data, len(data))
    assert np.array_equal(total, expected)
    in_c, weights = NativeFingerprint(load_library("fingerprint")), dice.integers(0, 2**63, 999, dtype=np.uint64)
    for dtype in (np.uint8, np.uint16, np.uint32, np.uint64):
        rows = dice.integers(0, np.iinfo(dtype).max, (7, 999), dtype=dtype)
        sums = np.zeros((2, 7), np.uint64)
        for way, result in zip((in_c, NumpyFingerprint()), sums, strict=True):
            way.add_row_sums(rows, weights, 5, result)
        assert np.array_equal(*sums)
        assert in_c.any_has_bits(rows, int(rows[6, 998])) and not in_c.any_has_bits(rows & dtype(1), 3)


@pytest.mark.usefixtures("folder")
def test_the_slow_way_is_told_once() -> None:
    checksum._crc32c_backend.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match=r"twice as long: copy_hash.c was not compiled"):
            assert crc32c(b"123456789") == 0xE3069283
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert copy_with_crc32c(b"123456789", bytearray(9)) == 0xE3069283
    finally:
        checksum._crc32c_backend.cache_clear()

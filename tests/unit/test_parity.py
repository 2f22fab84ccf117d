"""Whatever may be lost comes back, bit for bit; what may not be is refused."""

from itertools import combinations

import numpy as np
import pytest
import zfec
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu import native
from danlu.native import NativeUnavailableError
from danlu.storage.checkpoint import reed_solomon
from danlu.storage.checkpoint.reed_solomon import STRIPE_BYTES, TooManyErasuresError, encode, reconstruct


def made(k: int, length: int, seed: int = 0) -> list[bytes]:
    generator = np.random.default_rng(seed)
    return [generator.bytes(length) for _ in range(k)]


def without(blocks: list[bytes], lost: tuple[int, ...]) -> dict[int, bytes]:
    return {number: block for number, block in enumerate(blocks) if number not in lost}


@pytest.mark.parametrize(("k", "m"), [(1, 1), (1, 3), (2, 1), (3, 2), (4, 1), (4, 4), (5, 3), (8, 2), (7, 4)])
def test_every_loss_that_parity_covers_is_brought_back(k: int, m: int) -> None:
    data = made(k, 97)
    blocks = [*data, *(bytes(block) for block in encode(data, m))]
    for number in range(m + 1):
        for lost in combinations(range(k + m), number):
            whole = reconstruct(without(blocks, lost), k, m, 97)
            assert [bytes(block) for block in whole] == blocks, lost


@pytest.mark.parametrize(("k", "m"), [(1, 1), (3, 2), (5, 3)])
def test_one_loss_more_is_refused(k: int, m: int) -> None:
    data = made(k, 8)
    blocks = [*data, *(bytes(block) for block in encode(data, m))]
    for lost in combinations(range(k + m), m + 1):
        with pytest.raises(
            TooManyErasuresError, match=rf"{m + 1} of {k + m} blocks are lost \({lost[0]}, .*{m} at most"
        ):
            reconstruct(without(blocks, lost), k, m, 8)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape_and_any_loss(data: st.DataObject) -> None:
    k = data.draw(st.integers(1, 40), "k")
    m = data.draw(st.integers(1, 12), "m")
    length = data.draw(st.one_of(st.integers(0, 300), st.integers(STRIPE_BYTES - 70, STRIPE_BYTES + 70)), "length")
    blocks = made(k, length, data.draw(st.integers(0, 2**32), "seed"))
    blocks += [bytes(block) for block in encode(blocks, m)]
    lost = tuple(data.draw(st.sets(st.integers(0, k + m - 1), max_size=m), "lost"))
    assert [bytes(block) for block in reconstruct(without(blocks, lost), k, m, length)] == blocks


def test_the_largest_code() -> None:
    data = made(200, 33)
    blocks = [*data, *(bytes(block) for block in encode(data, 56))]
    lost = tuple(range(0, 112, 2))
    assert [bytes(block) for block in reconstruct(without(blocks, lost), 200, 56, 33)] == blocks


def test_the_first_parity_is_the_xor_and_more_leave_it_as_it_is() -> None:
    data = made(6, 1000)
    exclusive_or = np.bitwise_xor.reduce([np.frombuffer(block, np.uint8) for block in data]).tobytes()
    for m in (1, 2, 5):
        parities = [bytes(block) for block in encode(data, m)]
        assert parities[0] == exclusive_or
        assert parities == [bytes(block) for block in encode(data, 5)][:m]


def test_products_are_those_of_the_field() -> None:
    """Against multiplication from first principles: polynomials over two elements, modulo 0x11D."""

    def slow(a: int, b: int) -> int:
        product = 0
        for bit in range(8):
            if b >> bit & 1:
                product ^= a << bit
        for bit in range(14, 7, -1):
            if product >> bit & 1:
                product ^= 0x11D << (bit - 8)
        return product

    for a in range(256):
        assert reed_solomon._products(a).tolist() == [slow(a, b) for b in range(256)]
        assert not a or reed_solomon._multiply(a, reed_solomon._inverse(a)) == 1


@pytest.mark.parametrize(("k", "m"), [(3, 2), (10, 4)])
def test_it_repairs_whatever_another_code_repairs(k: int, m: int) -> None:
    """zfec has other weights, so other parity; what comes back must be the same data."""
    data = made(k, 500)
    theirs = dict(enumerate(zfec.Encoder(k, k + m).encode(data)))
    ours = dict(enumerate([*data, *(bytes(block) for block in encode(data, m))]))
    generator = np.random.default_rng(3)
    for _ in range(20):
        kept = sorted(generator.choice(k + m, k, replace=False).tolist())
        back = zfec.Decoder(k, k + m).decode([theirs[number] for number in kept], kept)
        mine = reconstruct({number: ours[number] for number in kept}, k, m, 500)[:k]
        assert [bytes(block) for block in mine] == list(back) == data


@pytest.mark.parametrize("length", [0, 1, 15, 16, 63, 64, 65, 1000, STRIPE_BYTES + 1])
def test_without_a_compiler_the_same_parity_comes_slower(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    data = made(4, length)
    quick = [bytes(block) for block in encode(data, 3)]

    def refuse(name: str) -> None:
        raise NativeUnavailableError("there is no C compiler `cc`")

    monkeypatch.setattr(native, "load_library", refuse)
    reed_solomon._kernel.cache_clear()
    try:
        if length:
            with pytest.warns(RuntimeWarning, match="ten times.*no C compiler"):
                reed_solomon._kernel()
        assert [bytes(block) for block in encode(data, 3)] == quick
    finally:
        reed_solomon._kernel.cache_clear()


def test_what_is_there_is_not_copied() -> None:
    block = bytearray(b"abcd")
    whole = reconstruct({0: block}, 1, 1, 4)
    block[0] = 0
    assert whole[0][0] == 0 and bytes(whole[1]) == b"abcd"


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"equally long, but have \[3, 4\]"):
        encode([b"abc", b"abcd"], 1)
    for k, m in ((0, 1), (1, 0), (200, 57)):
        with pytest.raises(ValueError, match="256 together"):
            encode([b"x"] * k, m)
    with pytest.raises(ValueError, match="numbered 0 to 2, but 3"):
        reconstruct({3: b"x"}, 2, 1, 1)
    with pytest.raises(ValueError, match="block 1 must have 3 bytes, but has 2"):
        reconstruct({0: b"abc", 1: b"ab"}, 2, 1, 3)

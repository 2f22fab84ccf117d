"""Tokens into text while they arrive: never half a character, and in the end all of the text."""

from pathlib import Path

import numpy as np
import pytest

from danlu.storage.data.text_stream import TextStream
from danlu.storage.data.tokenizer import BytesTokenizer, HuggingFaceTokenizer, Tokenizer

TEXTS = ["plain", "中文, 🙂🙂 and é", "line\nbreak\ttab", " spaces  between ", ""]


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> HuggingFaceTokenizer:
    """A byte-level tokenizer of few merges: most characters beyond ASCII are several tokens."""
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizer.json is read with tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["the furnace and the elixir " * 20], trainer)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    made.save(str(path))
    return HuggingFaceTokenizer(Path(path))


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return BytesTokenizer() if request.param == "bytes" else request.getfixturevalue("bpe")


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_complete_characters_and_add_up_to_the_text(tokenizer: Tokenizer, text: str) -> None:
    stream = TextStream(tokenizer)
    pieces = [stream.add(int(token)) for token in tokenizer.encode(text)]
    assert "".join(pieces) == text and stream.end() == ""
    assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_appears_with_its_last_byte() -> None:
    stream = TextStream(BytesTokenizer())
    assert [stream.add(byte) for byte in "a中b".encode()] == ["a", "", "", "中", "b"]


def test_bytes_that_make_no_character_are_shown_as_one_all_the_same() -> None:
    stream = TextStream(BytesTokenizer())
    ids = [ord("a"), 0xE4, 0xB8, ord("b"), 0xFF, 0xE4]
    text = "".join(stream.add(byte) for byte in ids) + stream.end()
    assert text == BytesTokenizer().decode(np.array(ids)) == "a\ufffdb\ufffd\ufffd"
    assert stream.end() == ""


def test_what_comes_before_is_not_repeated(bpe: HuggingFaceTokenizer) -> None:
    prompt, text = "the furnace", " and 中"
    stream = TextStream(bpe, bpe.encode(prompt).tolist())
    assert "".join(stream.add(int(token)) for token in bpe.encode(text)) + stream.end() == text

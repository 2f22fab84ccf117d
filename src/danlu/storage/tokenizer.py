"""Text into tokens: plain bytes, or a Hugging Face `tokenizer.json`."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from danlu.spec import SpecError
from danlu.spec.problem import nearest, problem_at

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HfTokenizer

TokenIds = NDArray[Any]
"""Token ids in any unsigned dtype that holds the vocabulary."""

BYTES = "bytes"

USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>", "<｜end▁of▁sentence｜>")
"""How the tokenizers in use call the end of a text."""


class Tokenizer(Protocol):
    """What a data set needs of a tokenizer."""

    @property
    def name(self) -> str:
        """What the index records; two tokenizers with one name give the same ids."""
        ...

    @property
    def vocabulary(self) -> int:
        """Every id is below this."""
        ...

    @property
    def end_of_text(self) -> int:
        """The id that ends a document."""
        ...

    @property
    def portable(self) -> "PortableTokenizer":
        """What makes the same tokenizer on another machine."""
        ...

    def encode(self, text: str) -> TokenIds:
        """The ids of one text, without its end."""
        ...

    def encode_many(self, texts: Sequence[str]) -> list[TokenIds]:
        """The ids of several texts, on several cores where the tokenizer can."""
        ...

    def decode(self, ids: TokenIds) -> str:
        """The text of these ids; what is cut off at the ends becomes �."""
        ...


class PortableTokenizer(NamedTuple):
    """A tokenizer as it travels to another machine, which needs no file of its own for it."""

    file: str
    """`bytes`, or the name of its file."""
    content: bytes = b""
    end_of_text: str = ""

    def open(self) -> Tokenizer:
        """The tokenizer."""
        return FileTokenizer(Path(self.file), self.end_of_text, self.content) if self.content else BytesTokenizer()


@dataclass(frozen=True)
class BytesTokenizer:
    """Ids 0 to 255 are the bytes of UTF-8 and 256 is the end of a text: 257 in all, which a model may round up."""

    name: str = BYTES
    vocabulary: int = 257
    end_of_text: int = 256

    @property
    def portable(self) -> PortableTokenizer:
        """Its name is all it needs."""
        return PortableTokenizer(BYTES)

    def encode(self, text: str) -> TokenIds:
        """The bytes of a text."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_many(self, texts: Sequence[str]) -> list[TokenIds]:
        """The bytes of several texts."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: TokenIds) -> str:
        """The text of these ids; bytes cut off in the middle of a character become �, an end shows as <|endoftext|>."""
        texts = np.split(ids, np.flatnonzero(ids == self.end_of_text))
        pieces = [
            piece[piece < self.end_of_text].astype(np.uint8).tobytes().decode(errors="replace") for piece in texts
        ]
        return USUAL_ENDS[0].join(pieces)


class FileTokenizer:
    """A Hugging Face `tokenizer.json`, read with the `tokenizers` package."""

    def __init__(self, path: Path, end_of_text: str | None = None, content: bytes | None = None) -> None:
        """Read a file, or take its `content` where that is at hand."""
        content = _content(path) if content is None else content
        self._tokenizer = _parsed(path, content)
        # A file may carry the truncation and padding of the model it was made for, which would cut documents short.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # A document that speaks of "<|endoftext|>" must not end there: special tokens in text are plain text.
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = f"{path.name} sha256:{hashlib.sha256(content).hexdigest()[:16]}"
        self.vocabulary = max(ids.values()) + 1  # ids may have gaps, so that their number is not enough
        end = _end_of_text(path, self._tokenizer, list(ids), end_of_text)
        self.end_of_text = ids[end]
        self.portable = PortableTokenizer(path.name, content, end)

    def encode(self, text: str) -> TokenIds:
        """The ids of one text; no begin or end is added."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def encode_many(self, texts: Sequence[str]) -> list[TokenIds]:
        """The ids of several texts, on all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: TokenIds) -> str:
        """The text of these ids, the end of a text included."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def open_tokenizer(name: str, end_of_text: str | None = None) -> Tokenizer:
    """The tokenizer of this name: `bytes`, or the path of a `tokenizer.json`; `end_of_text` names its closing token."""
    if name != BYTES:
        return FileTokenizer(Path(name), end_of_text)
    if end_of_text is not None:
        message = f'is "{end_of_text}", but the bytes tokenizer has its own end of text (256)'
        raise SpecError([problem_at(Path(name), 1, "end-of-text", message, "leave it out")])
    return BytesTokenizer()


def _content(path: Path) -> bytes:
    if not path.is_file():
        inside = path / "tokenizer.json"
        suggestion = f"did you mean `{inside}`?" if inside.is_file() else f"`{BYTES}`, or the path of a tokenizer.json"
        raise SpecError([problem_at(path, 1, "tokenizer", "is not a file", suggestion)])
    return path.read_bytes()


def _parsed(path: Path, content: bytes) -> "HfTokenizer":
    try:
        from tokenizers import Tokenizer as HfTokenizer
    except ImportError:
        message = "needs the `tokenizers` package, which is not installed"
        raise SpecError([problem_at(path, 1, "tokenizer", message, "pip install 'danlu[hf]'")]) from None
    try:
        return HfTokenizer.from_buffer(content)
    except Exception as error:  # the package raises bare Exception for a file it cannot read
        raise SpecError([problem_at(path, 1, "tokenizer", f"is not a tokenizer.json: {error}")]) from None


def _end_of_text(path: Path, tokenizer: "HfTokenizer", names: list[str], wanted: str | None) -> str:
    """The name asked for, or the only usual one the vocabulary has; anything else is for the user to decide."""
    usual = [name for name in USUAL_ENDS if name in names]
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    candidates = list(dict.fromkeys(usual + special))
    if wanted is not None:
        if wanted in names:
            return wanted
        message = f'"{wanted}" is not in the vocabulary'
        raise SpecError([problem_at(path, 1, "end-of-text", message, nearest(wanted, candidates))])
    if len(usual) == 1:
        return usual[0]
    message = f"cannot be told: {len(usual)} tokens have a usual name for it"
    listed = ", ".join(candidates[:20]) or "none is marked special; see the file's vocabulary"
    raise SpecError([problem_at(path, 1, "end-of-text", message, f"give --end-of-text TOKEN; candidates: {listed}")])

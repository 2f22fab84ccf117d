"""Text into tokens: plain bytes, or a Hugging Face `tokenizer.json`."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from danlu.spec import SpecError
from danlu.spec.files import read_bytes
from danlu.spec.problem import problem_at, suggest_name
from danlu.storage.data.chat_template import ChatTemplate, DocumentText, load_chat_template
from danlu.storage.data.shuffle import IntArray
from danlu.storage.data.token_marks import pack_marks

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HfTokenizer

TokenIds = NDArray[Any]
"""Token ids in any unsigned dtype that holds the vocabulary."""

BYTES_TOKENIZER = "bytes"
MAX_TOKENIZER_BYTES = 64 << 20
"""Largest tokenizer.json; those in use have some 20 MB at most."""

COMMON_EOS_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eos|>", "<｜end▁of▁sentence｜>")
"""Names of the end-of-text token in common tokenizers."""


class Tokenizer(Protocol):
    """What a data set needs of a tokenizer."""

    @property
    def name(self) -> str:
        """Recorded in the index; two tokenizers with the same name give the same ids."""
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
    def serialized(self) -> "SerializedTokenizer":
        """Enough to create the same tokenizer on another machine."""
        ...

    def encode(self, text: str) -> TokenIds:
        """The ids of one text, without its end."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """The ids of several texts, on several cores if the tokenizer supports that."""
        ...

    def encode_chats(self, chats: Sequence[DocumentText]) -> list[IntArray]:
        """The words (`token_marks`) of rendered conversations: special tokens are read, and answers are counted."""
        ...

    def decode(self, ids: TokenIds) -> str:
        """The text of these ids; incomplete characters at the ends become �."""
        ...


class SerializedTokenizer(NamedTuple):
    """A tokenizer as sent to another machine, which does not need the file."""

    file: str
    """`bytes`, or the name of its file."""
    content: bytes = b""
    end_of_text: str = ""

    def load(self) -> Tokenizer:
        """The tokenizer."""
        return (
            HuggingFaceTokenizer(Path(self.file), self.end_of_text, self.content) if self.content else BytesTokenizer()
        )


@dataclass(frozen=True)
class BytesTokenizer:
    """Ids 0 to 255 are UTF-8 bytes and 256 is the end of a text: 257 in all, which a model may round up."""

    name: str = BYTES_TOKENIZER
    vocabulary: int = 257
    end_of_text: int = 256

    @property
    def serialized(self) -> SerializedTokenizer:
        """Its name is enough."""
        return SerializedTokenizer(BYTES_TOKENIZER)

    def encode(self, text: str) -> TokenIds:
        """The bytes of a text."""
        return np.frombuffer(text.encode(), dtype=np.uint8)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """The bytes of several texts."""
        return [self.encode(text) for text in texts]

    def encode_chats(self, chats: Sequence[DocumentText]) -> list[IntArray]:
        """Never called: bytes have no special tokens, which a chat template needs."""
        raise NotImplementedError("the bytes tokenizer has no chat template")

    def decode(self, ids: TokenIds) -> str:
        """The text of these ids; incomplete characters become �, an end of text is shown as <|endoftext|>."""
        texts = np.split(ids, np.flatnonzero(ids == self.end_of_text))
        parts = [part[part < self.end_of_text].astype(np.uint8).tobytes().decode(errors="replace") for part in texts]
        return COMMON_EOS_TOKENS[0].join(parts)


class HuggingFaceTokenizer:
    """A Hugging Face `tokenizer.json`, read with the `tokenizers` package."""

    def __init__(self, path: Path, end_of_text: str | None = None, content: bytes | None = None) -> None:
        """Read a file, or use its `content` if given."""
        content = _read_tokenizer_file(path) if content is None else content
        self._tokenizer = _without_limits(_parse_tokenizer(path, content))
        self._chat_tokenizer: HfTokenizer | None = None
        # A document that contains "<|endoftext|>" must not end there: special tokens in text are plain text.
        self._tokenizer.encode_special_tokens = True
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        self.name = f"{path.name} sha256:{hashlib.sha256(content).hexdigest()[:16]}"
        self.vocabulary = max(ids.values()) + 1  # ids may have gaps, so their count is not enough
        end = _choose_eos_token(path, self._tokenizer, list(ids), end_of_text)
        self.end_of_text = ids[end]
        self.serialized = SerializedTokenizer(path.name, content, end)

    def encode(self, text: str) -> TokenIds:
        """The ids of one text; no begin or end token is added."""
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)

    def encode_batch(self, texts: Sequence[str]) -> list[TokenIds]:
        """The ids of several texts, on all cores."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    @property
    def special_tokens(self) -> list[str]:
        """The texts of its special tokens."""
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values() if token.special]

    def encode_chats(self, chats: Sequence[DocumentText]) -> list[IntArray]:
        """The words of rendered conversations; a token that begins before an answer belongs to the prompt."""
        if self._chat_tokenizer is None:
            file, content, _ = self.serialized
            self._chat_tokenizer = _without_limits(_parse_tokenizer(Path(file), content))
        encodings = self._chat_tokenizer.encode_batch([chat.text for chat in chats], add_special_tokens=False)
        words: list[IntArray] = []
        for chat, encoding in zip(chats, encodings, strict=True):
            starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
            counted = np.zeros(len(starts), dtype=bool)
            for first, end in chat.answers or ():
                counted |= (starts >= first) & (starts < end)
            ends = np.zeros(len(starts), dtype=bool)
            ends[-1:] = True
            words.append(pack_marks(np.array(encoding.ids, dtype=np.int64), ends, counted))
        return words

    def decode(self, ids: TokenIds) -> str:
        """The text of these ids, the end of a text included."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def open_tokenizer(name: str, end_of_text: str | None = None) -> Tokenizer:
    """The tokenizer of this name: `bytes`, or the path of a `tokenizer.json`; `end_of_text` names its closing token."""
    if name != BYTES_TOKENIZER:
        return HuggingFaceTokenizer(Path(name), end_of_text)
    if end_of_text is not None:
        message = f'is "{end_of_text}", but the bytes tokenizer has its own end of text (256)'
        raise SpecError([problem_at(Path(name), 1, "end-of-text", message, "omit it")])
    return BytesTokenizer()


def open_chat_template(tokenizer: Tokenizer, path: Path) -> ChatTemplate:
    """The chat template beside the file of a tokenizer."""
    if not isinstance(tokenizer, HuggingFaceTokenizer):
        message = "has no chat template: conversations need the special tokens of a model's own tokenizer"
        raise SpecError([problem_at(path, 1, "tokenizer", message, "--tokenizer MODEL/tokenizer.json")])
    return load_chat_template(path, tokenizer.special_tokens)


def _read_tokenizer_file(path: Path) -> bytes:
    if not path.is_file():
        inside = path / "tokenizer.json"
        suggestion = (
            f"did you mean `{inside}`?" if inside.is_file() else f"`{BYTES_TOKENIZER}`, or the path of a tokenizer.json"
        )
        raise SpecError([problem_at(path, 1, "tokenizer", "is not a file", suggestion)])
    return read_bytes(path, MAX_TOKENIZER_BYTES)


def _parse_tokenizer(path: Path, content: bytes) -> "HfTokenizer":
    try:
        from tokenizers import Tokenizer as HfTokenizer
    except ImportError:
        message = "needs the `tokenizers` package, which is not installed"
        raise SpecError([problem_at(path, 1, "tokenizer", message, "pip install 'danlu[hf]'")]) from None
    try:
        return HfTokenizer.from_buffer(content)
    except Exception as error:  # the package raises bare Exception for a file it cannot read
        hint = "a file that the `tokenizers` package wrote, or `bytes`"
        raise SpecError([problem_at(path, 1, "tokenizer", f"is not a tokenizer.json: {error}", hint)]) from None


def _without_limits(tokenizer: "HfTokenizer") -> "HfTokenizer":
    """A file may carry the truncation and padding of the model it was made for, which would cut documents short."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _choose_eos_token(path: Path, tokenizer: "HfTokenizer", names: list[str], wanted: str | None) -> str:
    """The requested name, or the only common one in the vocabulary; anything else is for the user to decide."""
    common = [name for name in COMMON_EOS_TOKENS if name in names]
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    candidates = list(dict.fromkeys(common + special))
    if wanted is not None:
        if wanted in names:
            return wanted
        message = f'"{wanted}" is not in the vocabulary'
        raise SpecError([problem_at(path, 1, "end-of-text", message, suggest_name(wanted, candidates))])
    if len(common) == 1:
        return common[0]
    message = f"is ambiguous: {len(common)} tokens look like an end of text"
    listed = ", ".join(candidates[:20]) or "none is marked special; see the file's vocabulary"
    raise SpecError([problem_at(path, 1, "end-of-text", message, f"give --end-of-text TOKEN; candidates: {listed}")])

"""The tokenizer of a run as the files that Hugging Face's tools read."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from danlu.storage.data.tokenizer import BytesTokenizer, Tokenizer

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
GENERATION_FILE = "generation_config.json"


@dataclass(frozen=True)
class ExportTokenizer:
    """The tokenizer that a run was trained with, and the token that ends a document of its data."""

    tokenizer: Tokenizer
    end_of_text: int

    @property
    def content(self) -> bytes:
        """Its `tokenizer.json`; that of `bytes` is made here."""
        return self.tokenizer.serialized.content or bytes_tokenizer_json()

    def is_in(self, folder: Path) -> bool:
        """Whether a folder has the same `tokenizer.json`, to the byte."""
        path = folder / TOKENIZER_FILE
        return path.is_file() and path.read_bytes() == self.content

    def write(self, folder: Path, length: int) -> None:
        """Write `tokenizer.json`, and the settings with which other tools end a text where the run's data does."""
        name = self.tokenizer.decode(np.array([self.end_of_text], dtype=np.uint32))
        settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": name,
            "model_max_length": length,
            "clean_up_tokenization_spaces": False,
        }
        (folder / TOKENIZER_FILE).write_bytes(self.content)
        _write_json(folder / TOKENIZER_CONFIG_FILE, settings)
        _write_json(folder / SPECIAL_TOKENS_FILE, {"eos_token": name})

    def write_generation(self, folder: Path) -> None:
        """Write `generation_config.json`, keeping what an existing one says of other things than special tokens."""
        path = folder / GENERATION_FILE
        kept = json.loads(path.read_text("utf-8")) if path.is_file() else {}
        kept = {key: value for key, value in kept.items() if not key.endswith("_token_id")}
        _write_json(path, kept | self.special_tokens)

    @property
    def special_tokens(self) -> dict[str, Any]:
        """Keys of `config.json` and `generation_config.json`; a family's own defaults would be other tokens."""
        return {"bos_token_id": None, "eos_token_id": self.end_of_text, "pad_token_id": None}


def bytes_tokenizer_json() -> bytes:
    """A `tokenizer.json` with the ids of `bytes`: a byte-level BPE that merges nothing."""
    end = BytesTokenizer().end_of_text
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    name = BytesTokenizer().decode(np.array([end], dtype=np.uint32))
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": end, "content": name, **special}],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {letter: byte for byte, letter in _byte_letters()}, "merges": []},
    }
    return json.dumps(content, ensure_ascii=False, indent=1).encode()


def _byte_letters() -> Iterator[tuple[int, str]]:
    """The visible letter that a byte-level tokenizer writes every byte as: itself, or the next one from U+0100 on."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    following = 0x100
    for byte in range(256):
        if byte in visible:
            yield byte, chr(byte)
        else:
            yield byte, chr(following)
            following += 1


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", "utf-8")

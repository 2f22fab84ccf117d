"""The index of a data set: `index.json`, written last, so that a folder without it is not a data set."""

import hashlib
from math import inf
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from danlu.spec import Problem, SpecError
from danlu.spec.description import PositiveInt, SpecModel, TupleOf
from danlu.spec.files import read_bytes
from danlu.spec.problem import problem_at
from danlu.storage.data.token_marks import MARK_BITS

INDEX_FILE = "index.json"
CHECKSUM_BLOCK_BYTES = 64 << 10
"""Bytes per checksum: a sample of 4,096 tokens touches one or two blocks, and verifying one takes some 10 µs."""
MAX_INDEX_BYTES = 256 << 20
"""Largest index: a shard takes some 250 bytes, so that a million of them fit."""
REBUILD_HINT = "copy it again, or build the data set again with `danlu data build … --force`"

TokenDtype = Literal["uint8", "uint16", "uint32"]
OPTIONAL_SHA256 = Field(default="", pattern=r"^([0-9a-f]{64})?$")


class ShardInfo(SpecModel):
    """One file of tokens and its sidecar files."""

    file: str = Field(pattern=r"^\d{5,}\.bin$")
    tokens: PositiveInt
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    documents: int = Field(default=0, ge=0)
    """Documents that end in it."""
    sums: str = OPTIONAL_SHA256
    """Hash of its `.crc`: a CRC-32C of every 64 KiB, little-endian. Empty where there is none."""
    ends: str = OPTIONAL_SHA256
    """Hash of its `.ends`: the position after each document, 8 bytes little-endian. Empty where there is none."""
    counted: int | None = Field(default=None, ge=0)
    """Tokens whose prediction the loss counts; None in a data set without a loss mask, where all of them count."""

    def sidecar_name(self, suffix: Literal[".crc", ".ends"]) -> str:
        """Name of a sidecar file of the shard."""
        return self.file.removesuffix(".bin") + suffix


class DatasetVersion(SpecModel):
    """The data set as it was after a build or an append: its first shards."""

    shards: PositiveInt
    tokens: PositiveInt
    documents: PositiveInt
    unigram_loss: float = Field(ge=0, lt=inf)
    counts: str = OPTIONAL_SHA256
    """Hash of `edition-<number>.counts`: how often each token occurs, 8 bytes little-endian."""


class DatasetIndex(SpecModel):
    """The content of `index.json`."""

    format: Literal[1, 2] = 1
    """2 with a loss mask, which earlier releases cannot read; 1 without."""
    tokenizer: str
    """Name of the tokenizer; for a file it includes its hash."""
    vocabulary: PositiveInt
    """Token ids are below this. A model may round it up."""
    end_of_text: int = Field(ge=0)
    """Token that ends every document."""
    dtype: TokenDtype
    tokens: PositiveInt
    documents: PositiveInt
    unigram_loss: float = Field(ge=0, lt=inf)
    """Entropy of the token distribution in nats: the loss of a model that only knows how frequent each token is."""
    sources: TupleOf[str]
    shards: TupleOf[ShardInfo] = Field(min_length=1)
    chat_template: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    """Hash of the template of its conversations, whose answers alone the loss counts; None for plain text."""
    editions: TupleOf[DatasetVersion] = ()
    """The versions after the build and after each append. Empty in a data set of an earlier release, which has one."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.dtype != (expected := word_dtype(self.vocabulary, self.has_loss_mask)):
            raise ValueError(f"`dtype` must be {expected} for a vocabulary of {self.vocabulary}")
        if self.format != (2 if self.has_loss_mask else 1):
            raise ValueError(f"`format` must be 2 with a `chat_template` and 1 without, but is {self.format}")
        if self.end_of_text >= self.vocabulary:
            raise ValueError(f"`end_of_text` must be below the vocabulary of {self.vocabulary}, not {self.end_of_text}")
        if (held := sum(shard.tokens for shard in self.shards)) != self.tokens:
            raise ValueError(f"`tokens` must be what the shards hold, {held}, but is {self.tokens} instead")
        for number, version in enumerate(self.editions):
            if (held := sum(shard.tokens for shard in self.shards[: version.shards])) != version.tokens:
                raise ValueError(f"`editions` must say what their shards hold, but number {number} does not: {held}")
        if self.editions and self.editions[-1].shards != len(self.shards):
            raise ValueError("`editions` must end with all shards, but the last does not")
        return self

    @property
    def has_loss_mask(self) -> bool:
        """Whether its shards hold words with marks (`token_marks`) instead of tokens."""
        return self.chat_template is not None

    @property
    def counted(self) -> int:
        """Tokens whose prediction the loss counts."""
        return sum(shard.tokens if shard.counted is None else shard.counted for shard in self.shards)

    @property
    def all_versions(self) -> tuple[DatasetVersion, ...]:
        """At least one: a data set without a list of versions has one."""
        only_version = DatasetVersion(
            shards=len(self.shards), tokens=self.tokens, documents=self.documents, unigram_loss=self.unigram_loss
        )
        return self.editions or (only_version,)

    def fingerprint(self, version: int) -> str:
        """A hash of everything a sample of this version depends on."""
        digest = hashlib.sha256(f"{self.tokenizer}\n{self.dtype}\n".encode())
        for shard in self.shards[: self.all_versions[version].shards]:
            digest.update(f"{shard.tokens} {shard.sha256}\n".encode())
        return digest.hexdigest()

    def extends(self, older: "DatasetIndex") -> bool:
        """Whether this is the older one, or that one plus appends."""
        version = len(older.all_versions) - 1
        return len(self.all_versions) > version and self.fingerprint(version) == older.fingerprint(version)


def token_counts_file(version: int) -> str:
    """Name of the file with the token counts of a version."""
    return f"edition-{version:05d}.counts"


def token_dtype(vocabulary: int) -> TokenDtype:
    """The smallest dtype that holds every id of a vocabulary."""
    if vocabulary > 2**32:
        raise ValueError(f"`vocabulary` must be at most 2^32, but is {vocabulary} instead")
    return "uint8" if vocabulary <= 2**8 else "uint16" if vocabulary <= 2**16 else "uint32"


def word_dtype(vocabulary: int, marked: bool) -> TokenDtype:
    """The dtype in shards: of tokens, or of tokens with marks."""
    return token_dtype(vocabulary << MARK_BITS) if marked else token_dtype(vocabulary)


def disk_dtype(dtype: TokenDtype) -> "np.dtype[Any]":
    """The dtype in a shard file: little-endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")


def read_index(folder: Path) -> DatasetIndex:
    """Read and validate `index.json`; raises with the reason if the folder is not a data set."""
    path = folder / INDEX_FILE
    try:
        text = read_bytes(path, MAX_INDEX_BYTES)
    except OSError as error:
        message = "is not a data set: " + (
            f"it has no {INDEX_FILE}" if folder.is_dir() else error.strerror or "unreadable"
        )
        raise SpecError([problem_at(folder, 1, "data", message, f"danlu data build SOURCE… -o {folder}")]) from None
    return parse_index(text, str(path))


def parse_index(text: bytes, path: str) -> DatasetIndex:
    """Parse the index in these bytes of `path`; raises with every problem."""
    try:
        return DatasetIndex.model_validate_json(text)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise SpecError(
            [
                Problem(
                    file=path,
                    line=1,
                    key=".".join(map(str, e["loc"])) or "file",
                    message=e["msg"],
                    suggestion=REBUILD_HINT,
                )
                for e in details
            ]
        ) from None

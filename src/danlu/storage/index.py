"""What a data set says of itself: `index.json`, written last, so that a folder without it is not a data set."""

import hashlib
from math import inf
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from danlu.spec import Problem, SpecError
from danlu.spec.description import Count, Description, Many
from danlu.spec.problem import problem_at

INDEX = "index.json"
BLOCK = 64 << 10
"""Bytes that share one checksum: a sample of 4,096 tokens takes one or two, and a checksum of one takes some 10 µs."""
REBUILD = "copy it again, or build the data set again with `danlu data build … --force`"

TokenDtype = Literal["uint8", "uint16", "uint32"]
Sha256 = Field(default="", pattern=r"^([0-9a-f]{64})?$")


class Shard(Description):
    """One file of tokens, and what lies beside it."""

    file: str = Field(pattern=r"^\d{5,}\.bin$")
    tokens: Count
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    documents: int = Field(default=0, ge=0)
    """Documents that end in it."""
    sums: str = Sha256
    """Hash of its `.crc`: a CRC-32C of every 64 KiB, little-endian. Empty where there is none."""
    ends: str = Sha256
    """Hash of its `.ends`: the place behind each document, 8 bytes little-endian. Empty where there is none."""

    def beside(self, suffix: Literal[".crc", ".ends"]) -> str:
        """The name of a file that belongs to the shard."""
        return self.file.removesuffix(".bin") + suffix


class Edition(Description):
    """The data set as it was after a build or an append: its first shards."""

    shards: Count
    tokens: Count
    documents: Count
    unigram_loss: float = Field(ge=0, lt=inf)
    counts: str = Sha256
    """Hash of `edition-<number>.counts`: how often each token occurs, 8 bytes little-endian."""


class Index(Description):
    """What `index.json` says of a data set."""

    format: Literal[1] = 1
    tokenizer: str
    """Name of the tokenizer; that of a file carries its hash."""
    vocabulary: Count
    """Token ids are below this. A model may round it up."""
    end_of_text: int = Field(ge=0)
    """Token that ends every document."""
    dtype: TokenDtype
    tokens: Count
    documents: Count
    unigram_loss: float = Field(ge=0, lt=inf)
    """Entropy of the token distribution in nats: the loss of a model that knows how frequent each token is, no more."""
    sources: Many[str]
    shards: Many[Shard] = Field(min_length=1)
    editions: Many[Edition] = ()
    """What was built, and what it was after each append. None in a data set of an earlier release, which has one."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.dtype != token_dtype(self.vocabulary):
            raise ValueError(f"`dtype` must be {token_dtype(self.vocabulary)} for a vocabulary of {self.vocabulary}")
        if self.end_of_text >= self.vocabulary:
            raise ValueError(f"`end_of_text` must be below the vocabulary of {self.vocabulary}, not {self.end_of_text}")
        if (held := sum(shard.tokens for shard in self.shards)) != self.tokens:
            raise ValueError(f"`tokens` must be what the shards hold, {held}, but is {self.tokens} instead")
        for number, edition in enumerate(self.editions):
            if (held := sum(shard.tokens for shard in self.shards[: edition.shards])) != edition.tokens:
                raise ValueError(f"`editions` must say what their shards hold, but number {number} does not: {held}")
        if self.editions and self.editions[-1].shards != len(self.shards):
            raise ValueError("`editions` must end with all shards, but the last does not")
        return self

    @property
    def all_editions(self) -> tuple[Edition, ...]:
        """At least one: a data set without a list of them is its own first."""
        whole = Edition(
            shards=len(self.shards), tokens=self.tokens, documents=self.documents, unigram_loss=self.unigram_loss
        )
        return self.editions or (whole,)

    def fingerprint(self, edition: int) -> str:
        """A hash of everything a sample of this edition depends on."""
        digest = hashlib.sha256(f"{self.tokenizer}\n{self.dtype}\n".encode())
        for shard in self.shards[: self.all_editions[edition].shards]:
            digest.update(f"{shard.tokens} {shard.sha256}\n".encode())
        return digest.hexdigest()

    def extends(self, older: "Index") -> bool:
        """Whether this is the older one, or what an append made of it."""
        edition = len(older.all_editions) - 1
        return len(self.all_editions) > edition and self.fingerprint(edition) == older.fingerprint(edition)


def counts_file(edition: int) -> str:
    """The name of the file that says how often each token of an edition occurs."""
    return f"edition-{edition:05d}.counts"


def token_dtype(vocabulary: int) -> TokenDtype:
    """The smallest dtype that holds every id of a vocabulary."""
    if vocabulary > 2**32:
        raise ValueError(f"`vocabulary` must be at most 2^32, but is {vocabulary} instead")
    return "uint8" if vocabulary <= 2**8 else "uint16" if vocabulary <= 2**16 else "uint32"


def on_disk(dtype: TokenDtype) -> "np.dtype[Any]":
    """The dtype in a shard file: little-endian on every machine."""
    return np.dtype(dtype).newbyteorder("<")


def read_index(folder: Path) -> Index:
    """Read and check `index.json`, or say why the folder is not a data set."""
    path = folder / INDEX
    try:
        text = path.read_bytes()
    except OSError as error:
        message = "is not a data set: " + (f"it has no {INDEX}" if folder.is_dir() else error.strerror or "unreadable")
        raise SpecError([problem_at(folder, 1, "data", message, f"danlu data build SOURCE… -o {folder}")]) from None
    return parse_index(text, str(path))


def parse_index(text: bytes, path: str) -> Index:
    """The index in these bytes of `path`, or every problem with it."""
    try:
        return Index.model_validate_json(text)
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise SpecError(
            [
                Problem(
                    file=path, line=1, key=".".join(map(str, e["loc"])) or "file", message=e["msg"], suggestion=REBUILD
                )
                for e in details
            ]
        ) from None

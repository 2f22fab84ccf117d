"""Frames between a rendezvous store and its ranks: both sides prove that they know the job's token, and sign frames.

A connection begins with two nonces and a proof of either side; keys for its frames are derived from both. A frame is
its length, a signature over its number and contents, and a few byte strings: nothing that arrives is ever executed, and
nothing longer than `MAX_FRAME_BYTES` is read. Frames are signed, not encrypted: no secrets belong in a store.
"""

import hmac
import secrets
import struct
from dataclasses import dataclass

MAX_FRAME_BYTES = 1 << 20
NONCE_BYTES = PROOF_BYTES = 32
_MAGIC = b"DANLUST1"
_HELLO = struct.Struct(f">8sq{NONCE_BYTES}s")
"""Magic, generation of the client, its nonce."""
HELLO_BYTES = _HELLO.size
_TAG_BYTES = 16
_LENGTH = struct.Struct(">I")
HEADER_BYTES = _LENGTH.size + _TAG_BYTES
TOKEN_BYTES = 32


class ChannelError(RuntimeError):
    """What arrived is not of a peer that knows the token, or was changed on the way."""


@dataclass(frozen=True)
class Hello:
    """What a client says first."""

    generation: int
    nonce: bytes

    def encode(self) -> bytes:
        """For the wire."""
        return _HELLO.pack(_MAGIC, self.generation, self.nonce)

    @classmethod
    def decode(cls, raw: bytes) -> "Hello":
        """Raises `ChannelError` if it is of another protocol."""
        magic, generation, nonce = _HELLO.unpack(raw)
        if magic != _MAGIC:
            raise ChannelError("what connected does not speak the protocol of the store")
        return cls(generation, nonce)


def new_nonce() -> bytes:
    """Never used twice."""
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True)
class Handshake:
    """The nonces of both sides, and what follows from them and the token."""

    token: bytes
    hello: Hello
    server_nonce: bytes

    def proof(self, side: bytes) -> bytes:
        """What only a holder of the token can send, as `client` or as `server`."""
        return self._derive(b"proof of the " + side)

    def check(self, side: bytes, proof: bytes) -> None:
        """Raises `ChannelError` unless the other side knows the token."""
        if not hmac.compare_digest(proof, self.proof(side)):
            raise ChannelError(f"the {side.decode()} does not know the token of this job")

    def channels(self) -> tuple["SigningKey", "SigningKey"]:
        """Keys for the frames of the client and of the server."""
        return SigningKey(self._derive(b"frames of the client")), SigningKey(self._derive(b"frames of the server"))

    def _derive(self, purpose: bytes) -> bytes:
        return hmac.digest(self.token, purpose + self.hello.encode() + self.server_nonce, "sha256")


class SigningKey:
    """Signs the frames of one direction, or checks them; each counts its own."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def seal(self, body: bytes) -> bytes:
        """A frame for the wire."""
        if len(body) > MAX_FRAME_BYTES:
            raise ChannelError(f"a frame must have at most {MAX_FRAME_BYTES:,} bytes, but has {len(body):,}")
        return _LENGTH.pack(len(body)) + self._tag(body) + body

    def open(self, header: bytes, body: bytes) -> bytes:
        """What is in a frame; raises `ChannelError` if it was changed, repeated or left out."""
        if not hmac.compare_digest(header[_LENGTH.size :], self._tag(body)):
            raise ChannelError("a frame is not signed by the other side, or not in its order")
        return body

    def _tag(self, body: bytes) -> bytes:
        self._number += 1
        return hmac.digest(self._key, self._number.to_bytes(8) + body, "sha256")[:_TAG_BYTES]


def body_length(header: bytes) -> int:
    """Bytes that follow a header; raises `ChannelError` if they are too many."""
    (length,) = _LENGTH.unpack_from(header)
    if length > MAX_FRAME_BYTES:
        raise ChannelError(f"a frame must have at most {MAX_FRAME_BYTES:,} bytes, but announces {length:,}")
    return int(length)


def encode_fields(code: int, *fields: bytes) -> bytes:
    """A code and byte strings as the contents of a frame."""
    return bytes([code]) + b"".join(_LENGTH.pack(len(field)) + field for field in fields)


def decode_fields(body: bytes) -> tuple[int, list[bytes]]:
    """The reverse; raises `ChannelError` if lengths do not fit."""
    if not body:
        raise ChannelError("a frame must have contents, but is empty")
    fields, at = [], 1
    while at < len(body):
        start = at + _LENGTH.size
        if start > len(body):
            raise ChannelError("a frame ends within a length")
        (length,) = _LENGTH.unpack_from(body, at)
        at = start + length
        if at > len(body):
            raise ChannelError("a frame ends within a field")
        fields.append(body[start:at])
    return body[0], fields

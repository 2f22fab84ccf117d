"""Strangers at the port of a rendezvous store: what they send, from nothing at all to frames with a bit flipped."""

import random
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

from danlu.comm.store_channel import (
    HEADER_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    ChannelError,
    Handshake,
    Hello,
    SigningKey,
    body_length,
    encode_fields,
    new_nonce,
)
from danlu.comm.store_server import Request, StoreServer
from danlu.comm.token_store import TokenStore

TOKEN = bytes(range(32))
GENERATION = 3
TIMEOUT = timedelta(seconds=20)


def new_server() -> StoreServer:
    """On a port of loopback."""
    return StoreServer(socket.create_server(("127.0.0.1", 0), backlog=1024), TOKEN, GENERATION)


class Strangers:
    """Send messages to a store, each over as many connections as it takes; count what a server must never grant."""

    def __init__(self, server: StoreServer, seed: int = 0) -> None:
        self.random, self.sent, self.granted = random.Random(seed), 0, 0
        host, _, port = server.address.rpartition(":")
        self._place = host, int(port)
        self._kinds: list[Callable[[], None]] = [
            self._noise,
            self._cut_hello,
            self._wrong_proof,
            self._replayed_proof,
            self._stale_generation,
            self._flipped_frame,
            self._repeated_frame,
            self._huge_frame,
            self._malformed_request,
        ]

    def attack(self) -> None:
        """One connection of a kind drawn at random."""
        self.random.choice(self._kinds)()

    def _connect(self) -> socket.socket:
        connection = socket.create_connection(self._place, timeout=20)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    def _send(self, connection: socket.socket, raw: bytes) -> None:
        self.sent += 1
        with suppress(OSError):  # it has been closed already, which is as good an answer
            connection.sendall(raw)

    def _expect_closed(self, connection: socket.socket) -> None:
        """Whatever else the server says is something that it granted."""
        connection.settimeout(20)
        with suppress(ConnectionError):
            self.granted += bool(connection.recv(1))

    def _noise(self) -> None:
        with self._connect() as connection:
            self._send(connection, self.random.randbytes(self.random.randrange(48, 400)))
            self._expect_closed(connection)

    def _cut_hello(self) -> None:
        with self._connect() as connection:
            hello = Hello(GENERATION, new_nonce()).encode()
            self._send(connection, hello[: self.random.randrange(len(hello))])
            connection.shutdown(socket.SHUT_WR)
            self._expect_closed(connection)

    def _hello(self, connection: socket.socket, token: bytes, generation: int = GENERATION) -> Handshake:
        hello = Hello(generation, new_nonce())
        self._send(connection, hello.encode())
        return Handshake(token, hello, _receive(connection, NONCE_BYTES + PROOF_BYTES)[:NONCE_BYTES])

    def _wrong_proof(self) -> None:
        with self._connect() as connection:
            handshake = self._hello(connection, self.random.randbytes(32))
            self._send(connection, handshake.proof(b"client"))
            self._expect_closed(connection)

    def _replayed_proof(self) -> None:
        """The server's own proof, or the proof of another connection, sent back."""
        with self._connect() as connection:
            hello = Hello(GENERATION, new_nonce())
            self._send(connection, hello.encode())
            answer = _receive(connection, NONCE_BYTES + PROOF_BYTES)
            other = Handshake(TOKEN, hello, new_nonce()).proof(b"client")
            self._send(connection, self.random.choice([answer[NONCE_BYTES:], other]))
            self._expect_closed(connection)

    def _stale_generation(self) -> None:
        """One that knows the token, of a world that is over: it is told so, and nothing that it sends is done."""
        with self._connect() as connection:
            handshake = self._hello(connection, TOKEN, self.random.randrange(GENERATION))
            mine, theirs = handshake.channels()
            self._send(connection, handshake.proof(b"client"))
            assert _frame(connection, theirs)[0] == 4
            self._send(connection, mine.seal(encode_fields(Request.SET, b"kept", b"changed")))
            self._expect_closed(connection)

    def _member(self, connection: socket.socket) -> SigningKey:
        """Become one who knows the token, to see that even its frames are checked."""
        handshake = self._hello(connection, TOKEN)
        mine, theirs = handshake.channels()
        self._send(connection, handshake.proof(b"client"))
        assert _frame(connection, theirs)[0] == 1
        self._theirs = theirs
        return mine

    def _flipped_frame(self) -> None:
        with self._connect() as connection:
            frame = bytearray(self._member(connection).seal(encode_fields(Request.SET, b"kept", b"changed")))
            at = self.random.randrange(8 * 4, 8 * len(frame))  # past the length: that is another attack
            frame[at // 8] ^= 1 << at % 8
            self._send(connection, bytes(frame))
            self._expect_closed(connection)

    def _repeated_frame(self) -> None:
        with self._connect() as connection:
            frame = self._member(connection).seal(encode_fields(Request.ADD, b"counted once", b"0"))
            self._send(connection, frame)
            assert _frame(connection, self._theirs)[0] == 1
            self._send(connection, frame)
            self._expect_closed(connection)

    def _huge_frame(self) -> None:
        with self._connect() as connection:
            self._member(connection)
            self._send(connection, struct.pack(">I", self.random.randrange((1 << 20) + 1, 1 << 32)) + bytes(16))
            self._expect_closed(connection)

    def _malformed_request(self) -> None:
        """Signed, and still nonsense: refused in words, or closed, but never carried out."""
        with self._connect() as connection:
            mine = self._member(connection)
            body = self.random.choice(
                [bytes([200]), bytes([1]), bytes([3, 0, 0, 0, 1]), self.random.randbytes(30), b""]
            )
            self._send(connection, mine.seal(body))
            with suppress(ConnectionError, ChannelError):
                self.granted += _frame(connection, self._theirs)[0] == 1 and body[:1] != bytes([Request.CHECK])


def unharmed(server: StoreServer) -> bool:
    """Whether a rank that knows the token still finds what was there, and nothing else."""
    store = TokenStore(server.address, TOKEN, GENERATION, TIMEOUT)
    return store.get("kept") == b"as it was" and set_of_keys(store) <= {"kept", "counted once"}


def set_of_keys(store: TokenStore) -> set[str]:
    """The keys that are known here; an unknown one shows as a number too many."""
    known = {key for key in ("kept", "counted once") if store.check([key])}
    return known if store.num_keys() == len(known) else known | {"unknown"}


def _receive(connection: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        some = connection.recv(count - len(received))
        if not some:
            raise ConnectionResetError
        received += some
    return received


def _frame(connection: socket.socket, theirs: SigningKey) -> bytes:
    header = _receive(connection, HEADER_BYTES)
    return theirs.open(header, _receive(connection, body_length(header)))

"""A client of a `StoreServer`: reads, writes and waits for keys, if it knows the job's token. No torch."""

import socket
import ssl
import threading
import time
from contextlib import suppress

from danlu.comm.store_channel import (
    HEADER_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    ChannelError,
    Handshake,
    Hello,
    body_length,
    decode_fields,
    encode_fields,
    new_nonce,
)
from danlu.comm.store_server import Reply, Request
from danlu.comm.store_tls import client_context
from danlu.spec.resilience import TlsFiles

_FIRST_RETRY, _SLOWEST_RETRY = 0.02, 1.0
_ANSWER_SECONDS = 30.0
"""Silence of the server after which it counts as dead; waits are asked for in shorter pieces."""
_WAIT_MILLISECONDS = 1000
"""Longest piece: other threads get their turn between two."""


_CLOSED = (ConnectionError, ssl.SSLEOFError, ssl.SSLZeroReturnError)
"""How a connection fails whose other side has ended."""
_READ_KEYS = 4096
"""Keys that are asked for at once."""
_RECONNECT_SECONDS = 0.1


class StoreError(RuntimeError):
    """A store cannot be reached, does not know the token, or refuses; the message says which."""


class StoreClosedError(StoreError):
    """Nobody serves the store, on a host that answers: the server has ended, and another may take its place."""


class StoreClient:
    """One connection, which several threads may use."""

    def __init__(
        self,
        endpoint: str,
        token: bytes,
        generation: int,
        seconds: float,
        *,
        answer_seconds: float = _ANSWER_SECONDS,
        tls: TlsFiles | None = None,
    ) -> None:
        """Connect to `host:port`, and try again until the server is there or `seconds` are over.

        A server that is silent for `answer_seconds` counts as dead. With certificates, the connection is encrypted.
        """
        self._answer_seconds, self._tls = answer_seconds, client_context(tls) if tls else None
        self.endpoint, self.generation = endpoint, generation
        self._token, self._lock = token, threading.Lock()
        self._connection = self._connect(seconds)

    @property
    def local_address(self) -> str:
        """This host's address on the network over which it reaches the store."""
        return str(self._connection.getsockname()[0])

    def close(self) -> None:
        """Leave the store."""
        self._connection.close()

    def wait(self, keys: list[str], seconds: float) -> bool:
        """Whether all keys are set within so many seconds."""
        deadline = time.monotonic() + seconds
        while True:
            left = max(0, min(_WAIT_MILLISECONDS, round(1000 * (deadline - time.monotonic()))))
            if self.ask(Request.WAIT, str(left), *keys) is not None:
                return True
            if time.monotonic() >= deadline:
                return False

    def read(self, keys: list[str], seconds: float) -> list[bytes] | None:
        """The values of all keys, which are waited for; None if one is not set within so many seconds."""
        deadline, values = time.monotonic() + seconds, list[bytes]()
        while len(values) < len(keys):
            left = max(0, min(_WAIT_MILLISECONDS, round(1000 * (deadline - time.monotonic()))))
            found = self.ask(Request.READ, str(left), *keys[len(values) : len(values) + _READ_KEYS])
            if found is None and time.monotonic() >= deadline:
                return None
            values += found or []
        return values

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self.ask(Request.SET, key, value)

    def get(self, key: str) -> bytes | None:
        """The value of a key; None if it is not set."""
        found = self.ask(Request.GET, key)
        return found[0] if found else None

    def ask(self, request: Request, *fields: str | bytes) -> list[bytes] | None:
        """The fields of the answer; None if what was asked for is missing."""
        raw = encode_fields(request, *(each.encode() if isinstance(each, str) else bytes(each) for each in fields))
        with self._lock:
            try:
                self._connection.sendall(self._mine.seal(raw))
                code, answer = self._receive(self._connection)
            except (OSError, ChannelError) as error:
                self._connection.close()
                kind = StoreClosedError if isinstance(error, _CLOSED) else StoreError
                raise kind(f"the store at {self.endpoint} does not answer: {error}") from None
        if code == Reply.REFUSED:
            raise StoreError(f"the store at {self.endpoint} refused: {answer[0].decode(errors='replace')}")
        if code == Reply.STALE:
            raise self._stale(answer)
        return None if code == Reply.MISSING else answer

    def _stale(self, answer: list[bytes]) -> StoreError:
        now = answer[0].decode(errors="replace")
        return StoreError(f"generation {self.generation} of this run is over: the store serves generation {now}")

    def _connect(self, seconds: float) -> socket.socket:
        host, _, port = self.endpoint.rpartition(":")
        deadline, pause = time.monotonic() + seconds, _FIRST_RETRY
        while True:
            try:
                connection = socket.create_connection((host.strip("[]"), int(port)), timeout=self._answer_seconds)
                with suppress(OSError):
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return self._greet(self._encrypted(connection))
            except OSError as error:
                if isinstance(error, ssl.SSLError) and not isinstance(error, _CLOSED):
                    raise StoreError(
                        f"the store at {self.endpoint} must accept the certificate of `resilience.tls`, and show one "
                        f"of the same authority, but: {error}"
                    ) from None
                if time.monotonic() > deadline:
                    kind = StoreClosedError if isinstance(error, _CLOSED) else StoreError
                    raise kind(
                        f"the store at {self.endpoint} must be reached within {seconds:.0f} s, "
                        f"but: {error} (is rank 0 running, and does it have the same token?)"
                    ) from None
                time.sleep(pause)
                pause = min(1.5 * pause, _SLOWEST_RETRY)

    def _encrypted(self, connection: socket.socket) -> socket.socket:
        if self._tls is None:
            return connection
        try:
            return self._tls.wrap_socket(connection)
        except BaseException:
            connection.close()
            raise

    def _greet(self, connection: socket.socket) -> socket.socket:
        hello = Hello(self.generation, new_nonce())
        try:
            connection.sendall(hello.encode())
            raw = _receive_exactly(connection, NONCE_BYTES + PROOF_BYTES)
            handshake = Handshake(self._token, hello, raw[:NONCE_BYTES])
            try:
                handshake.check(b"server", raw[NONCE_BYTES:])
            except ChannelError as error:
                raise StoreError(f"who listens at {self.endpoint} is not this job's store: {error}") from None
            connection.sendall(handshake.proof(b"client"))
            self._mine, self._theirs = handshake.channels()
            code, answer = self._receive(connection)
            if code == Reply.STALE:
                raise self._stale(answer)
        except BaseException:
            connection.close()
            raise
        return connection

    def _receive(self, connection: socket.socket) -> tuple[int, list[bytes]]:
        header = _receive_exactly(connection, HEADER_BYTES)
        body = _receive_exactly(connection, body_length(header))
        return decode_fields(self._theirs.open(header, body))


class LastingStoreClient(StoreClient):
    """Connects again to a server that takes another's place, and asks again: for what may be asked twice."""

    def __init__(
        self,
        endpoint: str,
        token: bytes,
        seconds: float,
        *,
        silence: float,
        absence: float,
        tls: TlsFiles | None = None,
    ) -> None:
        """A host that does not answer for `silence` seconds is lost; one on which nobody serves for `absence` is too.

        The first is the shorter: while a host says that nobody serves there, nobody can give orders from there.
        """
        self._absence = absence
        super().__init__(endpoint, token, 0, seconds, answer_seconds=silence, tls=tls)

    def ask(self, request: Request, *fields: str | bytes) -> list[bytes] | None:
        """The fields of the answer; None if what was asked for is missing."""
        deadline = time.monotonic() + self._absence
        while True:
            try:
                return super().ask(request, *fields)
            except StoreClosedError:
                self._connect_again(deadline)

    def _connect_again(self, deadline: float) -> None:
        while True:
            try:
                self._connection = self._connect(0.0)
                return
            except StoreClosedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RECONNECT_SECONDS)


def _receive_exactly(connection: socket.socket, count: int) -> bytes:
    received = bytearray()
    while len(received) < count:
        if not (some := connection.recv(count - len(received))):
            raise ConnectionResetError("it closed the connection")
        received += some
    return bytes(received)
